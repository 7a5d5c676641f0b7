"""The outcome of a task, for any number of others that wait for it."""

import asyncio
from typing import Generic, TypeVar

from headrace.core.turns import TurnQueue

T = TypeVar("T")


class SharedOutcome(Generic[T]):
    """The outcome of a task that many may wait for; cancelling a wait cancels nothing else.

    `asyncio.shield` would do for a few: with it each wait that is cancelled looks at all others,
    and thousands go on in the same turn of the event loop.
    """

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self._task = task
        self._waiting: dict[asyncio.Future[T], None] = {}
        self._untold = TurnQueue(self._tell)
        task.add_done_callback(self._ended)

    def wait(self) -> "asyncio.Future[T]":
        """A future for the task's result, exception or cancellation."""
        future: asyncio.Future[T] = self._task.get_loop().create_future()
        if self._task.done():
            self._tell(future)
        else:
            self._waiting[future] = None
            future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "asyncio.Future[T]") -> None:
        self._waiting.pop(future, None)

    def _ended(self, _: object) -> None:
        waiting, self._waiting = self._waiting, {}
        self._untold.process(tuple(waiting))

    def _tell(self, future: "asyncio.Future[T]") -> None:
        if future.done():
            return
        if self._task.cancelled():
            future.cancel()
        elif (error := self._task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(self._task.result())
