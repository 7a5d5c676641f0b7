"""Placement in workers: the processes of one model version, watched and replaced.

Once a second each worker is looked at: one that has given no sign of life for too long, or whose
batch makes no progress for too long, is killed, which is answered like any other death. One that
goes on with work that nobody waits for any more is killed, too, which is no death of the model's:
soon where it is not needed any longer, else after as long as a stall takes to be called one, or as
it took to start, since starting it again may take longer than its work. Its end is known at once,
by its process descriptor.

One that has grown too large, or has served enough requests, is replaced: a successor is started
beside it, and takes over once it is there; the old one finishes what it has. Workers of one version
are replaced one after the other, so that no more than one is there in addition. If the successor
cannot be started, the old one goes on, and it is tried again after a delay that grows.

Owned by the event-loop thread, but for starting.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from headrace.core.errors import ModelNotReady, RepositoryError
from headrace.core.limits import ABANDONED_SECS, LOOK_SECS, Pulse
from headrace.execution.child_process import Backoff
from headrace.execution.daemon_thread import run_in_daemon_thread
from headrace.execution.placement import Placement, Surroundings
from headrace.execution.python_options import WorkerOptions
from headrace.execution.worker_instance import WorkerInstance
from headrace.execution.worker_process import WorkerProcess
from headrace.observability.series import WorkerSeries
from headrace.observability.statistics import EndKind, RecycleReason, WorkerCounters

if TYPE_CHECKING:
    from headrace.execution.loaded_worker import LoadedWorker

log = logging.getLogger(__name__)

_LEAST_PACE_SECS = 0.05
_MIB = 1 << 20
_REST_SECS = 5.0  # between one replacement in a version and the next
_MOST_SECS = 60.0
Replace = Callable[[WorkerInstance, WorkerProcess, RecycleReason], None]


class Recycler:
    """Starts successors for the workers of one version."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replace: Replace) -> None:
        """`replace` is told of a worker and of the process that is to take its place."""
        self._loop = loop
        self._replace = replace
        self._busy = False  # a successor is being started
        self._closed = False
        self._backoff = Backoff(_REST_SECS, _MOST_SECS)
        self._not_before = 0.0

    @property
    def resting(self) -> bool:
        """Whether nothing can be recycled for now."""
        return self._busy or self._closed or self._loop.time() < self._not_before

    def recycle(
        self,
        worker: WorkerInstance,
        start: Callable[[], WorkerProcess],
        reason: RecycleReason,
        why: str,
    ) -> None:
        """Have `worker` replaced; only when not `resting`. `why` is for the log."""
        self._busy = True
        pid = worker.pid
        log.info("worker %d of %s is going to be replaced: %s", pid, worker.name, why)

        def done(started: asyncio.Future[WorkerProcess]) -> None:
            self._busy = False
            self._not_before = self._loop.time() + _REST_SECS
            # Nobody is left to replace, or it has been started again meanwhile.
            needless = self._closed or worker.pid != pid
            if (problem := started.exception()) is not None:
                if not needless:
                    self._put_off(worker, problem)
                return
            self._backoff.succeeded()
            if needless:
                started.result().kill()
                return
            self._replace(worker, started.result(), reason)

        started = run_in_daemon_thread(start, f"start {worker.name}", WorkerProcess.kill)
        started.add_done_callback(done)

    def close(self) -> None:
        """Replace nothing any more."""
        self._closed = True

    def _put_off(self, worker: WorkerInstance, problem: BaseException) -> None:
        delay = self._backoff.failed()
        self._not_before = self._loop.time() + delay
        trace = None if isinstance(problem, RepositoryError) else problem
        log.error(
            "no successor for worker %d of %s can be started, so that it goes on; this is tried"
            " again in %d s: %s", worker.pid, worker.name, delay, problem, exc_info=trace,
        )  # fmt: skip


def recycle_reason(options: WorkerOptions, resident: int, requests: int) -> RecycleReason | None:
    """Why a worker with so many bytes in use, after so many requests, is to be replaced."""
    if options.max_rss and resident > options.max_rss:
        return RecycleReason.MAX_RSS
    if options.max_requests and requests >= options.max_requests:
        return RecycleReason.MAX_REQUESTS
    return None


