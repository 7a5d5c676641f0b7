"""Clients that send requests to an upstream's server continually."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.requests import busy_message
from tests.support.raw_clients import call
from tests.support.server_process import ServerProcess
from tests.support.watching import until

IN_FLIGHT = 4  # calls at a time, of 8 rows each
CALLERS = IN_FLIGHT * 8 + 16  # more than a stopped server can delay
LOST = "was lost during the request"


class Load:
    """Clients that send requests continually, each with its own number; the outcomes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.failures: Counter[str] = Counter()
        self.answered = 0
        self._channel = channel
        self._ends = False

    async def caller(self, value: int) -> None:
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
        wanted = self.answered + count

        async def answered() -> int:
            return self.answered

        await until(answered, lambda found: found >= wanted)

    def end(self) -> None:
        """Stop all clients after their current requests."""
        self._ends = True


@asynccontextmanager
async def load(server: ServerProcess) -> AsyncIterator[Load]:
    """Clients for as long as the block lasts; none may get another's answer."""
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
