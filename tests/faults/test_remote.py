"""One of two servers of a model is killed, stopped and started again, under load."""

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio
import pytest

from headrace.wire.pb import grpc_service_pb2 as pb
from tests.faults.requests import busy_message
from tests.support.busy_model import FOREVER, write_busy_model
from tests.support.raw_clients import call
from tests.support.remote import write_remote
from tests.support.server_process import ServerProcess
from tests.support.watching import metrics, until

CALLERS = 24
IN_FLIGHT = 4  # calls at a time, of 8 rows each
LOST = "was lost during the request"

pytestmark = pytest.mark.slow


class Load:
    """Callers that ask again and again, each of its own number; what has come of it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.failures: Counter[str] = Counter()
        self.answered = 0
        self._channel = channel
        self._ends = False

    async def caller(self, value: int) -> None:
        """Ask until the end."""
        while not self._ends:
            try:
                data = await call(self._channel, "ModelInfer", busy_message("busy", value, 40))
            except grpc.aio.AioRpcError as error:
                self.failures[f"{error.code().name}: {error.details()}"] += 1
                continue
            answer = pb.ModelInferResponse.FromString(data)
            assert answer.id == str(value)
            assert answer.raw_output_contents[0] == value.to_bytes(8, "little")
            self.answered += 1

    async def more(self, count: int = 200) -> None:
        """Wait for so many further answers."""
        wanted = self.answered + count

        async def answered() -> int:
            return self.answered

        await until(answered, lambda found: found >= wanted)

    def end(self) -> None:
        """Have all callers end with what they have under way."""
        self._ends = True


@asynccontextmanager
async def load(server: ServerProcess) -> AsyncIterator[Load]:
    """Callers for as long as this lasts; none of them may get another's answer."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        under_way = Load(channel)
        async with asyncio.TaskGroup() as group:
            for value in range(CALLERS):
                group.create_task(under_way.caller(value))
            try:
                await under_way.more()
                yield under_way
            finally:
                under_way.end()


async def healthy(front: ServerProcess, server: ServerProcess) -> bool:
    """Whether the server in front sends calls to the other one."""
    labels = f'endpoint="grpc://{server.grpc}",model="busy",version="1"'
    return bool((await metrics(front))[f"headrace_endpoint_healthy{{{labels}}}"])


async def ready(front: ServerProcess) -> bool:
    """Whether the server in front says that the model is ready."""
    async with grpc.aio.insecure_channel(front.grpc) as channel:
        asked = pb.ModelReadyRequest(name="busy").SerializeToString()
        return pb.ModelReadyResponse.FromString(await call(channel, "ModelReady", asked)).ready


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Servers:
    """Two servers with the model, and the one in front of them."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._models = folder / "there"
        write_busy_model(self._models)
        self.first = self.start(free_port())
        self.second = self.start(free_port())
        write_remote(
            folder / "here", "busy", self.first.grpc, self.second.grpc,
            max_in_flight=str(IN_FLIGHT), wait_secs="0.5",
        )  # fmt: skip
        self.front = stack.enter_context(ServerProcess(folder / "here"))

    def start(self, port: int) -> ServerProcess:
        """A server with the model at this port."""
        options = (f"--grpc-port={port}",)
        return self._stack.enter_context(ServerProcess(self._models, options=options))

    def start_again(self, server: ServerProcess) -> ServerProcess:
        """Another one at the same port."""
        return self.start(int(server.grpc.rpartition(":")[2]))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Three processes."""
    with ExitStack() as stack:
        found = Servers(stack, tmp_path)
        yield found
        assert "bug " not in found.front.log
        assert "Traceback" not in found.front.log


def test_a_killed_server_takes_with_it_what_it_had_begun(servers: Servers) -> None:
    async def scenario() -> None:
        async with load(servers.front) as under_way:
            assert servers.first.stop(signal.SIGKILL) != 0
            await until(lambda: healthy(servers.front, servers.first), lambda found: not found)
            await under_way.more()
            assert await ready(servers.front)
            lost = sum(under_way.failures.values())
            assert all(LOST in text for text in under_way.failures), under_way.failures
            assert lost <= IN_FLIGHT * 8
            servers.first = servers.start_again(servers.first)
            begun = monotonic()
            await until(lambda: healthy(servers.front, servers.first), bool)
            assert monotonic() - begun < 2
            await under_way.more()
        assert sum(under_way.failures.values()) == lost

    asyncio.run(scenario())


def test_a_server_that_is_stopped_loses_nothing(servers: Servers) -> None:
    async def scenario() -> None:
        async with load(servers.front) as under_way:
            for _ in range(2):
                stopping = asyncio.to_thread(servers.first.stop)
                await asyncio.gather(stopping, under_way.more())
                await until(lambda: healthy(servers.front, servers.first), lambda found: not found)
                servers.first = await asyncio.to_thread(servers.start_again, servers.first)
                await until(lambda: healthy(servers.front, servers.first), bool)
                await under_way.more()
        assert not under_way.failures

    asyncio.run(scenario())


def test_without_any_server_requests_wait_and_then_fail(servers: Servers) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(servers.front.grpc) as channel:
            for server in (servers.first, servers.second):
                assert server.stop(signal.SIGKILL) != 0
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "ModelInfer", busy_message("busy", 1))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "none of its servers can be reached" in (refused.value.details() or "")
            assert not await ready(servers.front)
            servers.second = await asyncio.to_thread(servers.start_again, servers.second)
            await until(lambda: ready(servers.front), bool)
            data = await call(channel, "ModelInfer", busy_message("busy", 1))
            assert pb.ModelInferResponse.FromString(data).id == "1"

    asyncio.run(scenario())


def test_a_call_that_nobody_waits_for_is_cancelled_there(servers: Servers) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(servers.front.grpc) as channel:
            outstanding = [
                f'headrace_endpoint_outstanding{{endpoint="grpc://{server.grpc}",model="busy",version="1"}}'
                for server in (servers.first, servers.second)
            ]

            async def under_way() -> float:
                found = await metrics(servers.front)
                return sum(found[name] for name in outstanding)

            asking = call(channel, "ModelInfer", busy_message("busy", 1, FOREVER))
            await until(under_way, lambda count: count == 1)
            asking.cancel()
            await until(under_way, lambda count: count == 0)
            for server in (servers.first, servers.second):
                server.stop(signal.SIGKILL)  # one of them goes on computing for good

    asyncio.run(scenario())
