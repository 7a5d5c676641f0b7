"""Replacing a worker that is well, without losing a request.

A successor is started beside it while it goes on, and takes over once it is there: what the old one
has, it finishes. Workers of one version are replaced one after the other, so that no more than one
is there in addition. If the successor cannot be started, the old one goes on, and it is tried again
after a delay that grows.

Owned by the event-loop thread, but for starting.
"""

import asyncio
import logging
from collections.abc import Callable

from headrace.core.errors import RepositoryError
from headrace.execution.process import WorkerInstance
from headrace.execution.starting import start_aside
from headrace.execution.worker import WorkerProcess
from headrace.execution.worker_options import WorkerOptions
from headrace.observability.statistics import RecycleReason

log = logging.getLogger(__name__)

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
        self._failures = 0  # in a row
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

        def done(process: WorkerProcess | None, problem: Exception | None) -> None:
            self._busy = False
            self._not_before = self._loop.time() + _REST_SECS
            # Nobody is left to replace, or it has been started again meanwhile.
            needless = self._closed or worker.pid != pid
            if process is None:
                if not needless:
                    self._put_off(worker, problem)
                return
            self._failures = 0
            if needless:
                process.kill()
                return
            self._replace(worker, process, reason)

        start_aside(start, self._loop, worker.name, done)

    def close(self) -> None:
        """Replace nothing any more."""
        self._closed = True

    def _put_off(self, worker: WorkerInstance, problem: Exception | None) -> None:
        delay = retry_delay(self._failures)
        self._failures += 1
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


def retry_delay(failures: int) -> float:
    """Seconds to wait after so many earlier failures in a row."""
    return min(_REST_SECS * 2.0 ** min(failures, 10), _MOST_SECS)
