"""A pool whose servers want other credentials than before, or have other addresses."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

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
    """A server whose model is there for those who bring the token of the day."""

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
    """The server, and where it listens."""
    handler = Guarded()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_insecure_port(f"127.0.0.2:{port}")
        server.start()
        yield handler, f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


class Idle:
    """A scheduler with nothing to do."""

    def add_instance(self, instance: object) -> None:
        pass

    suspend = resume = add_instance

    def remove_instance(self, instance: object, removed: object) -> None:
        pass

    @property
    def quarantine(self) -> Quarantine:
        raise AssertionError("no worker is here")

    def fail_waiting(self, error: object) -> bool:
        return True

    def answer(self, call: object, answer: object, final: bool) -> None:
        pass


def pool_of(
    model: RemoteModel,
    scheduler: Idle,
    changed: Callable[[], None],
    counts: dict[str, EndpointCounts] | None = None,
) -> UpstreamPool:
    loop = asyncio.get_running_loop()
    counts = {} if counts is None else counts
    asked: Any = None  # of whoever may be asked by models: nobody
    version = Surroundings(signature(), scheduler, asked, loop, changed, counts)
    return UpstreamPool("m_0", model, version)


async def until(
    pool: UpstreamPool, changed: asyncio.Event, healthy: Callable[[bool], bool]
) -> None:
    """Wait for health checks."""
    async with asyncio.timeout(30):
        while not healthy(pool.healthy):
            changed.clear()
            await changed.wait()


def test_credentials_are_read_again(
    guarded: tuple[Guarded, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler, endpoint = guarded
    token = tmp_path / "token"
    token.write_text("Bearer one")
    parameters = {
        "endpoints": endpoint, "authorization_file": "token", "health_interval_secs": "0.05",
    }  # fmt: skip
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    model.begin(ModelConfig(name="m"), signature(), False)

    async def scenario() -> None:
        changed = asyncio.Event()
        pool = pool_of(model, Idle(), changed.set)
        try:
            handler.token = "Bearer two"
            await until(pool, changed, lambda healthy: not healthy)
            token.write_text("Bearer two\n")
            await pool.look_again()
            await until(pool, changed, bool)
            token.write_text("Bearer\0two")  # somebody is not done with it
            await pool.look_again()
            token.unlink()
            await pool.look_again()
            assert pool.healthy
            assert len(pool.endpoints) == 1
        finally:
            pool.close()
            await pool.closed()

    asyncio.run(scenario())
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("expected one line" in text for text in warnings)
    assert any("token cannot be read" in text for text in warnings)


def test_a_model_is_loaded_again_with_the_credentials_of_the_day(
    guarded: tuple[Guarded, str], tmp_path: Path
) -> None:
    handler, endpoint = guarded
    token = tmp_path / "token"
    token.write_text("Bearer one")
    parameters = {
        "endpoints": endpoint, "authorization_file": "token", "health_interval_secs": "0.05",
        "remote_load": "true",
    }  # fmt: skip
    handler.loaded = False
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    assert handler.loaded
    model.begin(ModelConfig(name="m"), signature(), False)

    async def scenario() -> None:
        changed = asyncio.Event()
        pool = pool_of(model, Idle(), changed.set)
        try:
            handler.token = "Bearer two"
            token.write_text("Bearer two")
            await pool.look_again()
            await until(pool, changed, bool)
            handler.loaded = False
            await until(pool, changed, lambda _: handler.loaded)
            await until(pool, changed, bool)
        finally:
            pool.close()
            await pool.closed()

    asyncio.run(scenario())


def test_names_are_looked_up_beside_other_work(
    guarded: tuple[Guarded, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that takes for ever, and whatever the system may refuse."""
    parameters = {"endpoints": guarded[1], "authorization_file": "token"}
    (tmp_path / "token").write_text("Bearer one")
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    model.begin(ModelConfig(name="m"), signature(), False)

    async def scenario() -> None:
        loop, other = asyncio.get_running_loop(), Event()
        threads = ThreadPoolExecutor(1)
        loop.set_default_executor(threads)
        threads.submit(other.wait)
        pool = pool_of(model, Idle(), lambda: None)
        try:
            async with asyncio.timeout(10):
                await pool.look_again()
                model.look = refused  # type: ignore[method-assign]
                await pool.look_again()
        finally:
            other.set()
            pool.close()
            await pool.closed()

    def refused() -> Any:
        raise OSError(24, "Too many open files")

    asyncio.run(scenario())
    assert "Too many open files" in caplog.text


