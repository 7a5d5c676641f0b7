"""The common part of both transports: responses on their way, addresses, and errors in words."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Generic, TypeVar

from headrace.client.address import Address
from headrace.client.errors import ConnectionFailed, InputError, TimedOut
from headrace.connections.endpoint import Endpoint
from headrace.core.errors import InvalidRequest
from headrace.protocol.http1 import header_lines

T = TypeVar("T")
_MOST_WAITING = 64  # responses that nobody has taken yet, above which the server is held


class Responses(Generic[T]):
    """Responses on their way from a connection to whoever iterates over them.

    The connection is held where they are taken slowly.
    """

    def __init__(self, hold: Callable[[bool], None], seconds: float, late: TimedOut) -> None:
        """`hold` stops the connection from reading, or has it go on.

        Each response may take so many seconds; `late` is the error of one that takes longer.
        """
        self._hold = hold
        self._seconds = seconds or None
        self._late = late
        self._waiting: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._held = self._ended = False
        self._error: Exception | None = None

    def put(self, item: T) -> None:
        """Take a response."""
        self._waiting.append(item)
        self._arrived.set()
        if not self._held and len(self._waiting) > _MOST_WAITING:
            self._held = True
            self._hold(True)

    def end(self, error: Exception | None = None) -> None:
        """Take the end, of which `error` is why."""
        self._ended, self._error = True, error
        self._arrived.set()

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            if self._held:
                self._held = False
                self._hold(False)
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._seconds):
                    await self._arrived.wait()
            except TimeoutError:
                raise self._late from None


def endpoint_of(address: Address) -> Endpoint:
    """An address as connections take it."""
    return Endpoint(
        str(address), address.scheme, address.socket or address.host, address.port, address.host,
        address.authority, address.prefix,
    )  # fmt: skip


def header_text(headers: Mapping[str, str]) -> str:
    """Headers as they are sent; raises `InputError` for one that cannot be."""
    try:
        return header_lines(list(headers.items()))
    except InvalidRequest as error:
        raise InputError(str(error)) from None


def not_connected(address: Address, why: str) -> ConnectionFailed:
    """The error of a request without a connection."""
    return ConnectionFailed(f"no server at {address}: {why[:1].lower()}{why[1:]}", sent=False)


def hung_up(address: Address) -> ConnectionFailed:
    """The error of a request whose connection has ended."""
    return ConnectionFailed(f"{address} has closed the connection before it had answered")


def late(address: Address, seconds: float) -> TimedOut:
    """The error of a request that was not answered in time."""
    return TimedOut(f"no answer from {address} within {seconds:g} s")
