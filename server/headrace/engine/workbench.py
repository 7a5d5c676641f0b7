"""Threads for work that would block the event loop for too long.

Each piece of work of `Threads` has a thread for itself, a few at a time, so that one that hangs, in
a library or on a file system, can be abandoned: it does not delay later work, nor keep the process
from ending. A thread that is done takes other work, until there is none.

On the `Workbench`, large data of admitted requests is decompressed, decoded, encoded and sorted;
the requests continue on the event loop. There are two threads, one for long work and one for
shorter work, so that a small job does not wait behind a large one. On each of them the clients'
addresses take turns, and so do the connections of each, one piece of work at a time. The size of
work is an estimate, such as that of compressed data: work that becomes long on the short thread
begins again on the long one, without further charges, and work that takes too long is refused; both
are noticed when it charges, if only 0 bytes.
The queues only hold work of requests charged by admission, which bounds them. Work is a plain
function with the argument `charge`: the event loop charges bytes, and may refuse them, before they
are allocated. Cancelled work is not started, and ends at its next charge.

Owned by the event-loop thread, except for `Job.run`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import thread_time
from typing import Any, Generic, TypeVar, cast

from headrace.core.call import NOBODY, Call, Owner
from headrace.core.daemon_thread import Run, run_in_daemon_thread
from headrace.core.errors import ExecutionFailed, InvalidRequest, ServerError, Unavailable
from headrace.core.limits import Charge, Payer, uncharged
from headrace.core.turns import Turns
from headrace.protocol.status import INTERNAL_TEXT

T = TypeVar("T")


def no_thread(error: RuntimeError) -> Unavailable:
    """The refusal of work for which no thread can be started: their limit was reached."""
    return Unavailable(f"the server cannot do this now: {error}", retry_after=1)


def run_in_pool(pool: Executor | None, work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work` on a thread of `pool`; None is the running loop's own pool.

    Raises `Unavailable` if no thread can be started; then the work is never done.
    """
    outcome: Future[T] = Future()
    # The pool's frames refer to this list alone: the traceback of an error refers to them.
    held = [(outcome, work)]
    try:
        asyncio.get_running_loop().run_in_executor(pool, _settle, held)
    except RuntimeError as error:
        # The pool has queued the work, and a thread that it had before may have begun it.
        if outcome.cancel():
            held.clear()
            raise no_thread(error) from error
    return asyncio.wrap_future(outcome)


def _settle(held: list[tuple[Future[T], Callable[[], T]]]) -> None:
    if not held:
        return
    outcome, work = held.pop()
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        del outcome, work  # an error refers to this frame, and both would live for longer


class Stopped(Exception):
    """No more work is started."""


class TookTooLong(Exception):
    """The work has taken longer than allowed, and was abandoned."""


