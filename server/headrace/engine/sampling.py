"""Periodic measurements on threads: the memory of workers, and the state of GPUs."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic

from headrace.engine.version import ModelVersion
from headrace.engine.workbench import Threads, TookTooLong
from headrace.observability.machine import memory_of
from headrace.observability.statistics import GpuSeries
from headrace.placement.local.gpus import Gpus

log = logging.getLogger(__name__)

_SHARE = 0.01  # of a core


class _Sampling:
    """A periodic measurement in a task. Created, started and stopped on the event loop."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to measure."""
        self._task = asyncio.get_running_loop().create_task(self._repeat())

    def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def stopped(self) -> None:
        """Implements `EngineWatch.stopped`."""

    async def _repeat(self) -> None:
        raise NotImplementedError


class MemoryWatch(_Sampling):
    """The memory of versions' workers, which start, end and grow.

    A thread reads Linux' accounts of them, which takes longer the larger they are. It uses at most
    a hundredth of a core.
    """

    def __init__(
        self,
        versions: Callable[[], Iterable[ModelVersion]],
        interval_secs: float,
        look: Callable[[int], int] = memory_of,
    ) -> None:
        """`look` returns the bytes of a process; it is called on a thread."""
        self._versions = versions
        self._interval = interval_secs
        self._look = look

    async def _repeat(self) -> None:
        while True:
            taken = 0.0
            try:
                taken = await self.once()
            except Exception:
                log.exception("bug while looking at the memory of models")
            await asyncio.sleep(max(self._interval, taken / _SHARE))

    async def once(self) -> float:
        """Measure every worker; returns the duration in seconds."""
        reports = [version.report for version in self._versions()]
        asked = [(report, report.worker_pids()) for report in reports]
        asked = [(report, pids) for report, pids in asked if pids]
        if not asked:
            return 0.0

        def read() -> tuple[list[dict[str, int]], float]:
            begun = monotonic()
            found = [{name: self._look(pid) for name, pid in pids.items()} for _, pids in asked]
            return found, monotonic() - begun

        found, taken = await asyncio.to_thread(read)
        for (report, _), sizes in zip(asked, found, strict=True):
            report.note_memory({name: size for name, size in sizes.items() if size})
        return taken


_PATIENCE_SECS = 60  # for one measurement


class GpuWatch(_Sampling):
    """The last readings of the GPUs; if there are none, they are searched for once."""

    def __init__(self, gpus: Gpus, interval_secs: float) -> None:
        self._gpus = gpus
        self._interval = interval_secs
        # A thread that hangs does not keep the process from ending.
        self._threads = Threads(1, "read GPUs")
        self.series = GpuSeries()

    async def _repeat(self) -> None:
        try:
            while True:
                if not await self.once():
                    return
                await asyncio.sleep(self._interval)
        except TookTooLong:
            self.series = GpuSeries()
            log.error("the GPUs have not told how they are for %d s: no more metrics of them are"
                      " given", _PATIENCE_SECS)  # fmt: skip
        except Exception:
            log.exception("bug while looking at the GPUs")

    async def once(self) -> bool:
        """Read them now; returns False if there are none."""
        self.series, found = await self._threads.run(self._look, _PATIENCE_SECS)
        return found

    def _look(self) -> tuple[GpuSeries, bool]:
        readings, pool = self._gpus.readings(), self._gpus.pool
        pinned = None if pool is None else (pool.limit, pool.used)
        return GpuSeries(readings, pinned), self._gpus.count > 0
