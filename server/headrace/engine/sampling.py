"""Measurements that are repeated on threads: the memory of versions, and the state of GPUs."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Protocol

from headrace.engine.workbench import Threads, TookTooLong
from headrace.observability.machine import memory_of
from headrace.observability.series import GpuSeries
from headrace.placement.local.gpus import Gpus

log = logging.getLogger(__name__)

_SHARE = 0.01  # of a core


class Watched(Protocol):
    """A version whose workers are measured."""

    def worker_pids(self) -> Mapping[str, int]:
        """The process of each instance that has one which runs."""

    def note_memory(self, found: Mapping[str, int]) -> None:
        """Take the bytes of instances."""


class _Sampling:
    """A measurement that is repeated by a task. Made, started and stopped on the event loop."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to measure."""
        self._task = asyncio.get_running_loop().create_task(self._repeat())

    def stop(self) -> None:
        """Measure no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _repeat(self) -> None:
        raise NotImplementedError


class MemoryWatch(_Sampling):
    """The memory of versions' workers, which come and go, and grow.

    A thread reads what Linux tells of them, because that takes the longer the larger they are. No
    more than a hundredth of a core is spent on it.
    """

    def __init__(
        self,
        versions: Callable[[], Iterable[Watched]],
        interval_secs: float,
        look: Callable[[int], int] = memory_of,
    ) -> None:
        """`look` gives the bytes of a process; it is called on a thread."""
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
        """Look at every worker; the seconds that it took."""
        asked = [(version, version.worker_pids()) for version in self._versions()]
        asked = [(version, pids) for version, pids in asked if pids]
        if not asked:
            return 0.0

        def read() -> tuple[list[dict[str, int]], float]:
            begun = monotonic()
            found = [{name: self._look(pid) for name, pid in pids.items()} for _, pids in asked]
            return found, monotonic() - begun

        found, taken = await asyncio.to_thread(read)
        for (version, _), sizes in zip(asked, found, strict=True):
            version.note_memory({name: size for name, size in sizes.items() if size})
        return taken


_PATIENCE_SECS = 60  # for a look


class GpuWatch(_Sampling):
    """The last readings of the GPUs; where there are none, they are looked for once."""

    def __init__(self, gpus: Gpus, interval_secs: float) -> None:
        self._gpus = gpus
        self._interval = interval_secs
        self._threads = Threads(1, "gpus")  # one that hangs keeps nothing from ending
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
        """Look at them now; whether there are any."""
        self.series, found = await self._threads.run(self._look, _PATIENCE_SECS)
        return found

    def _look(self) -> tuple[GpuSeries, bool]:
        readings, pool = self._gpus.readings(), self._gpus.pool
        pinned = None if pool is None else (pool.limit, pool.used)
        return GpuSeries(readings, pinned), self._gpus.count > 0
