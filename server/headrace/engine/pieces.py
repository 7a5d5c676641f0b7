"""Pieces of documents about many models, one in a turn of the event loop.

With a thousand models such a document takes a tenth of a second. It is made in pieces, with
everything else of the loop between them; however many are wanted at a time, there is one piece per
turn of the loop. Owned by the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TypeVar

_SECS = 0.002  # of a piece

S = TypeVar("S")
T = TypeVar("T")


class Pieces:
    """One piece of work per turn of the event loop, in order of arrival."""

    def __init__(self, secs: float = _SECS) -> None:
        """A piece takes `secs`, and the rest of what it has begun."""
        self._secs = secs
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # this turn of the loop
        self._until = 0.0  # the end of the piece under way

    async def each(self, items: Iterable[S], work: Callable[[S], T]) -> list[T]:
        """The results of `work` for each of `items`, which may change meanwhile if not a copy."""
        found: list[T] = []
        await self.begin()
        for item in items:
            if self.over:
                await self.begin()
            found.append(work(item))
        return found

    async def begin(self) -> None:
        """Wait for a turn of the loop without another piece."""
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
        self._until = perf_counter() + self._secs

    @property
    def over(self) -> bool:
        """True if the piece under way has taken its time: `begin` is to be awaited."""
        return perf_counter() >= self._until

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