class _Member:
    """A worker with what is known of it from one look to the next."""

    def __init__(self, worker: WorkerInstance, loaded: "LoadedWorker") -> None:
        self.worker = worker
        self.loaded = loaded
        self.pulse = Pulse()
        self.outsized = False  # it is too large from its start: replacing it would help nothing
        self.slots = 0  # of one that has been replaced, those that the scheduler still has

    def slot_removed(self) -> None:
        """A slot of one that has been replaced has had its last batch."""
        self.slots -= 1
        self.close_if_done()

    def close_if_done(self) -> None:
        """End one that has been replaced, unless requests of its batches are still open."""
        if not self.slots and self.worker.idle:
            self.worker.close()


class WorkerSet(Placement):
    """The workers of a version: those that serve, and those that have been replaced and finish."""

    def __init__(self, version: Surroundings) -> None:
        self.counters = WorkerCounters()
        self._signature = version.signature
        self._scheduler = scheduler = version.scheduler
        self._loop = loop = version.loop
        self._changed = version.changed
        # What the workers' batches come from and go to; see `worker_instance.Outside`.
        self.host = version.host
        self.suspend = scheduler.suspend
        self.resume = scheduler.resume
        self.give = scheduler.answer
        self._members: list[_Member] = []
        self._finishing: list[_Member] = []
        self._recycler = Recycler(loop, self._replace)
        self._timer: asyncio.TimerHandle | None = None
        self._looked = 0.0
        self._pace = LOOK_SECS
        self._grace: float | None = None  # for what nobody waits for, while the version goes

    def add(self, name: str, model: "LoadedWorker", *given: object) -> None:
        """Put a started worker behind the scheduler."""
        loaded = model
        self._members.append(_Member(self._worker(name, loaded, loaded.process), loaded))
        limits = loaded.options.execution
        for limit in (limits.execution_secs, limits.stall_secs):
            if limit:
                self._pace = min(self._pace, max(limit / 2, _LEAST_PACE_SECS))
        if self._timer is None:
            self._looked = self._loop.time()
            self._timer = self._loop.call_later(self._pace, self._look)

    def leave(self, grace: float) -> None:
        """Finish what somebody waits for; what nobody does is ended after `grace` seconds."""
        self._grace = grace
        for member in (*self._members, *self._finishing):
            member.worker.grace = grace
        self._pace = min(self._pace, max(grace / 2, _LEAST_PACE_SECS))
        if self._timer is not None:
            self._timer.cancel()
            self._look()

    def remove(self, name: str) -> None:
        """Give the worker of this name nothing more, and end it once it has finished what it has.

        One that is not there has nothing to finish.
        """
        for member in self._members:
            if member.worker.name == name:
                self._members.remove(member)
                self._finish(member.worker, member.loaded)
                return

    def __iter__(self) -> Iterator[WorkerInstance]:
        """Those that serve."""
        return (member.worker for member in self._members)

    @property
    def healthy(self) -> bool:
        """Whether any worker runs, does not stall, and its model is ready as far as it says."""
        return any(worker.willing and not worker.stalled for worker in self)

    @property
    def obstacle(self) -> str:
        """See `Placement`."""
        if self.stalled:
            return super().obstacle
        if any(worker.running for worker in self):
            return "the model says that it is not ready"
        return "none of its worker processes runs"

    @property
    def given_up(self) -> bool:
        """See `Placement`."""
        return all(worker.given_up for worker in self)

    @property
    def stalled(self) -> list[WorkerInstance]:
        """See `Placement`."""
        return [worker for worker in self if worker.stalled]

    def waiting_error(self) -> ModelNotReady:
        """See `Placement`; it names the time when the first worker is tried again."""
        tried = min((worker.tried_again for worker in self), default=0.0)
        seconds = max(ceil(tried - self._loop.time()), 1)
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: its worker processes end again and"
            f" again; they are tried again in {seconds} s, and the server's log says how they end",
            retry_after=seconds,
        )

    @property
    def pids(self) -> dict[str, int]:
        """See `Placement`."""
        return {worker.name: worker.pid if worker.running else 0 for worker in self}

    @property
    def workers(self) -> WorkerSeries:
        """See `Placement`."""
        resident = {w.name: w.resident() for w in self if w.running}
        return WorkerSeries(
            len(self._members), resident, self.counters, self._scheduler.quarantine.refused
        )

    def close(self) -> None:
        """Look no more, and replace nothing; the scheduler ends those that serve."""
        self._recycler.close()
        for member in self._finishing:
            member.worker.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def closed(self) -> None:
        """Wait until no process is left."""
        every = (*self._members, *self._finishing)
        await asyncio.gather(*(member.worker.closed() for member in every))

    def _worker(self, name: str, loaded: "LoadedWorker", process: WorkerProcess) -> WorkerInstance:
        """Put a process behind the scheduler."""
        worker = WorkerInstance(
            name, process, loaded.again, self._signature, self._loop, self, loaded.ways,
            self.counters,
        )  # fmt: skip
        for slot in worker.slots:
            self._scheduler.add_instance(slot)
        worker.choose_slots()
        return worker

    def changed(self) -> None:
        """A worker has ended, runs again, or says something else of itself."""
        self._end_finished()
        self._changed()  # first: who is told that a request has failed may have the next one ready
        if self.given_up:
            self._scheduler.fail_waiting(self.waiting_error())

    def _end_finished(self) -> None:
        """End what has been replaced and is done; also if it has died, or it would come back."""
        for member in self._finishing:
            member.close_if_done()
        self._finishing = [m for m in self._finishing if m.slots or m.worker.running]

    # --- once a second

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._pace, self._look)
        now = self._loop.time()
        elapsed, self._looked = now - self._looked, now
        for member in (*self._members, *self._finishing):
            if member.worker.running:
                self._feel(member, elapsed)
        self._end_finished()
        for member in self._members:
            if member.worker.running and not self._recycler.resting:
                self._weigh(member)

    def _feel(self, member: _Member, elapsed: float) -> None:
        """Kill a worker that hangs, or goes on with what nobody waits for."""
        worker, options = member.worker, member.loaded.options
        silent = member.pulse.look((worker.pid, worker.beats), elapsed)
        worker.look(elapsed, options.execution.stall_secs)
        limit, grace = options.execution.execution_secs, self._grace_of(member)
        if 0 < options.heartbeat_secs <= silent:
            worker.kill(EndKind.HANG, f"has given no sign of life for {silent:.0f} s")
        elif 0 < limit <= worker.longest:
            worker.kill(EndKind.LIMIT, f"has taken longer than {limit:g} s for a batch")
        elif 0 < grace <= worker.abandoned:
            why = f"has gone on for {worker.abandoned:.0f} s with what nobody waits for"
            worker.kill(EndKind.ABANDONED, why)

    def _grace_of(self, member: _Member) -> float:
        """For how long a worker may go on with what nobody waits for; 0 for as long as it takes."""
        if self._grace is not None:
            return self._grace
        if member in self._finishing:
            return ABANDONED_SECS
        stall = member.loaded.options.execution.stall_secs
        return max(stall, member.worker.start_secs) if stall else 0.0

    def _weigh(self, member: _Member) -> None:
        """Have a worker replaced that has grown too large or has done enough."""
        worker, options = member.worker, member.loaded.options
        resident = worker.resident() if options.max_rss and not member.outsized else 0
        reason = recycle_reason(options, resident, worker.requests)
        if reason is not None:
            why = (
                f"it has {resident / _MIB:.0f} MiB in use, max_rss is"
                f" {options.max_rss / _MIB:.0f} MiB"
                if reason is RecycleReason.MAX_RSS
                else f"it has had {worker.requests} requests, max_requests is"
                f" {options.max_requests}"
            )
            self._recycler.recycle(worker, member.loaded.again, reason, why)

    # --- one takes over from another

    def _replace(self, old: WorkerInstance, process: WorkerProcess, reason: RecycleReason) -> None:
        member = next((member for member in self._members if member.worker is old), None)
        if member is None:  # it was removed while its successor was being started
            process.kill()
            return
        log.info(
            "worker %d of %s takes over from worker %d", process.pid, old.name, old.pid,
            extra={"model": self._signature.model},
        )  # fmt: skip
        self.counters.recycled[reason] += 1
        member.worker = self._worker(old.name, member.loaded, process)
        self._compare(member)
        self._finish(old, member.loaded)
        self._changed()  # the old one may have said that it is not ready

    def _finish(self, old: WorkerInstance, loaded: "LoadedWorker") -> None:
        """Give a worker nothing more; it ends with what it has."""
        finishing = _Member(old, loaded)
        finishing.slots = len(old.slots)
        self._finishing.append(finishing)
        for slot in old.slots:
            self._scheduler.remove_instance(slot, finishing.slot_removed)

    def _compare(self, member: _Member) -> None:
        """Know whether a fresh worker is too large already."""
        resident, limit = member.worker.resident(), member.loaded.options.max_rss
        member.outsized = 0 < limit < resident
        if member.outsized:
            log.error(
                "%s takes %d MiB from its start, more than max_rss (%d MiB): it is not replaced for"
                " its size any more", member.worker.name, resident // _MIB, limit // _MIB,
                extra={"model": self._signature.model},
            )  # fmt: skip
