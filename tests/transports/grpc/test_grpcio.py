"""grpcio's server with our handlers."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from headrace.core.call import Call
from headrace.core.tensors import Buffer
from headrace.engine.admission import Admission
from headrace.transports.grpc.call import Handlers, Reply
from headrace.transports.grpc.grpcio import GrpcioServer
from headrace.transports.grpc.options import GrpcOptions

_PATH = "/any.Service/Any"


class Counting(Call):
    """Counts how often it was given up."""

    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.mark.parametrize("answered", [True, False])
def test_a_request_ends_once(answered: bool) -> None:
    """Its answer may come after its client has gone, and before that is seen."""

    async def scenario() -> int:
        asked = Counting("", "", "", {})
        begun: asyncio.Future[tuple[asyncio.Task[None], Reply]] = asyncio.Future()

        def direct(_: Buffer, reply: Reply) -> Call:
            task = asyncio.current_task()
            assert task is not None
            begun.set_result((task, reply))
            return asked

        server = GrpcioServer(
            Handlers({_PATH: direct}, {}, {}), Admission(0, 0), 1, False, GrpcOptions()
        )
        port = server.bind("127.0.0.1", 0)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask: Any = channel.unary_unary(_PATH)
            call = ask(b"")
            task, reply = await begun
            task.cancel()
            if answered:
                reply.answer([b""], b"")
            await asyncio.wait([task])
            call.cancel()
        await server.stop(0)
        return asked.cancelled

    assert asyncio.run(scenario()) == (0 if answered else 1)
