"""How busy the machine is, as Linux tells it in /proc; read when metrics are scraped."""

import mmap
from collections.abc import Callable
from pathlib import Path
from time import monotonic

_IDLE = slice(3, 5)  # of the times in /proc/stat: idle, and waiting for a disk
_TIMES = slice(0, 8)  # the last two, of guests, are part of the first two


class Machine:
    """The whole machine's CPU and memory, not this process's share of them.

    The share of CPU time in use is that between two looks at /proc/stat, at least an interval apart
    whoever asks, so that a second scraper does not change what the first one sees to a share of
    the time since the other came.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = monotonic,
        interval_secs: float = 1.0,
    ) -> None:
        self._proc = proc
        self._interval = interval_secs
        self._clock = clock
        self._busy = self._total = 0
        self._share: float | None = None
        self._looked_at = clock()
        self._look()  # the first share is the mean since the machine was started

    def cpu_share(self) -> float | None:
        """Between 0 and 1; None where nothing tells."""
        now = self._clock()
        if now - self._looked_at >= self._interval:
            self._looked_at = now
            self._look()
        return self._share

    def memory(self) -> tuple[int, int] | None:
        """Bytes in all, and in use by what could not give them back; None where nothing tells."""
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            sizes = {name: text for name, _, text in (line.partition(":") for line in lines)}
            total, available = (
                int(sizes[name].removesuffix(" kB")) * 1024 for name in ("MemTotal", "MemAvailable")
            )
        except (OSError, KeyError, ValueError):
            return None
        return total, total - available

    def _look(self) -> None:
        try:
            first = (self._proc / "stat").read_text().partition("\n")[0].split()
            times = [int(text) for text in first[1:]][_TIMES]
        except (OSError, ValueError):
            self._share = None
            return
        total = sum(times)
        busy = total - sum(times[_IDLE])
        if total > self._total:
            # Idle time is known to go back a little on some machines.
            share = (busy - self._busy) / (total - self._total)
            self._share = min(max(share, 0.0), 1.0)
        self._busy, self._total = busy, total


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes of memory that a process has in use, those that it shares counted; 0 if it is gone."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
