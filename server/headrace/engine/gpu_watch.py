"""How the GPUs are, looked at again and again on a thread: the driver's libraries may block."""

import asyncio
import logging

from headrace.backends.gpus import Gpus
from headrace.engine.threads import Threads, TookTooLong
from headrace.observability.series import GpuSeries

log = logging.getLogger(__name__)

_PATIENCE_SECS = 60  # for a look


class GpuWatch:
    """Knows the last readings. Made, started and stopped on the event loop."""

    def __init__(self, gpus: Gpus, interval_secs: float) -> None:
        self._gpus = gpus
        self._interval = interval_secs
        self._threads = Threads(1, "gpus")  # one that hangs keeps nothing from ending
        self._task: asyncio.Task[None] | None = None
        self.series = GpuSeries()

    def start(self) -> None:
        """Begin to look; where there are no GPUs, that is all."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
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
