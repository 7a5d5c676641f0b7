"""Work on admitted requests that takes longer than the event loop may be held up.

Decompressing, decoding, encoding and sorting of what is large are done on a thread, and the rest of
the request goes on in the loop. There are two threads, each with work in order of arrival: one for
what is long, one for what is not so long, so that nobody's megabyte waits behind another's hundred.
The queues hold nothing but work of requests that admission has counted, which bounds them.

Work is a plain function, which is called with a `charge`: bytes that it is about to take are
counted by the loop, which may refuse them, before they are taken. What is cancelled is not begun,
and ends at its next charge. `Workbench` and `Job` are owned by the loop, but for `Job.run`.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar, cast

from headrace.core.call import Call
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.protocol.elements import Charge
from headrace.protocol.status import INTERNAL_TEXT

LARGE = 64 << 10  # bytes to decode or encode, up to which the loop does that itself
_LONG = 4 << 20  # bytes from which on work is long

T = TypeVar("T")


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