class Threads:
    """Runs up to `count` pieces of work at a time, others in order of arrival."""

    def __init__(self, count: int, name: str) -> None:
        self._count = self._free = count
        self._name = name
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stopped = False
        # Functions that start a thread each. Starting one in Python waits until it runs, which
        # takes many milliseconds on a busy process: so a thread calls them, while any are in use.
        self._starter: SimpleQueue[Callable[[], None] | None] | None = None
        self._idle = _Idle(count)
        self.under_way = 0  # including abandoned work

    async def run(
        self,
        work: Callable[[], T],
        seconds: float = 0.0,
        too_late: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Run `work` and return or raise its outcome; `Stopped` if it was not started.

        After `seconds`, unless 0, the work is abandoned with `TookTooLong`; `too_late` then
        receives its result on a thread.
        """
        await self._turn()
        self.under_way += 1
        self._idle.wanted = True
        future = run_in_daemon_thread(work, self._name, too_late, self._start)
        future.add_done_callback(self._ended)
        try:
            await asyncio.wait((future,), timeout=seconds or None)
            if future.done():
                return future.result()
            future.add_done_callback(partial(self._give_away, too_late))
            raise TookTooLong
        finally:
            self._next()
            if self._free == self._count:
                self._rest()
            del future  # its exception refers to this frame, and both would live for longer

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

    def _start(self, run: Run, give_up: Callable[[Exception], None]) -> None:
        if self._idle.take(run):
            return
        begin = partial(self._idle.start, self._name, run, give_up)
        if (starter := self._starter) is None:
            starter = SimpleQueue()
            try:
                Thread(target=_start_all, args=(starter,), daemon=True).start()
            except RuntimeError:  # the limit of threads was reached, which `begin` reports
                begin()
                return
            self._starter = starter
        starter.put(begin)

    def _rest(self) -> None:
        """End all threads without work."""
        self._idle.end()
        if self._starter is not None:
            self._starter.put(None)
            self._starter = None

    def _ended(self, future: "asyncio.Future[T]") -> None:
        self.under_way -= 1
        future.exception()  # mark the exception as retrieved

    def _give_away(self, too_late: Callable[[T], object], future: "asyncio.Future[T]") -> None:
        if future.exception() is None:
            run_in_daemon_thread(partial(too_late, future.result()), self._name)


_Inbox = SimpleQueue[Run | None]


class _Idle:
    """Threads without work, at most `most`, and none unless they are `wanted`; for any thread."""

    def __init__(self, most: int) -> None:
        self.wanted = False
        self._most = most
        self._inboxes: SimpleQueue[_Inbox] = SimpleQueue()

    def take(self, run: Run) -> bool:
        """Give work to one of them; returns False if there is none."""
        try:
            self._inboxes.get_nowait().put(run)
        except Empty:
            return False
        return True

    def start(self, name: str, run: Run, give_up: Callable[[Exception], None]) -> None:
        """Start a further one, with work."""
        inbox: _Inbox = SimpleQueue()
        inbox.put(run)
        try:
            Thread(target=self._work, args=(inbox,), name=name, daemon=True).start()
        except RuntimeError as error:
            give_up(error)

    def end(self) -> None:
        """End all of them."""
        self.wanted = False
        with suppress(Empty):
            while True:
                self._inboxes.get_nowait().put(None)

    def _work(self, inbox: _Inbox) -> None:
        while (run := inbox.get()) is not None:
            tell = run()
            del run  # release the work's references when it is done
            surplus = self._inboxes.qsize() >= self._most  # others replace abandoned work's threads
            if not surplus:
                # Before it tells: the loop, which then has further work, finds it.
                self._inboxes.put(inbox)
            tell()
            del tell
            if surplus:
                return
            if not self.wanted:  # `end` may have come just before
                self.end()


def _start_all(starter: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (begin := starter.get()) is not None:
        begin()
        del begin  # release the work's references when it is done


LARGE = 64 << 10  # bytes up to which the event loop decodes and encodes itself
_LONG = 4 << 20  # bytes from which on work counts as long
_SHORT_SECS = 0.2  # of a processor, from which on it does, too
_MOST_SECS = 10.0
_LEAST_RATE = 8 << 20  # bytes per second of a processor; long work has more time at this rate


class Dropped(Exception):
    """The result of the work is no longer wanted."""


class _Outgrown(Exception):
    """The work is longer than was estimated: it is to begin again on the other thread."""


class Job(Owner, Generic[T]):
    """One piece of work, with a handle to cancel it."""

    turns: Turns  # the workbench's, once it has the work

    def __init__(
        self,
        work: Callable[[Charge], T],
        done: Callable[[T | None, Exception | None], None],
        charge: Charge,
        payer: Payer | None,
    ) -> None:
        """`payer` is the client that takes turns with others."""
        self.payer = payer
        self.nbytes = 0  # an estimate of the work's size
        self._work: Callable[[Charge], T] | None = work
        self._done: Callable[[T | None, Exception | None], None] | None = done
        self._charge = charge
        self._loop = asyncio.get_running_loop()
        self._charged = 0  # bytes
        self._credit = 0  # bytes charged in the last run, and not again in this one
        self._most_bytes = self._until = self._too_late = 0.0  # times of the thread's processor

    def cancel(self, call: Call | None = None) -> None:
        """Do not call `done`, and stop the work early; implements `Owner.cancel`."""
        self._work = self._done = None  # releases their references
        self._charge = uncharged

    def run(self, short: bool, most_secs: float) -> bool:
        """Do the work, on a thread; False if it was `short` work, and is to begin again as long."""
        work = self._work
        if work is None:
            return True
        now = thread_time()
        self._credit, self._too_late = self._charged, now + most_secs + self.nbytes / _LEAST_RATE
        self._most_bytes, self._until = (_LONG, now + _SHORT_SECS) if short else (inf, inf)
        result: T | None = None
        problem: Exception | None = None
        try:
            result = work(self._count)
        except Dropped:
            return True
        except _Outgrown:
            return False
        except ServerError as error:
            problem = error.without_frames()  # they would keep its data until its turn of the loop
        except Exception as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            end = partial(self._finish, result, problem)
            self._loop.call_soon_threadsafe(self.turns.go_on_later, end)
            del end
        del work, result, problem  # an error refers to this frame, and both would live for longer
        return True

    def _count(self, nbytes: int) -> None:
        """Charge bytes, from the thread; raises the loop's error, `Dropped`, or `_Outgrown`."""
        if self._done is None:
            raise Dropped
        now = thread_time()
        if now > self._too_late:
            raise InvalidRequest(
                "the request takes too long to decode, or its answer to encode: use binary tensors"
            )
        nbytes, self._credit = max(nbytes - self._credit, 0), max(self._credit - nbytes, 0)
        if nbytes:
            self._count_more(nbytes)
            self._charged += nbytes
        if now > self._until or self._charged > self._most_bytes:
            raise _Outgrown

    def _count_more(self, nbytes: int) -> None:
        counted: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(self._count_here, nbytes, counted)
        except RuntimeError:
            raise Dropped from None
        try:
            counted.result()
        finally:
            del counted  # its error refers to this frame

    def move(self, lane: "_Lane") -> None:
        """Do the work on another thread, from the beginning."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(lane.add, self)

    def refuse(self, error: ServerError) -> None:
        """Fail the work, which no thread has begun, later in this turn of the event loop."""
        self._loop.call_soon(self._finish, None, error)

    def _count_here(self, nbytes: int, counted: "Future[None]") -> None:
        try:
            if self._done is None:
                raise Dropped
            self._charge(nbytes)
        except Exception as error:
            counted.set_exception(error)
        else:
            counted.set_result(None)
        finally:
            del counted

    def _finish(self, result: T | None, problem: Exception | None) -> None:
        done, self._done, self._work = self._done, None, None
        self._charge = uncharged  # belongs to the call, which may refer to this job
        if done is not None:
            done(result, problem)


_Line = dict[Payer | None, deque[Job[Any]]]  # by connection, in the order of their turns


def _next_turn(waiting: dict[str, _Line]) -> Job[Any]:
    """Remove the next job: addresses take turns, and the connections of each."""
    origin, line = next(iter(waiting.items()))
    payer, jobs = next(iter(line.items()))
    job = jobs.popleft()
    del waiting[origin], line[payer]
    if jobs:
        line[payer] = jobs
    if line:
        waiting[origin] = line
    return job


class _Lane:
    """A thread that does one piece of work after the other; started on first use.

    `longer` takes over what is too long for it.
    """

    def __init__(self, name: str, most_secs: float, longer: "_Lane | None" = None) -> None:
        self._name = name
        self._most_secs = most_secs
        self._longer = longer
        self._jobs: SimpleQueue[Job[Any]] = SimpleQueue()  # not seen by the thread yet
        self._thread: Thread | None = None

    def add(self, job: Job[Any]) -> None:
        if self._thread is None:
            # A daemon: a server that shuts down waits for answers, not for abandoned work.
            thread = Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                job.refuse(no_thread(error))
                return
            self._thread = thread
        self._jobs.put(job)

    def _run(self) -> None:
        waiting: dict[str, _Line] = {}  # by address, in the order of their turns
        longer = self._longer
        while True:
            while not waiting or not self._jobs.empty():
                job = self._jobs.get()
                origin = "" if job.payer is None else job.payer.origin
                waiting.setdefault(origin, {}).setdefault(job.payer, deque()).append(job)
            job = _next_turn(waiting)
            if not job.run(longer is not None, self._most_secs) and longer is not None:
                job.move(longer)
            del job


class Workbench:
    """The threads of one process."""

    def __init__(self, turns: Turns | None = None, most_secs: float = _MOST_SECS) -> None:
        """The ends of work have `turns` of the event loop, one by one.

        A piece of work that takes more than `most_secs` of a processor is refused. It has more time
        if its size was estimated as large: limits of size may be set high.
        """
        self._turns = turns or Turns()
        self._long = _Lane("workbench-long", most_secs)
        self._short = _Lane("workbench", most_secs, self._long)

    def do(
        self,
        nbytes: int,
        work: Callable[[Charge], T],
        done: Callable[[T | None, Exception | None], None],
        charge: Charge,
        payer: Payer | None,
    ) -> Job[T]:
        """Do `work` on about `nbytes`, then call `done` with its result or exception.

        `payer` as of `Call`: clients take turns.
        """
        job = Job(work, done, charge, payer)
        self.add(nbytes, job)
        return job

    def add(self, nbytes: int, job: Job[Any]) -> None:
        """Do a job on about `nbytes`."""
        job.nbytes, job.turns = nbytes, self._turns
        (self._long if nbytes > _LONG else self._short).add(job)


log = logging.getLogger(__name__)


class Deferred(Job[T]):
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
        super().__init__(decode, partial(self._decoded, call), charge, call.payer)
        self._submit: Callable[[T], None] | None = submit
        self._after = after
        call.owner = self
        bench.add(nbytes, self)

    def cancel(self, call: Call | None = None) -> None:
        """Implements `Owner.cancel`."""
        super().cancel(call)
        self._submit = self._after = None

    def _decoded(self, call: Call, result: T | None, problem: Exception | None) -> None:
        submit, after = self._submit, self._after
        # The call refers to its owner, and these to the call.
        self._submit = self._after = None
        if problem is None and submit is not None:
            try:
                submit(cast(T, result))
            except Exception as error:
                refuse(call, error)
        elif problem is not None:
            refuse(call, problem)
        if call.owner is self:
            call.owner = NOBODY
        if after is not None:
            after()


class Expected(Deferred[T]):
    """A deferred call that the scheduler of its model expects until it is submitted."""

    def __init__(
        self, bench: Workbench, nbytes: int, work: Callable[[Charge], T],
        submit: Callable[[T], None], call: Call, expect: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`expect` announces one call more, or less; `work` charges nothing."""
        self._expect = expect
        expect(1)
        super().__init__(bench, nbytes, work, submit, call, uncharged, partial(expect, -1))

    def cancel(self, call: Call | None = None) -> None:
        """Implements `Owner.cancel`."""
        super().cancel(call)
        self._expect(-1)


def refuse(call: Call, error: Exception) -> None:
    """Refuse a call whose decoding, or later submission, has failed."""
    if not isinstance(error, ServerError):
        log.error("bug in a request that was not submitted at once", exc_info=error)
        error = ExecutionFailed(INTERNAL_TEXT)
    call.pass_refusal(error.without_frames())
