"""Unary procedures, from message bytes to message bytes."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.transports.grpc.call import Call, Unary

M = TypeVar("M", bound=Message)


def answers(kind: type[M], answer: Callable[[M], Message]) -> Unary:
    """A procedure that answers at once from the engine's state."""

    async def handler(data: Buffer, call: Call) -> bytes:
        return answer(_parsed(kind, data)).SerializeToString()

    return handler


def awaits(kind: type[M], answer: Callable[[M], Awaitable[Message]]) -> Unary:
    """A procedure whose answer takes its time."""

    async def handler(data: Buffer, call: Call) -> bytes:
        return (await answer(_parsed(kind, data))).SerializeToString()

    return handler


def _parsed(kind: type[M], data: Buffer) -> M:
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError as error:
        raise InvalidRequest(f"not a valid {kind.__name__} message: {error}") from None
