"""Threads for work that would block the event loop for too long.

Each piece of work of `Threads` has a thread of its own, a few at a time, so that one that hangs, in
a library or on a file system, can be abandoned: it does not delay later work, nor keep the process
from ending.

On the `Workbench`, large data of admitted requests is decompressed, decoded, encoded and sorted;
the requests continue on the event loop. There are two threads, each working in order of arrival:
one for long work and one for shorter work, so that a small job does not wait behind a large one.
The queues only hold work of requests charged by admission, which bounds them. Work is a plain
function with the argument `charge`: the event loop charges bytes, and may refuse them, before they
are allocated. Cancelled work is not started, and ends at its next charge.

Owned by the event-loop thread, except for `Job.run`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, NoReturn, TypeVar, cast

from headrace.core.call import Call
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.protocol.elements import Charge
from headrace.protocol.status import INTERNAL_TEXT

T = TypeVar("T")


class Stopped(Exception):
    """No more work is started."""


class TookTooLong(Exception):
    """The work has taken longer than allowed, and was abandoned."""


class Threads:
    """Runs up to `count` pieces of work at a time, others in order of arrival."""

    def __init__(self, count: int, name: str) -> None:
        self._free = count
        self._name = name
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stopped = False
        # Arguments for `_work`. Starting a thread in Python waits until it runs, which takes many
        # milliseconds on a busy process: so a thread starts them, as long as any are in use.
        self._starter: SimpleQueue[tuple[Any, ...] | None] | None = None
        self.under_way = 0  # including abandoned work

    async def run(
        self,
        work: Callable[[], T],
        seconds: float = 0.0,
        too_late: Callable[[T], object] | None = None,
    ) -> T:
        """Run `work` and return or raise its outcome; `Stopped` if it was not started.

        After `seconds`, unless 0, the work is abandoned with `TookTooLong`; `too_late` then
        receives its result on a thread.
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
        # An exception refers to its frames and all their variables: held by one of these frames, it
        # would keep them alive for longer.
        outcome.clear()
        if problem is None:
            return cast(T, result)
        try:
            raise problem
        finally:
            del problem

    def wait(self, waits: bool) -> None:
        """Release, or take back, the slot of work that waits for other work."""
        if waits:
            self._next()
        else:
            self._free -= 1

    def stop(self) -> None:
        """Start no more work, and wait for none."""
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
        """Start the next piece of work."""
        self._free += 1
        while self._waiting and self._free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _start_all(self, starter: "SimpleQueue[tuple[Any, ...] | None]") -> None:
        """Start other threads, from a thread."""
        while (given := starter.get()) is not None:
            try:
                Thread(target=self._work, args=given, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the limit of threads was reached
                self._work(partial(_fail, error), *given[1:])
            del given  # release the work's references when it is done

    def _work(
        self,
        work: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        done: "asyncio.Future[list[Any]]",
        too_late: Callable[[T], object] | None,
    ) -> None:
        """Do the work, on a thread."""
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


LARGE = 64 << 10  # bytes up to which the event loop decodes and encodes itself
_LONG = 4 << 20  # bytes from which on work counts as long


class Dropped(Exception):
    """The result of the work is no longer wanted."""


class Job(Generic[T]):
    """One piece of work, with a handle to cancel it."""

    def __init__(
        self,
        work: Callable[[Charge], T],
        done: Callable[[T | None, Exception | None], None],
        charge: Charge,
    ) -> None:
        self._work: Callable[[Charge], T] | None = work
        self._done = done
        self._charge = charge
        self._loop = asyncio.get_running_loop()
        self._cancelled = False

    def cancel(self, call: Call | None = None) -> None:
        """Do not call `done`, and stop the work early; implements `Owner.cancel`."""
        self._cancelled = True
        self._work = None  # releases its references

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`."""
        call.held = held

    def run(self) -> None:
        """Do the work, on a thread."""
        work = self._work
        if work is None:
            return
        result: T | None = None
        problem: Exception | None = None
        try:
            result = work(self._count)
        except Dropped:
            return
        except Exception as error:
            problem = error
        del work
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._finish, result, problem)

    def _count(self, nbytes: int) -> None:
        """Charge bytes, from the thread; raises the loop's error, or `Dropped`."""
        counted: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(self._count_here, nbytes, counted)
        except RuntimeError:
            raise Dropped from None
        counted.result()

    def _count_here(self, nbytes: int, counted: "Future[None]") -> None:
        try:
            if self._cancelled:
                raise Dropped
            self._charge(nbytes)
        except Exception as error:
            counted.set_exception(error)
        else:
            counted.set_result(None)

    def _finish(self, result: T | None, problem: Exception | None) -> None:
        if not self._cancelled:
            self._work = None
            self._done(result, problem)


class _Lane:
    """A thread that does one piece of work after the other; started on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job[Any]] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, job: Job[Any]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            # A daemon: a server that shuts down waits for answers, not for abandoned work.
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            del job


class Workbench:
    """The threads of one process."""

    def __init__(self) -> None:
        self._short = _Lane("workbench")
        self._long = _Lane("workbench-long")

    def do(
        self,
        nbytes: int,
        work: Callable[[Charge], T],
        done: Callable[[T | None, Exception | None], None],
        charge: Charge,
    ) -> Job[T]:
        """Do `work` on about `nbytes`, then call `done` with its result or exception."""
        job = Job(work, done, charge)
        (self._long if nbytes > _LONG else self._short).add(job)
        return job


log = logging.getLogger(__name__)


class Deferred(Generic[T]):
    """A call being decoded on the workbench, and its owner until then."""

    def __init__(
        self,
        bench: Workbench,
        nbytes: int,
        decode: Callable[[Charge], T],
        submit: Callable[[T], None],
        call: Call,
        charge: Charge,
        after: Callable[[], None] | None = None,
    ) -> None:
        """`submit` receives the result of `decode`; an error of either refuses `call`.

        `after` is called last.
        """
        self._submit = submit
        self._call: Call | None = call
        self._after = after
        call.owner = self
        self._job = bench.do(nbytes, decode, self._decoded, charge)

    def cancel(self, call: Call) -> None:
        """Implements `Owner.cancel`."""
        self._call = None
        self._job.cancel()

    def hold(self, call: Call, held: bool) -> None:
        """Implements `Owner.hold`."""
        call.held = held

    def _decoded(self, result: T | None, problem: Exception | None) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            if problem is not None:
                raise problem
            self._submit(cast(T, result))
        except ServerError as error:
            call.pass_refusal(error)
        except Exception as error:
            log.error("bug in a request that was decoded apart", exc_info=error)
            call.pass_refusal(ExecutionFailed(INTERNAL_TEXT))
        finally:
            del problem
            if self._after is not None:
                self._after()
