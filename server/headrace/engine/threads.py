"""Threads for what may take long: a few at a time, and none that anybody has to wait for.

Each piece of work has a thread of its own, so that one that hangs, in a library or on a file
system, can be left behind: it takes nothing from what comes after it, and does not keep the process
from ending. Owned by the event-loop thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")


class Stopped(Exception):
    """Nothing is begun any more."""


class TookTooLong(Exception):
    """The work has taken longer than it may, and goes on by itself."""


class Threads:
    """Runs up to `count` pieces of work at a time, the others in the order in which they came."""

    def __init__(self, count: int, name: str) -> None:
        self._free = count
        self._name = name
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stopped = False
        # Arguments for `_work`. Python waits until a thread has begun, which takes many
        # milliseconds where others are busy: so a thread starts them, as long as any is under way.
        self._starter: SimpleQueue[tuple[Any, ...] | None] | None = None
        self.under_way = 0  # also what was left behind

    async def run(
        self,
        work: Callable[[], T],
        seconds: float = 0.0,
        too_late: Callable[[T], object] | None = None,
    ) -> T:
        """Run `work` and give or raise its outcome; `Stopped` if it was not begun.

        After so many `seconds`, unless they are 0, it is left behind, with `TookTooLong`; with what
        comes of it then, `too_late` is called on a thread.
        """
        await self._turn()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Any]] = loop.create_future()
        try:
            self._begin(work, loop, done, too_late)
            async with asyncio.timeout(seconds or None):
                outcome = await asyncio.shield(done)
        except TimeoutError:
            if done.done():
                raise
            done.cancel()
            raise TookTooLong from None
        finally:
            self._next()
        result, problem = outcome
        # An error holds the frames that it has passed, with all that is in them: were it held by
        # them, whatever it has come by would stay for longer.
        outcome.clear()
        if problem is None:
            return cast(T, result)
        try:
            raise problem
        finally:
            del problem

    def wait(self, waits: bool) -> None:
        """A piece of work waits for another one, whose turn has to come, or does not any more."""
        if waits:
            self._next()
        else:
            self._free -= 1

    def stop(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._stopped = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(Stopped())

    def _begin(self, *given: Any) -> None:
        """Start a thread for `_work`; raises `RuntimeError` if there are too many."""
        if (starter := self._starter) is None:
            starter = SimpleQueue()
            Thread(target=self._start_all, args=(starter,), daemon=True).start()
            self._starter = starter
        starter.put(given)
        self.under_way += 1

    async def _turn(self) -> None:
        if self._stopped:
            raise Stopped
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        """Hand the turn on."""
        self._free += 1
        while self._waiting and self._free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _start_all(self, starter: "SimpleQueue[tuple[Any, ...] | None]") -> None:
        """On a thread: start others."""
        while (given := starter.get()) is not None:
            try:
                Thread(target=self._work, args=given, name=self._name, daemon=True).start()
            except RuntimeError as error:  # there are as many threads as there may be
                self._work(partial(_fail, error), *given[1:])
            del given  # what the work holds goes when it is done

    def _work(
        self,
        work: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        done: "asyncio.Future[list[Any]]",
        too_late: Callable[[T], object] | None,
    ) -> None:
        """On the thread."""
        result: Any = None
        problem: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            problem = error

        def tell() -> None:
            nonlocal result, problem
            self.under_way -= 1
            if not self.under_way and self._starter is not None:
                self._starter.put(None)
                self._starter = None
            if not done.done():
                done.set_result([result, problem])
            elif problem is None and too_late is not None:
                Thread(target=too_late, args=(result,), daemon=True).start()
            result = problem = None

        try:
            loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: the server has ended
            if problem is None and too_late is not None:
                too_late(result)


def _fail(error: Exception) -> NoReturn:
    raise error
