"""Threads for work that takes longer than the event loop may be held up.

Each piece of work of `Threads` has a thread of its own, a few at a time, so that one that hangs, in
a library or on a file system, can be left behind: it takes nothing from what comes after it, and
does not keep the process from ending.

On the `Workbench`, decompressing, decoding, encoding and sorting of what is large are done for
requests that were admitted, whose rest goes on in the loop. There are two threads, each with work
in order of arrival: one for what is long, one for what is not so long, so that a megabyte of one
waits behind no hundred of another. The queues hold nothing but work of requests that admission has
counted, which bounds them. Work is a plain function, which is called with a `charge`: bytes that it
is about to take are counted by the loop, which may refuse them, before they are taken. What is
cancelled is not begun, and ends at its next charge.

All of it is owned by the event-loop thread, but for `Job.run`.
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


LARGE = 64 << 10  # bytes to decode or encode, up to which the loop does that itself
_LONG = 4 << 20  # bytes from which on work is long


class Dropped(Exception):
    """Nobody wants what the work is for any more."""


class Job(Generic[T]):
    """One piece of work, for whoever waits for it to cancel."""

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
        """Do not call `done`, and do no more of the work than must be; `Owner.cancel`."""
        self._cancelled = True
        self._work = None  # with all that it holds

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
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
        """Charge bytes, on the thread; raises what the loop does, or `Dropped`."""
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
    """A thread that does one piece of work after the other, from the first one on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job[Any]] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, job: Job[Any]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            # A daemon: a server that ends waits for answers, and not for work without a client.
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
        """Do `work` on about `nbytes`, then call `done` with what it gives or raises."""
        job = Job(work, done, charge)
        (self._long if nbytes > _LONG else self._short).add(job)
        return job


log = logging.getLogger(__name__)


class Deferred(Generic[T]):
    """Decoder of a call on the workbench, and its owner until it is decoded."""

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
        """`submit` gets what `decode` gives; `call` is refused with what either raises.

        Then `after` is called.
        """
        self._submit = submit
        self._call: Call | None = call
        self._after = after
        call.owner = self
        self._job = bench.do(nbytes, decode, self._decoded, charge)

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`."""
        self._call = None
        self._job.cancel()

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`."""
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
