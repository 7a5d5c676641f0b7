"""grpcio's server with our handlers."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer, Tensor
from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.inference import InferCall
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.plugins.grpcio.server import GrpcioServer

_PATH = "/any.Service/Any"


class Counting:
    """An owner that counts cancellations of its call."""

    cancelled = 0

    def cancel(self, call: Call) -> None:
        self.cancelled += 1

    def hold(self, call: Call, held: bool) -> None:
        raise NotImplementedError


@asynccontextmanager
async def asking(direct: Callable[[Buffer, InferCall], None]) -> AsyncIterator[Callable[[], Any]]:
    """Calls of a server with one procedure, which `direct` answers."""
    handlers = Handlers({_PATH: direct}, {}, {})
    server = GrpcioServer(handlers, Admission(0, 0), 1, False, GrpcOptions())
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask: Any = channel.unary_unary(_PATH)
        yield lambda: ask(b"")
    await server.stop(0)


@pytest.mark.parametrize("answered", [True, False])
async def test_a_request_ends_once(answered: bool) -> None:
    """Its answer may come after its client has disconnected, and before that is noticed."""
    owner = Counting()
    begun: asyncio.Future[tuple[asyncio.Task[None], InferCall]] = asyncio.Future()

    def direct(_: Buffer, call: InferCall) -> None:
        task = asyncio.current_task()
        assert task is not None
        call.begin()
        call.account.enter(0)
        call.owner, call.nbytes, call.entered = owner, 0, True
        begun.set_result((task, call))

    async with asking(direct) as ask:
        call = ask()
        task, served = await begun
        task.cancel()
        if answered:
            served.leave()
            served.answer([b""], b"")
        await asyncio.wait([task])
        call.cancel()
    assert owner.cancelled == (0 if answered else 1)


async def test_a_request_that_fails_is_not_kept() -> None:
    """The library keeps the error, and by its traceback the frames that raised it."""
    asked: list[weakref.ref[Any]] = []

    def direct(_: Buffer, call: InferCall) -> None:
        array = np.zeros(1, np.uint8)
        call.begin()
        call.inputs = {"x": Tensor("x", Datatype.UINT8, array)}
        asked.append(weakref.ref(array))
        raise InvalidRequest("as asked")

    gc.disable()
    try:
        async with asking(direct) as ask:
            with pytest.raises(grpc.aio.AioRpcError, match="as asked"):
                await ask()
        assert [one() for one in asked] == [None]
    finally:
        gc.enable()
