"""Turns of requests that change the same model."""

import asyncio
from collections import OrderedDict


class ModelTurn:
    """The turn of one request after the other, first come, first served.

    As `asyncio.Lock`, with which each of thousands that give up looks at all others that wait.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    async def take(self) -> None:
        """Wait for the turn; whoever has taken it ends it."""
        if not self._taken:
            self._taken = True
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        except asyncio.CancelledError:
            if self._waiting.pop(future, future) is future and not future.cancelled():
                self.end()  # it had come meanwhile
            raise

    def end(self) -> None:
        """End the turn, and let the next one begin."""
        while self._waiting:
            future, _ = self._waiting.popitem(last=False)
            if not future.done():
                future.set_result(None)
                return
        self._taken = False
