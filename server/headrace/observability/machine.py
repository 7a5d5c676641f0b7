"""CPU and memory of the machine, and the memory of models, by what Linux tells in /proc.

A process's share is its own pages and its part of those that it shares (PSS), also where they are
swapped out: shares of different processes can be added up, and are about what the end of one gives
back. Linux looks at every page for it, which takes about a millisecond for each gigabyte, so it is
not asked on the event loop.

What is loaded into this process has no pages of its own. It is taken to be what the process has
grown by, which is only true if nothing else was loaded meanwhile; and what requests needed at the
same time is in it, too. So a measure is held to what the model's files make likely.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
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


# Sessions of ONNX Runtime have been seen to take once to 1.7 times the size of their files, and at
# least 100 KiB.
_LEAST = 100 << 10
_USUAL = 1.5
_MOST = 3
_MOST_MORE = 64 << 20
_PROC = Path("/proc")


def memory_of(pid: int, proc: Path = _PROC) -> int:
    """Bytes that a process takes, and all those that it has started; 0 if it is gone."""
    return sum(_share(each, proc) for each in _family(pid, proc))


def _family(pid: int, proc: Path) -> list[int]:
    """A process and what descends from it."""
    found = [pid]
    for each in found:  # which grows meanwhile
        try:
            threads = os.listdir(proc / str(each) / "task")
        except OSError:
            continue
        for thread in threads:
            try:
                children = (proc / str(each) / "task" / thread / "children").read_text().split()
            except OSError:  # it has ended, or the kernel was built without
                continue
            found += [int(child) for child in children]
    return found


def _share(pid: int, proc: Path) -> int:
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return resident_bytes(pid, proc)  # of others' processes, and of what is gone
    sizes = [line.split() for line in lines if line.startswith(("Pss:", "SwapPss:"))]
    return sum(int(words[1]) for words in sizes) * 1024


def in_process_estimate(file_bytes: int, growth: int | None) -> int:
    """Bytes that an instance takes whose files are so large, by what the process has grown.

    Without a `growth`, by the files alone. Of a model without known files growth alone tells.
    """
    if growth is None:
        return int(file_bytes * _USUAL) + _LEAST if file_bytes else 0
    if not file_bytes:
        return max(growth, 0)
    return min(max(growth, file_bytes + _LEAST), _MOST * file_bytes + _MOST_MORE)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state of the process when a measurement began."""

    number: int
    resident: int
    alone: bool


class GrowthMeter:
    """Measures the growth of this process while something is loaded. For any thread."""

    def __init__(self, resident: Callable[[], int] = lambda: resident_bytes(os.getpid())) -> None:
        """`resident` gives the bytes of this process's memory in use."""
        self._resident = resident
        self._lock = Lock()
        self._active = 0
        self._number = 0

    def begin(self) -> Beginning:
        """Begin a measurement; `end` must follow."""
        with self._lock:
            self._active += 1
            self._number += 1
            return Beginning(self._number, self._resident(), self._active == 1)

    def end(self, beginning: Beginning) -> int | None:
        """Bytes of growth since then; None if another one was under way meanwhile."""
        with self._lock:
            self._active -= 1
            alone = beginning.alone and self._number == beginning.number
            return self._resident() - beginning.resident if alone else None
