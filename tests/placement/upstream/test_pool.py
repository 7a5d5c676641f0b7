"""Pools of upstreams with changing credentials and addresses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any, cast

import grpc
import pytest

from headrace.core.model_spec import LoadSpec
from headrace.observability.statistics import EndpointCounts
from headrace.placement.placement import Surroundings
from headrace.placement.upstream.backend import RemoteBackend
from headrace.placement.upstream.model import RemoteModel
from headrace.placement.upstream.pool import UpstreamPool
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.quarantine import Quarantine
from tests.scheduling.fakes import signature


class Guarded(grpc.GenericRpcHandler):
    """A server whose model is ready for clients with the current token."""

    token = "Bearer one"
    loaded = True

    def service(self, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            if given != self.token:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is there")
            if details.method.endswith("ModelReady"):
                return pb.ModelReadyResponse(ready=self.loaded).SerializeToString()
            if details.method.endswith("RepositoryModelLoad"):
                self.loaded = True
                return b""
            if details.method.endswith("ModelMetadata") and self.loaded:
                return pb.ModelMetadataResponse(name="m").SerializeToString()
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def guarded() -> Iterator[tuple[Guarded, str]]:
    """The server and its port."""
    handler = Guarded()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [handler])
        port = server.add_insecure_port("0.0.0.0:0")  # as 127.0.0.1 and 127.0.0.2
        server.start()
        yield handler, f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


class Idle:
    """An idle scheduler; `told` are its failures and refusals, in order."""

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self.told: list[str] = []

    def add_instance(self, instance: object) -> None:
        pass

    suspend = resume = add_instance

    def remove_instance(self, instance: object, removed: object) -> None:
        pass

    @property
    def quarantine(self) -> Quarantine:
        raise AssertionError("no worker is here")

    def fail_waiting(self, error: object) -> bool:
        self.told.append("failed")
        return self.alone

    def answer(self, call: object, answer: object, final: bool) -> None:
        pass


class World:
    """A pool of a model's upstreams, with a token in a file."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.token = root / "token"
        self.token.write_text("Bearer one")
        self.root, self.endpoint = root, endpoint
        self.changed = asyncio.Event()
        self.counts: dict[str, EndpointCounts] = {}
        self.scheduler = Idle()

    async def load(self, **parameters: str) -> RemoteModel:
        given = {"endpoints": self.endpoint, "authorization_file": "token", **parameters}
        spec = LoadSpec("m", self.root / "1", self.root, given, version=1)
        model = await asyncio.to_thread(RemoteBackend().load, spec)
        model.begin(ModelConfig(name="m"), signature(), False)
        return model

    @asynccontextmanager
    async def pool(self, model: RemoteModel) -> AsyncIterator[UpstreamPool]:
        asked: Any = None  # no services for models
        loop = asyncio.get_running_loop()
        version = Surroundings(
            signature(), cast(Any, self.scheduler), asked, loop, self.note, self.counts
        )
        self.current = UpstreamPool("m_0", model, version)
        try:
            yield self.current
        finally:
            self.current.close()
            await self.current.closed()

    def note(self) -> None:
        if self.current.given_up:
            self.scheduler.told.append("refused")
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for health checks."""
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def world(guarded: tuple[Guarded, str], tmp_path: Path) -> World:
    return World(tmp_path, guarded[1])


OFTEN = {"health_interval_secs": "0.05"}


async def test_credentials_are_read_again(
    guarded: tuple[Guarded, str], world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.pool(await world.load(**OFTEN)) as pool:
        guarded[0].token = "Bearer two"
        await world.until(lambda: not pool.healthy)
        world.token.write_text("Bearer two\n")
        await pool.look_again()
        await world.until(lambda: pool.healthy)
        world.token.write_text("Bearer\0two")  # it is still in use
        await pool.look_again()
        world.token.unlink()
        await pool.look_again()
        assert pool.healthy
        assert len(pool.endpoints) == 1
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("expected one line" in text for text in warnings)
    assert any("token cannot be read" in text for text in warnings)


async def test_a_model_is_loaded_again_with_the_current_credentials(
    guarded: tuple[Guarded, str], world: World
) -> None:
    handler = guarded[0]
    handler.loaded = False
    model = await world.load(**OFTEN, remote_load="true")
    assert handler.loaded
    async with world.pool(model) as pool:
        handler.token = "Bearer two"
        world.token.write_text("Bearer two")
        await pool.look_again()
        await world.until(lambda: pool.healthy)
        handler.loaded = False
        await world.until(lambda: handler.loaded)
        await world.until(lambda: pool.healthy)


async def test_names_are_resolved_in_the_background(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A look-up may take for ever, and the system may refuse anything."""

    def refused() -> Any:
        raise OSError(24, "Too many open files")

    model, other, threads = await world.load(), Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(other.wait)
    async with world.pool(model) as pool:
        try:
            async with asyncio.timeout(60):
                await pool.look_again()
                model.clients.renewed = refused  # type: ignore[method-assign]
                await pool.look_again()
        finally:
            other.set()
    assert "Too many open files" in caplog.text


async def test_a_name_with_several_addresses_is_resolved_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(world.endpoint.rpartition(":")[2])
    known = ["127.0.0.1", "127.0.0.2"]

    def look_up(host: str, port: int, **_: object) -> list[object]:
        assert host == "gpus"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    world.endpoint = f"grpc://gpus:{port}"
    first, second = f"grpc://gpus:{port} (127.0.0.1)", f"grpc://gpus:{port} (127.0.0.2)"
    async with world.pool(await world.load()) as pool:

        async def serving() -> list[str]:
            await world.until(lambda: all(server.serves for server in pool.endpoints))
            return [server.name for server in pool.endpoints]

        assert await serving() == [first, second]
        known.remove("127.0.0.1")
        await pool.look_again()
        assert await serving() == [second]
        known.append("127.0.0.1")
        await pool.look_again()
        assert await serving() == [second, first]


async def test_counters_go_on_with_the_next_pool(world: World) -> None:
    for requests in range(2):
        async with world.pool(await world.load()) as pool:
            [series] = pool.endpoints
            assert series.counts.requests == requests
            series.counts.requests += 1
    assert list(world.counts) == [world.endpoint]


@pytest.mark.parametrize(("alone", "level"), [(True, "ERROR"), (False, "WARNING")])
async def test_without_reachable_upstreams_new_requests_are_refused_before_queued_ones_fail(
    guarded: tuple[Guarded, str], world: World, caplog: pytest.LogCaptureFixture, alone: bool,
    level: str,
) -> None:  # fmt: skip
    """A client may send its next request from within its answer; it would wait for ever.

    No request or error is lost where another backend serves.
    """
    world.scheduler.alone = alone
    async with world.pool(await world.load(**OFTEN, wait_secs="0")):
        guarded[0].token = "Bearer two"
        await world.until(lambda: "failed" in world.scheduler.told)
    assert world.scheduler.told[:2] == ["refused", "failed"]
    text = "none of its servers can be reached"
    assert [r.levelname for r in caplog.records if text in r.message] == [level]
