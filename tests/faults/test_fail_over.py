"""A model's upstreams are killed, stopped and halted under load; ONNX Runtime takes over."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import grpc.aio
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.load import IN_FLIGHT, LOST, load
from tests.faults.requests import busy_message
from tests.support.busy_model import write_busy_model
from tests.support.http_socket import ask
from tests.support.raw_clients import call, procedure
from tests.support.remote import free_port, write_remote
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics, until

pytestmark = pytest.mark.slow
_SOON_SECS = 10  # much less than the interval after failed checks


class Servers:
    """The upstream and the server in front of it, which has the model as well."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._models = folder / "there"
        self._port = free_port()
        write_busy_model(self._models)
        self.there = self.start()
        here = folder / "here"
        write_remote(
            here, "busy", self.there.grpc, max_in_flight=str(IN_FLIGHT), wait_secs="0.5",
            fail_over="onnxruntime", execution="thread",
        )  # fmt: skip
        shutil.copytree(self._models / "busy" / "1", here / "busy" / "1")
        options = ("--model-control-mode=explicit", "--load-model=*")
        self.front = stack.enter_context(ServerProcess(here, options=options))

    def start(self) -> ServerProcess:
        options = (f"--grpc-port={self._port}",)
        return self._stack.enter_context(ServerProcess(self._models, options=options))

    async def active(self) -> str:
        found = await metrics(self.front)
        for backend in ("triton", "onnxruntime"):
            labels = f'backend="{backend}",model="busy",version="1"'
            if found[f"headrace_backend_active{{{labels}}}"]:
                return backend
        return ""

    async def until_active(self, backend: str) -> float:
        """Wait for `backend` to become active; the seconds that it took."""
        begun = monotonic()
        await until(self.active, lambda found: found == backend)
        return monotonic() - begun

    async def answers(self, channel: grpc.aio.Channel) -> str:
        asked = procedure(channel, "ModelInfer")(busy_message("busy", 1))
        await asked
        return str(dict(await asked.trailing_metadata())["headrace-backend"])


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        found = Servers(stack, tmp_path)
        yield found
        assert "bug " not in found.front.log
        assert "Traceback" not in found.front.log


async def test_a_killed_upstream_fails_only_begun_requests(servers: Servers) -> None:
    async with load(servers.front) as under_way, open_channel(servers) as channel:
        assert await servers.answers(channel) == "triton"
        assert servers.there.stop(signal.SIGKILL) != 0
        await servers.until_active("onnxruntime")
        await under_way.more()
        assert await servers.answers(channel) == "onnxruntime"
        lost = sum(under_way.failures.values())
        assert all(LOST in text for text in under_way.failures), under_way.failures
        assert lost <= IN_FLIGHT * 8
        servers.there = await asyncio.to_thread(servers.start)
        assert await servers.until_active("triton") < _SOON_SECS
        await under_way.more()
        assert await servers.answers(channel) == "triton"
    assert sum(under_way.failures.values()) == lost


def reason(front: ServerProcess) -> str:
    [entry] = json.loads(ask(front.http, "POST", "/v2/repository/index").body)
    return str(entry.get("reason", ""))


async def test_a_stopped_or_halted_upstream_loses_no_request(servers: Servers) -> None:
    async with load(servers.front) as under_way:
        for _ in range(2):
            await asyncio.gather(asyncio.to_thread(servers.there.stop), under_way.more())
            await servers.until_active("onnxruntime")
            assert reason(servers.front) == "requests go to onnxruntime instead of triton"
            await under_way.more()
            servers.there = await asyncio.to_thread(servers.start)
            await servers.until_active("triton")
            assert not reason(servers.front)
            await under_way.more()
        os.kill(servers.there.pid, signal.SIGSTOP)
        try:
            await servers.until_active("onnxruntime")
            await under_way.more()
        finally:
            os.kill(servers.there.pid, signal.SIGCONT)
        await servers.until_active("triton")
        await under_way.more()
    assert not under_way.failures


async def test_the_model_is_loaded_again_under_load(servers: Servers) -> None:
    """Also when its upstream is down: the model is loaded without it, and later with it."""
    config = '{"backend": "triton", "dynamic_batching": {"max_queue_delay_microseconds": %d}}'
    async with load(servers.front) as under_way, open_channel(servers) as channel:
        for number in range(3):
            message = pb.RepositoryModelLoadRequest(model_name="busy")
            message.parameters["config"].string_param = config % number
            await call(channel, "RepositoryModelLoad", message.SerializeToString())
            await under_way.more()
            if number == 0:
                await asyncio.to_thread(servers.there.stop)
                await servers.until_active("onnxruntime")
        servers.there = await asyncio.to_thread(servers.start)
        await servers.until_active("triton")
        await under_way.more()
    assert not under_way.failures


def open_channel(servers: Servers) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(servers.front.grpc)
