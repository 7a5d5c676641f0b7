"""CPU and memory of the machine, and the memory of models, from /proc.

A process's memory is its private pages and its share of common ones (PSS), including swapped-out
pages: such shares can be added up, and estimate what the end of a process frees. Linux examines
every page for it, which takes about a millisecond per gigabyte, so this must not run on the event
loop.

A model loaded into this process has no pages of its own. Its memory is estimated by the growth of
the process, which is only accurate if nothing else was loaded meanwhile, and includes memory of
concurrent requests. So the estimate is limited to what the size of the model's files makes
plausible.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import NamedTuple

_IDLE = slice(3, 5)  # fields of /proc/stat: idle, and waiting for a disk
_TICKS = os.sysconf("SC_CLK_TCK")
_TIMES = slice(0, 8)  # the last two fields, of guests, are part of the first two


class Machine:
    """CPU and memory of the whole machine, not this process's share.

    CPU usage is measured between two readings of /proc/stat at least an interval apart, whoever
    asks, so that a second scraper does not shorten the period that the first one sees.
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
        self._look()  # the first value is the mean since boot

    def cpu_share(self) -> float | None:
        """CPU usage from 0 to 1; None if unavailable."""
        now = self._clock()
        if now - self._looked_at >= self._interval:
            self._looked_at = now
            self._look()
        return self._share

    def memory(self) -> tuple[int, int] | None:
        """Total bytes, and bytes in use that cannot be reclaimed; None if unavailable."""
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
            # The idle time may decrease slightly on some machines.
            share = (busy - self._busy) / (total - self._total)
            self._share = min(max(share, 0.0), 1.0)
        self._busy, self._total = busy, total


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes of memory that a process uses, including shared ones; 0 if it is gone."""
    try:
        # Not by a path's methods: each load measures, which takes a tenth of a small model's load.
        with open(f"{proc}/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


class ProcessUse(NamedTuple):
    """Resources that a process uses: bytes in memory, threads, and seconds of CPU so far."""

    resident_bytes: int = 0
    threads: int = 0
    cpu_seconds: float = 0.0


def process_use(pid: int, proc: Path = Path("/proc")) -> ProcessUse:
    """The resources that a process uses; none if it is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()  # from the third one on, the state
        ticks = int(fields[11]) + int(fields[12])
        pages, threads = int(fields[21]), int(fields[17])
    except (OSError, ValueError, IndexError):
        return ProcessUse()
    return ProcessUse(pages * mmap.PAGESIZE, threads, ticks / _TICKS)


class ProcessUses:
    """The use of processes, read on a thread, and shared for `fresh` seconds by all who ask.

    Owned by the event-loop thread.
    """

    def __init__(self, fresh: float = 0.2, read: Callable[[int], ProcessUse] = process_use) -> None:
        self._fresh, self._read = fresh, read
        self._known: dict[int, tuple[float, ProcessUse]] = {}
        self._reading = asyncio.Lock()

    async def of(self, pids: Sequence[int]) -> list[ProcessUse]:
        """The use of each of these processes."""
        async with self._reading:
            now = monotonic()
            self._known = {p: known for p, known in self._known.items() if known[0] > now}
            if missing := [pid for pid in pids if pid not in self._known]:
                uses = await asyncio.to_thread(lambda: list(map(self._read, missing)))
                until = monotonic() + self._fresh
                self._known.update((p, (until, u)) for p, u in zip(missing, uses, strict=True))
            return [self._known[pid][1] for pid in pids]


# ONNX Runtime sessions have been observed to take 1 to 1.7 times the size of their files, and at
# least 100 KiB.
_LEAST = 100 << 10
_USUAL = 1.5
_MOST = 3
_MOST_MORE = 64 << 20
_PROC = Path("/proc")


def memory_of(pid: int, proc: Path = _PROC) -> int:
    """Bytes that a process and all its descendants use; 0 if it is gone."""
    return sum(_share(each, proc) for each in _family(pid, proc))


def _family(pid: int, proc: Path) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:  # grows during the iteration
        try:
            threads = os.listdir(proc / str(each) / "task")
        except OSError:
            continue
        for thread in threads:
            try:
                children = (proc / str(each) / "task" / thread / "children").read_text().split()
            except OSError:  # ended, or not supported by the kernel
                continue
            found += [int(child) for child in children]
    return found


def _share(pid: int, proc: Path) -> int:
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return resident_bytes(pid, proc)  # processes of other users, or ended ones
    sizes = [line.split() for line in lines if line.startswith(("Pss:", "SwapPss:"))]
    return sum(int(words[1]) for words in sizes) * 1024


def in_process_estimate(file_bytes: int, growth: int | None) -> int:
    """Bytes of an instance with files of this size, from the growth of the process.

    Without a `growth`, from the files alone; without known files, from the growth alone.
    """
    if growth is None:
        return int(file_bytes * _USUAL) + _LEAST if file_bytes else 0
    if not file_bytes:
        return max(growth, 0)
    return min(max(growth, file_bytes + _LEAST), _MOST * file_bytes + _MOST_MORE)


class GrowthMeter:
    """Measures the growth of this process during a load. Thread-safe."""

    def __init__(self, resident: Callable[[], int] = lambda: resident_bytes(os.getpid())) -> None:
        """`resident` returns the memory in use by this process, in bytes."""
        self._resident = resident
        self._lock = Lock()
        self._active = 0
        self._number = 0

    @contextmanager
    def measuring(self) -> Iterator[Callable[[], int | None]]:
        """Measure during a load: yields a function that returns the bytes of growth since then.

        It returns None if another measurement overlaps.
        """
        with self._lock:
            self._active += 1
            self._number += 1
            number, alone = self._number, self._active == 1
        # Each measurement takes a twentieth of a small model's load.
        before = self._resident() if alone else 0
        try:
            yield lambda: self._resident() - before if alone and number == self._number else None
        finally:
            with self._lock:
                self._active -= 1
