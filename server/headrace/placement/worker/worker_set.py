"""Placement in workers: the processes of one version, watched and replaced.

Each worker is checked once a second: one without heartbeat for too long, or whose batch makes no
progress for too long, is killed, which is handled like any other death. One that continues
abandoned work is killed, too, but not counted as a death: soon if it is no longer needed, else
after the stall time, or the time of its start, since restarting it may take longer than its work.
The end of a process is noticed at once, by its process descriptor.

One that has grown too large, or has served enough requests, is recycled: a successor is started
beside it, and takes over once it is ready; the old one finishes its requests. Workers of one
version are replaced one after the other, so that there is at most one in addition. If the successor
cannot be started, the old one continues, and the attempt is repeated after a growing delay.

Owned by the event-loop thread, except for starting.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.core.errors import ModelNotReady, RepositoryError
from headrace.core.limits import ABANDONED_SECS, LOOK_SECS, pace_for
from headrace.observability.statistics import EndKind, RecycleReason, WorkerCounters, WorkerSeries
from headrace.placement.child_process import Backoff
from headrace.placement.placement import Placement, Surroundings
from headrace.placement.worker.python_options import RunOptions, WorkerOptions
from headrace.placement.worker.shared_blocks import SharedBlocks
from headrace.placement.worker.worker_instance import WorkerInstance
from headrace.placement.worker.worker_process import WorkerProcess

log = logging.getLogger(__name__)

_MIB = 1 << 20
_REST_SECS = 5.0  # between one replacement in a version and the next
_MOST_SECS = 60.0


def recycle_reason(options: WorkerOptions, resident: int, requests: int) -> RecycleReason | None:
    """The reason to replace a worker with this memory and number of requests; None for none."""
    if options.max_rss and resident > options.max_rss:
        return RecycleReason.MAX_RSS
    if options.max_requests and requests >= options.max_requests:
        return RecycleReason.MAX_REQUESTS
    return None


class WorkerSet(Placement):
    """The workers of a version: those that serve, and replaced ones that finish."""

    def __init__(self, version: Surroundings) -> None:
        self.counters = WorkerCounters()
        self._version = version
        self._signature = version.signature
        self._scheduler = version.scheduler
        self._loop = version.loop
        self._shared = SharedBlocks(version.loop)
        self._serving: list[WorkerInstance] = []
        self._finishing: list[WorkerInstance] = []
        self._measured: list[WorkerInstance] = []  # those whose scratch directory a thread measures
        self._successor_starts = False
        self._recycling_backoff = Backoff(_REST_SECS, _MOST_SECS)
        self._recycles_from = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._looked = 0.0
        self._pace = LOOK_SECS
        self._grace: float | None = None  # grace for abandoned work while the version drains

    def add(self, name: str, model: Any, *given: object) -> None:
        """Add a started worker, of a `LoadedWorker`, to the scheduler."""
        worker = self._worker(name, model.process, model.again, model.options, model.run_options)
        self._serving.append(worker)
        self._pace = min(self._pace, worker.options.execution.pace)
        if self._timer is None:
            self._looked = self._loop.time()
            self._timer = self._loop.call_later(self._pace, self._look)

    def leave(self, grace: float) -> None:
        """Start draining; abandoned work is ended after `grace` seconds."""
        self._grace = grace
        for worker in (*self._serving, *self._finishing):
            worker.grace = grace
        self._pace = min(self._pace, pace_for(grace))
        if self._timer is not None:
            self._timer.cancel()
            self._look()

    def remove(self, name: str) -> None:
        """Remove the worker of this name, and end it once it has finished its requests.

        One that is not running has nothing to finish.
        """
        for worker in self._serving:
            if worker.name == name:
                self._serving.remove(worker)
                self._finish(worker)
                return

    async def settled(self) -> None:
        await asyncio.gather(*(worker.closed() for worker in self._finishing))

    def __iter__(self) -> Iterator[WorkerInstance]:
        """The serving workers, without replaced ones."""
        return iter(self._serving)

    def memory(self, nbytes: int, begin: int) -> memoryview | None:
        """Memory that the workers map; see `SharedBlocks.memory`."""
        return self._shared.memory(nbytes, begin)

    @property
    def healthy(self) -> bool:
        """True if any worker runs, is not stalled, and its model does not report otherwise."""
        return any(worker.willing and not worker.stalled for worker in self)

    @property
    def obstacle(self) -> str:
        if self.stalled:
            return super().obstacle
        if any(worker.running for worker in self):
            return "the model says that it is not ready"
        return "none of its worker processes runs"

    @property
    def given_up(self) -> bool:
        return all(worker.given_up for worker in self)

    @property
    def stalled(self) -> list[WorkerInstance]:
        return [worker for worker in self if worker.stalled]

    def waiting_error(self) -> ModelNotReady:
        """The error while no worker runs, with the time until the next restart."""
        tried = min((worker.tried_again for worker in self), default=0.0)
        seconds = max(ceil(tried - self._loop.time()), 1)
        return ModelNotReady(
            f"model '{self._signature.model}' is not ready: its worker processes end again and"
            f" again; they are tried again in {seconds} s, and the server's log says how they end",
            retry_after=seconds,
        )

    @property
    def pids(self) -> dict[str, int]:
        return {worker.name: worker.pid if worker.running else 0 for worker in self}

    @property
    def workers(self) -> WorkerSeries:
        resident = {w.name: w.resident() for w in self if w.running}
        return WorkerSeries(
            len(self._serving), resident, self.counters, self._scheduler.quarantine.refused
        )

    def close(self) -> None:
        """Stop checks and replacements; the scheduler closes the serving workers."""
        for worker in self._finishing:
            worker.close()
        self._shared.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def closed(self) -> None:
        """Wait until all processes have ended."""
        await asyncio.gather(*(w.closed() for w in (*self._serving, *self._finishing)))

    def _worker(
        self,
        name: str,
        process: WorkerProcess,
        start: Callable[[], WorkerProcess],
        options: WorkerOptions,
        run_options: RunOptions,
    ) -> WorkerInstance:
        """Add a process to the scheduler."""
        worker = WorkerInstance(
            name, process, start, options, run_options, self._version, self.counters, self.changed,
            self._shared,
        )  # fmt: skip
        for slot in worker.slots:
            self._scheduler.add_instance(slot)
        worker.choose_slots()
        return worker

    def changed(self) -> None:
        """Update after a worker has ended, restarted, or changed its readiness."""
        self._end_finished()
        # First, since a callback of a failed request may submit the next one.
        self._version.changed()
        if self.given_up:
            self._scheduler.fail_waiting(self.waiting_error())

    def _end_finished(self) -> None:
        """End replaced workers that are done; also dead ones, which would be restarted."""
        for worker in self._finishing:
            if not worker.slots_left and worker.idle:
                worker.close()
        self._finishing = [w for w in self._finishing if w.slots_left or w.running]

    # --- once a second

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._pace, self._look)
        now = self._loop.time()
        elapsed, self._looked = now - self._looked, now
        for worker in (*self._serving, *self._finishing):
            if worker.running:
                self._feel(worker, elapsed)
            if worker.running and worker.confined and worker not in self._measured:
                self._measure(worker)
        self._end_finished()
        for worker in self._serving:
            rests = self._successor_starts or self._loop.time() < self._recycles_from
            if worker.running and not rests:
                self._weigh(worker)

    def _feel(self, worker: WorkerInstance, elapsed: float) -> None:
        """Kill a worker that hangs, or continues abandoned work."""
        limits, heartbeat = worker.options.execution, worker.options.heartbeat_secs
        silent = worker.heartbeat.look((worker.pid, worker.beats), elapsed)
        worker.look(elapsed, limits.stall_secs)
        if 0 < heartbeat <= silent:
            worker.kill(EndKind.HANG, f"has given no sign of life for {silent:.0f} s")
        elif 0 < limits.execution_secs <= worker.longest:
            why = f"has taken longer than {limits.execution_secs:g} s for a batch"
            worker.kill(EndKind.LIMIT, why)
        elif 0 < self._grace_of(worker) <= worker.abandoned:
            why = f"has run only abandoned requests for {worker.abandoned:.0f} s"
            worker.kill(EndKind.ABANDONED, why)

    def _measure(self, worker: WorkerInstance) -> None:
        """Measure a scratch directory on a thread; kill the worker if it has too much there."""
        pid = worker.pid
        self._measured.append(worker)

        def on_measured(measured: asyncio.Future[str]) -> None:
            self._measured.remove(worker)
            if (problem := measured.exception()) is not None:
                log.error("the scratch directory of %s is not measured: %s", worker.name, problem)
            elif (why := measured.result()) and worker.running and worker.pid == pid:
                worker.kill(EndKind.LIMIT, why)

        measuring = run_in_daemon_thread(worker.scratch_excess, f"measure {worker.name}")
        measuring.add_done_callback(on_measured)

    def _grace_of(self, worker: WorkerInstance) -> float:
        """Seconds that a worker may continue abandoned work; 0 for no limit."""
        if self._grace is not None:
            return self._grace
        if worker in self._finishing:
            return ABANDONED_SECS
        stall = worker.options.execution.stall_secs
        return max(stall, worker.start_secs) if stall else 0.0

    # --- replacement

    def _weigh(self, worker: WorkerInstance) -> None:
        """Start a successor for a worker that has grown too large or served enough requests."""
        options = worker.options
        resident = worker.resident() if options.max_rss and not worker.outsized else 0
        reason = recycle_reason(options, resident, worker.requests)
        if reason is None:
            return
        why = (
            f"it has {resident / _MIB:.0f} MiB in use, max_rss is {options.max_rss / _MIB:.0f} MiB"
            if reason is RecycleReason.MAX_RSS
            else f"it has had {worker.requests} requests, max_requests is {options.max_requests}"
        )
        pid = worker.pid
        log.info("worker %d of %s is going to be replaced: %s", pid, worker.name, why)
        self._successor_starts = True
        started = run_in_daemon_thread(worker.start, f"start {worker.name}", WorkerProcess.kill)
        started.add_done_callback(lambda started: self._on_successor(worker, pid, reason, started))

    def _on_successor(
        self,
        old: WorkerInstance,
        pid: int,
        reason: RecycleReason,
        started: asyncio.Future[WorkerProcess],
    ) -> None:
        """Replace a worker, unless it was removed or restarted meanwhile."""
        self._successor_starts = False
        self._recycles_from = self._loop.time() + _REST_SECS
        needless = self._timer is None or old not in self._serving or old.pid != pid
        if (problem := started.exception()) is None:
            self._recycling_backoff.succeeded()
            if needless:
                started.result().kill()
            else:
                self._replace(old, started.result(), reason)
        elif not needless:
            delay = self._recycling_backoff.failed()
            self._recycles_from = self._loop.time() + delay
            trace = None if isinstance(problem, RepositoryError) else problem
            log.error(
                "no successor for worker %d of %s can be started, so that it goes on; this is tried"
                " again in %d s: %s", pid, old.name, delay, problem, exc_info=trace,
            )  # fmt: skip

    def _replace(self, old: WorkerInstance, process: WorkerProcess, reason: RecycleReason) -> None:
        log.info(
            "worker %d of %s takes over from worker %d", process.pid, old.name, old.pid,
            extra={"model": self._signature.model},
        )  # fmt: skip
        self.counters.recycled[reason] += 1
        new = self._worker(old.name, process, old.start, old.options, old.run_options)
        self._serving[self._serving.index(old)] = new
        self._compare(new)
        self._finish(old)
        self._version.changed()  # the old one may have been reported as not ready

    def _finish(self, old: WorkerInstance) -> None:
        """Remove a worker from the scheduler; it ends once its requests are finished."""
        old.slots_left = len(old.slots)
        self._finishing.append(old)

        def removed() -> None:
            old.slots_left -= 1
            self._end_finished()

        for slot in old.slots:
            self._scheduler.remove_instance(slot, removed)

    def _compare(self, worker: WorkerInstance) -> None:
        """Note whether a fresh worker already exceeds the limit of memory."""
        resident, limit = worker.resident(), worker.options.max_rss
        worker.outsized = 0 < limit < resident
        if worker.outsized:
            log.error(
                "%s takes %d MiB from its start, more than max_rss (%d MiB): it is not replaced for"
                " its size any more", worker.name, resident // _MIB, limit // _MIB,
                extra={"model": self._signature.model},
            )  # fmt: skip
