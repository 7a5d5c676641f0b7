"""Unary procedures, from message bytes to message bytes."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.core.tensors import Buffer
from headrace.transports.grpc.call import RpcContext, Unary
from headrace.wire.compression import too_large

M = TypeVar("M", bound=Message)


def check_size(data: Buffer, limit: int) -> int:
    """The size of a message; raises `PayloadTooLarge`."""
    if len(data) > limit:
        raise PayloadTooLarge(too_large("request message", limit, len(data)))
    return len(data)


def answers(kind: type[M], answer: Callable[[M], Message]) -> Unary:
    """A procedure that answers at once from the engine's state."""

    async def handler(data: Buffer, call: RpcContext) -> bytes:
        return answer(_parsed(kind, data)).SerializeToString()

    return handler


def awaits(
    kind: type[M], answer: Callable[[M], Awaitable[Message]], max_request_bytes: int = 0
) -> Unary:
    """A procedure whose answer takes its time; 0 leaves its limit to the transport."""

    async def handler(data: Buffer, call: RpcContext) -> bytes:
        if max_request_bytes:
            check_size(data, max_request_bytes)
        return (await answer(_parsed(kind, data))).SerializeToString()

    return handler


def _parsed(kind: type[M], data: Buffer) -> M:
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a valid {kind.__name__} message: {error}") from None
