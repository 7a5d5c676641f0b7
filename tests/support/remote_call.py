"""Awaitable calls of a connection to an upstream."""

import asyncio

from headrace.placement.upstream.connection import ProtocolClient, RemoteRequest
from headrace.protocol.v2_protobuf import RemoteAnswer


class _Waiting:
    def __init__(self) -> None:
        self.result: asyncio.Future[RemoteAnswer] = asyncio.get_running_loop().create_future()

    def answered(self, answer: RemoteAnswer) -> None:
        self.result.set_result(answer)

    def failed(self, error: Exception) -> None:
        self.result.set_exception(error)


async def infer(connection: ProtocolClient, request: RemoteRequest, seconds: float) -> RemoteAnswer:
    """The answer; raises `CallFailed`. Cancelling the wait cancels the call."""
    waiting = _Waiting()
    call = connection.begin(request, seconds, waiting)
    try:
        return await waiting.result
    finally:
        call.cancel()