def test_a_name_with_several_addresses_is_looked_up_again(
    guarded: tuple[Guarded, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(guarded[1].rpartition(":")[2])
    known = ["127.0.0.1", "127.0.0.2"]

    def look_up(host: str, port: int, **_: object) -> list[object]:
        assert host == "gpus"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    (tmp_path / "token").write_text("Bearer one")
    parameters = {"endpoints": f"grpc://gpus:{port}", "authorization_file": "token"}
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    model.begin(ModelConfig(name="m"), signature(), False)

    async def scenario() -> None:
        changed = asyncio.Event()
        pool = pool_of(model, Idle(), changed.set)

        async def until_all_serve() -> list[str]:
            async with asyncio.timeout(30):
                while not all(server.serves for server in pool.endpoints):
                    changed.clear()
                    await changed.wait()
            return [server.name for server in pool.endpoints]

        first, second = f"grpc://gpus:{port} (127.0.0.1)", f"grpc://gpus:{port} (127.0.0.2)"
        try:
            assert await until_all_serve() == [first, second]
            known.remove("127.0.0.1")
            await pool.look_again()
            assert await until_all_serve() == [second]
            known.append("127.0.0.1")
            await pool.look_again()
            assert await until_all_serve() == [second, first]
        finally:
            pool.close()
            await pool.closed()

    asyncio.run(scenario())


def test_counters_go_on_with_the_next_pool(guarded: tuple[Guarded, str], tmp_path: Path) -> None:
    parameters = {"endpoints": guarded[1], "authorization_file": "token"}
    (tmp_path / "token").write_text("Bearer one")
    spec = LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1)
    counts: dict[str, EndpointCounts] = {}

    async def scenario(model: RemoteModel, requests: int) -> None:
        model.begin(ModelConfig(name="m"), signature(), False)
        pool = pool_of(model, Idle(), lambda: None, counts)
        [series] = pool.endpoints
        assert series.counts.requests == requests
        series.counts.requests += 1
        pool.close()
        await pool.closed()

    for requests in range(2):
        asyncio.run(scenario(RemoteBackend().load(spec), requests))
    assert list(counts) == [guarded[1]]


@pytest.mark.parametrize(("alone", "level"), [(True, "ERROR"), (False, "WARNING")])
def test_nothing_is_lost_where_something_else_serves(
    guarded: tuple[Guarded, str], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    alone: bool, level: str,
) -> None:  # fmt: skip
    handler, endpoint = guarded
    parameters = {
        "endpoints": endpoint, "authorization_file": "token", "health_interval_secs": "0.05",
        "wait_secs": "0",
    }  # fmt: skip
    (tmp_path / "token").write_text("Bearer one")
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    model.begin(ModelConfig(name="m"), signature(), False)

    class Other(Idle):
        def fail_waiting(self, error: object) -> bool:
            return alone

    async def scenario() -> None:
        changed = asyncio.Event()
        pool = pool_of(model, Other(), changed.set)
        handler.token = "Bearer two"
        async with asyncio.timeout(30):
            while not pool.given_up:
                changed.clear()
                await changed.wait()
        pool.close()
        await pool.closed()

    asyncio.run(scenario())
    text = "none of its servers can be reached"
    assert [r.levelname for r in caplog.records if text in r.message] == [level]


def test_further_requests_are_refused_before_those_that_wait_fail(
    guarded: tuple[Guarded, str], tmp_path: Path
) -> None:
    """A client may have its next request ready when it is told: that would wait for ever."""
    handler, endpoint = guarded
    parameters = {
        "endpoints": endpoint, "authorization_file": "token", "health_interval_secs": "0.05",
        "wait_secs": "0",
    }  # fmt: skip
    (tmp_path / "token").write_text("Bearer one")
    model = RemoteBackend().load(LoadSpec("m", tmp_path / "1", tmp_path, parameters, version=1))
    model.begin(ModelConfig(name="m"), signature(), False)
    told: list[str] = []

    async def scenario() -> None:
        failed = asyncio.Event()

        class Waiting(Idle):
            def fail_waiting(self, error: object) -> bool:
                told.append("failed")
                failed.set()
                return True

        def changed() -> None:
            if pool.given_up:
                told.append("refused")

        pool = pool_of(model, Waiting(), changed)
        handler.token = "Bearer two"
        async with asyncio.timeout(30):
            await failed.wait()
        pool.close()
        await pool.closed()

    asyncio.run(scenario())
    assert told == ["refused", "failed"]
