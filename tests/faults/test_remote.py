"""One of two upstreams is killed, stopped and restarted under load."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.load import IN_FLIGHT, LOST, load
from tests.faults.requests import busy_message
from tests.models.python_models import tensors, write_python_model
from tests.support.busy_model import FOREVER, write_busy_model
from tests.support.raw_clients import call
from tests.support.remote import free_port, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton, real_program
from tests.support.watching import metrics, until

_SOON_SECS = 10  # much less than the interval after failed checks

pytestmark = pytest.mark.slow
Server = ServerProcess | Triton


async def healthy(front: ServerProcess, server: Server) -> bool:
    """True if the server in front sends calls to the upstream."""
    found = await metrics(front)
    name = 'headrace_endpoint_healthy{{endpoint="{}",model="busy",version="1"}}'
    for url in (f"grpc://{server.grpc}", server.url):
        if name.format(url) in found:
            return bool(found[name.format(url)])
    raise AssertionError("there is no such server")


async def ready(front: ServerProcess) -> bool:
    """Readiness of the model on the server in front."""
    async with grpc.aio.insecure_channel(front.grpc) as channel:
        asked = pb.ModelReadyRequest(name="busy").SerializeToString()
        return pb.ModelReadyResponse.FromString(await call(channel, "ModelReady", asked)).ready


# `busy` for a Triton without ONNX Runtime; a COST is 50 microseconds.
_BUSY = """
    import time

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            inputs = [{t.name(): t.as_numpy() for t in r.inputs()} for r in requests]
            time.sleep(min(max(int(given["COST"].max()) for given in inputs) * 5e-5, 600))
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", given["VALUE"])])
                for given in inputs
            ]
"""
_BUSY_CONFIG = (
    "max_batch_size: 8\ninstance_group { count: 1 kind: KIND_CPU }\n"
    + tensors("input", ("VALUE", "INT64", "1"), ("COST", "INT64", "1"))
    + tensors("output", ("RESULT", "INT64", "1"))
)


class Servers:
    """Two upstreams with the model, and the server in front of them.

    `kind` is `grpc` or `http` for headrace as upstream, or a real Triton.
    """

    def __init__(self, stack: ExitStack, folder: Path, kind: str) -> None:
        self._stack = stack
        self._over_http = kind == "http"
        self._folder = folder
        self._program = real_program() if kind == "triton" else None
        self._models = folder / "there"
        if self._program:
            write_python_model(self._models, "busy", _BUSY, _BUSY_CONFIG)
        else:
            write_busy_model(self._models)
        self.first: Server
        self.second: Server
        self.first = self.start(free_port())
        self.second = self.start(free_port())
        write_remote(
            folder / "here", "busy", *self.addresses(),
            max_in_flight=str(IN_FLIGHT), wait_secs="8", health_timeout_secs="3",
        )  # fmt: skip
        self.front = stack.enter_context(ServerProcess(folder / "here"))
        with Scraper(self.front.metrics) as scraper:
            scraper.until_reached("busy", 2)

    def addresses(self) -> list[str]:
        both = (self.first, self.second)
        return [one.url if self._over_http else f"grpc://{one.grpc}" for one in both]

    def start(self, port: int) -> Server:
        """A server with the model at this port."""
        if self._program:
            log = self._folder / f"log {port} {monotonic()}"
            triton = Triton(self._program, self._models, log, ports=(free_port(), port))
            self._stack.callback(triton.stop)
            triton.wait()
            return triton
        options = (f"--{'http' if self._over_http else 'grpc'}-port={port}",)
        return self._stack.enter_context(ServerProcess(self._models, options=options))

    def start_again(self, server: Server) -> Server:
        address = server.http if self._over_http else server.grpc
        return self.start(int(address.rpartition(":")[2]))


EITHER = pytest.mark.parametrize("servers", ["grpc", "http"], indirect=True)
EACH = pytest.mark.parametrize("servers", ["grpc", "http", "triton"], indirect=True)


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        found = Servers(stack, tmp_path, getattr(request, "param", "grpc"))
        yield found
        assert "bug " not in found.front.log
        assert "Traceback" not in found.front.log


@EACH
async def test_a_killed_upstream_fails_only_begun_requests(servers: Servers) -> None:
    async with load(servers.front) as under_way:
        assert servers.first.stop(signal.SIGKILL) != 0
        await until(lambda: healthy(servers.front, servers.first), lambda found: not found)
        await under_way.more()
        assert await ready(servers.front)
        lost = sum(under_way.failures.values())
        assert all(LOST in text for text in under_way.failures), under_way.failures
        assert lost <= IN_FLIGHT * 8
        servers.first = await asyncio.to_thread(servers.start_again, servers.first)
        begun = monotonic()
        await until(lambda: healthy(servers.front, servers.first), bool)
        assert monotonic() - begun < _SOON_SECS
        await under_way.more()
    assert sum(under_way.failures.values()) == lost


@EACH
async def test_a_stopped_upstream_loses_no_request(servers: Servers) -> None:
    async with load(servers.front) as under_way:
        for _ in range(2):
            stopping = asyncio.to_thread(servers.first.stop, signal.SIGTERM)
            await asyncio.gather(stopping, under_way.more())
            await until(lambda: healthy(servers.front, servers.first), lambda found: not found)
            servers.first = await asyncio.to_thread(servers.start_again, servers.first)
            await until(lambda: healthy(servers.front, servers.first), bool)
            await under_way.more()
    assert not under_way.failures


@EACH
async def test_a_hanging_upstream_delays_only_its_own_requests(servers: Servers) -> None:
    """The upstream gets no requests while silent, and is used again soon after it continues."""
    async with load(servers.front) as under_way:
        for _ in range(2):
            servers.first.send(signal.SIGSTOP)
            try:
                await until(lambda: healthy(servers.front, servers.first), lambda found: not found)
                await under_way.more()
            finally:
                servers.first.send(signal.SIGCONT)
            begun = monotonic()
            await until(lambda: healthy(servers.front, servers.first), bool)
            assert monotonic() - begun < _SOON_SECS
            await under_way.more()
    assert not under_way.failures, under_way.failures


async def test_without_upstreams_requests_wait_and_then_fail(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.front.grpc) as channel:
        for server in (servers.first, servers.second):
            assert server.stop(signal.SIGKILL) != 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel, "ModelInfer", busy_message("busy", 1))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "none of its servers can be reached" in (refused.value.details() or "")
        assert not await ready(servers.front)
        index = pb.RepositoryIndexResponse.FromString(await call(channel, "RepositoryIndex", b""))
        assert {model.reason for model in index.models if model.name == "busy"} == {
            "model 'busy' is not ready: none of its servers can be reached"
        }
        servers.second = await asyncio.to_thread(servers.start_again, servers.second)
        await until(lambda: ready(servers.front), bool)
        data = await call(channel, "ModelInfer", busy_message("busy", 1))
        assert pb.ModelInferResponse.FromString(data).id == "1"


@EITHER
async def test_a_cancelled_request_is_cancelled_on_the_upstream(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.front.grpc) as channel:
        outstanding = [
            f'headrace_endpoint_outstanding{{endpoint="{address}",model="busy",version="1"}}'
            for address in servers.addresses()
        ]

        async def under_way() -> float:
            found = await metrics(servers.front)
            return sum(found[name] for name in outstanding)

        asking = call(channel, "ModelInfer", busy_message("busy", 1, FOREVER))
        await until(under_way, lambda count: count == 1)
        asking.cancel()
        await until(under_way, lambda count: count == 0)
        for server in (servers.first, servers.second):
            server.stop(signal.SIGKILL)  # one of them computes for ever
