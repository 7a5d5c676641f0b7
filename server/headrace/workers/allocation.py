"""The C library's heap: a bounded part of what tensors have used is kept for the next ones.

Left to itself it gives freed memory back to the system again and again, and every page of it that
is then used anew is cleared and mapped first, which takes longer than to copy a tensor into it. So
freed memory stays in the heap; but only its end would ever be given back, so that one array that
outlives those before it, or one of another thread's heaps, would hold on to all of it. A thread
looks every few seconds, and gives back all that is free once that is more than may be kept.

That is for arrays that models make. What a server receives has blocks of its own (`core.blocks`):
its other large arrays are mapped by themselves, and go back to the system at once. How much memory
there is at most, the process's cgroups say (version 2 or 1).
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def groups(root: Path = CGROUPS, own: Path = OWN_CGROUP, controller: str = "") -> list[Path]:
    """The cgroup of this process and those around it; each may have a limit.

    Those of version 2, or of version 1's `controller`. `own` says in which cgroup below `root` this
    process is; inside a container that is `root` itself.
    """
    parts: list[str] = []
    for names, path in _entries(own):
        if controller in names:
            parts = [part for part in path.split("/") if part and part != ".."]
    base = root / controller
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Bytes of memory that the narrowest cgroup allows, or that the machine has if that is less."""
    files = [group / "memory.max" for group in groups(root, own)]
    files += [group / "memory.limit_in_bytes" for group in groups(root, own, "memory")]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *filter(None, map(_number, files))])


def _entries(own: Path) -> Iterator[tuple[list[str], str]]:
    """Controllers and path of each hierarchy; version 2's one has the controller ""."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        yield names.split(","), path


def _number(file: Path) -> int:
    """The number in a file, 0 if that is no limit."""
    try:
        return max(int(file.read_text()), 0)
    except (OSError, ValueError):  # no such cgroup here, or "max"
        return 0


_KEPT = 128 << 20  # bytes of free memory, beyond which all of it is given back, or fewer
_KEPT_SHARE = 16  # of the memory that there is for all processes: one part
_OF_A_SERVER = 4  # one part of that, and of no larger blocks than `_SERVERS_MAPPED`
_LOOK_SECS = 2.0
# Of glibc's malloc.h. Setting one of them also ends their change with what is allocated.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MAPPED = 32 << 20  # bytes of one block from which on it is mapped by itself; the most there can be
_SERVERS_MAPPED = 4 << 20
_PAD = 1 << 20  # bytes by which the heap grows beyond what is asked for
# What an operator has said about it stands.
_SAID = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")
_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _Info(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class _OldInfo(ctypes.Structure):
    """`struct mallinfo`, of glibc before 2.33: its counts begin anew at 4 GiB."""

    _fields_ = [(name, ctypes.c_uint) for name in _FIELDS]


class Heap:
    """The heaps of this process, one for some threads each. For any thread."""

    def __init__(self, library: ctypes.CDLL, kept: int, mapped: int = _MAPPED) -> None:
        """`kept` bytes at most stay, and no block of `mapped` bytes.

        Raises `AttributeError` for another C library than glibc.
        """
        self._kept, self._mapped = kept, mapped
        self._mallopt, self._trim = library.mallopt, library.malloc_trim
        self._info = library.mallinfo2 if hasattr(library, "mallinfo2") else library.mallinfo
        self._info.restype = _Info if hasattr(library, "mallinfo2") else _OldInfo

    def keep(self) -> bool:
        """Keep what is freed for later; whether the library agrees."""
        wanted = {_M_MMAP_THRESHOLD: self._mapped, _M_TRIM_THRESHOLD: self._kept, _M_TOP_PAD: _PAD}
        return all([self._mallopt(name, value) for name, value in wanted.items()])

    def give_back(self) -> bool:
        """Give back all that is free, if that is more than may be kept; whether it was.

        Memory that has gone back stays free in the heap's books: to look for it again costs next to
        nothing.
        """
        if self._info().fordblks <= self._kept:
            return False
        self._trim(0)
        return True


def keep_memory(server: bool = False) -> bool:
    """Keep memory of this process for large tensors, within bounds; whether its C library can.

    That of a `server` keeps less.
    """
    if any(name in os.environ for name in _SAID):
        return False
    with suppress(AttributeError, OSError):  # another C library than glibc
        kept, library = kept_bytes(memory_limit()), ctypes.CDLL(None)
        heap = (
            Heap(library, kept // _OF_A_SERVER, _SERVERS_MAPPED) if server else Heap(library, kept)
        )
        threading.Thread(target=_look, args=(heap,), name="heap", daemon=True).start()
        return heap.keep()
    return False


def kept_bytes(memory: int) -> int:
    """How much of it a process may keep free, where there are `memory` bytes for all."""
    return min(_KEPT, memory // _KEPT_SHARE)


def _look(heap: Heap) -> None:
    while True:
        time.sleep(_LOOK_SECS)
        heap.give_back()
