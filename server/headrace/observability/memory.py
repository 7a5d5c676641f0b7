"""How much memory a model takes: by what Linux tells of its processes, else by what it grows here.

A process's share is its own pages and its part of those that it shares (PSS), also where they are
swapped out: shares of different processes can be added up, and are about what the end of one gives
back. Linux looks at every page for it, which takes about a millisecond for each gigabyte, so it is
not asked on the event loop.

What is loaded into this process has no pages of its own. It is taken to be what the process has
grown by, which is only true if nothing else was loaded meanwhile; and what requests needed at the
same time is in it, too. So a measure is held to what the model's files make likely.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from headrace.observability.machine import resident_bytes

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
    """How things were when a measurement began."""

    number: int
    resident: int
    alone: bool


class GrowthMeter:
    """What this process grows by while something is loaded. For any thread."""

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
