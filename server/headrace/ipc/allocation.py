"""Tuning of the C library's heap: a bounded part of freed tensor memory is kept for reuse.

By default the heap returns freed memory to the system again and again, and each page that is then
reused is cleared and mapped first, which takes longer than copying a tensor into it. So freed
memory stays in the heap; but the library would only ever release its end, so that one long-lived
array, or one in another thread's heap, would keep all of it. A thread checks every few seconds, and
releases all free memory once it exceeds the limit.

This is for arrays made by models. Data received by a server has its own blocks (`core.blocks`): its
other large arrays are mapped separately, and released at once. The limit of memory is that of the
process's cgroups (version 2 or 1).
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
    """The cgroup of this process and its ancestors, each of which may have a limit.

    They are those of version 2, or of version 1's `controller`. `own` is the file that names the
    cgroup of this process below `root`; inside a container that is `root` itself.
    """
    parts: list[str] = []
    for names, path in _entries(own):
        if controller in names:
            parts = [part for part in path.split("/") if part and part != ".."]
    base = root / controller
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Bytes of memory allowed by the narrowest cgroup, or of the machine if lower."""
    files = [group / "memory.max" for group in groups(root, own)]
    files += [group / "memory.limit_in_bytes" for group in groups(root, own, "memory")]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *filter(None, map(_number, files))])


def _entries(own: Path) -> Iterator[tuple[list[str], str]]:
    """Controllers and path of each hierarchy; the controller of version 2 is ""."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        yield names.split(","), path


def _number(file: Path) -> int:
    """The number in a file; 0 for no limit."""
    try:
        return max(int(file.read_text()), 0)
    except (OSError, ValueError):  # no such cgroup here, or "max"
        return 0


_KEPT = 128 << 20  # bytes of free memory beyond which all of it is released
_KEPT_SHARE = 16  # free memory may be this fraction of all memory
_OF_A_SERVER = 4  # a server's share of that, for blocks up to `_SERVERS_MAPPED`
_LOOK_SECS = 2.0
# From glibc's malloc.h. Setting one of them also disables its dynamic adjustment.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MAPPED = 32 << 20  # bytes of a block from which on it is mapped separately; the maximum
_SERVERS_MAPPED = 4 << 20
_PAD = 1 << 20  # bytes by which the heap grows beyond the request
# Settings by the operator take precedence.
_SAID = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")
_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _Info(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class _OldInfo(ctypes.Structure):
    """`struct mallinfo`, of glibc before 2.33: its counts wrap around at 4 GiB."""

    _fields_ = [(name, ctypes.c_uint) for name in _FIELDS]


class Heap:
    """The heaps of this process, each shared by some threads. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, kept: int, mapped: int = _MAPPED) -> None:
        """At most `kept` bytes are kept, and no block of `mapped` bytes.

        Raises `AttributeError` for a C library other than glibc.
        """
        self._kept, self._mapped = kept, mapped
        self._mallopt, self._trim = library.mallopt, library.malloc_trim
        self._info = library.mallinfo2 if hasattr(library, "mallinfo2") else library.mallinfo
        self._info.restype = _Info if hasattr(library, "mallinfo2") else _OldInfo

    def keep(self) -> bool:
        """Keep freed memory for reuse; returns True if the library supports it."""
        wanted = {_M_MMAP_THRESHOLD: self._mapped, _M_TRIM_THRESHOLD: self._kept, _M_TOP_PAD: _PAD}
        return all([self._mallopt(name, value) for name, value in wanted.items()])

    def give_back(self) -> bool:
        """Release all free memory if it exceeds the limit; returns True if it did.

        Released memory stays free in the heap's accounts: checking it again costs next to
        nothing.
        """
        if self._info().fordblks <= self._kept:
            return False
        self._trim(0)
        return True


def keep_memory(server: bool = False) -> bool:
    """Keep freed memory of this process for large tensors, within bounds; True if supported.

    A `server` keeps less.
    """
    if any(name in os.environ for name in _SAID):
        return False
    with suppress(AttributeError, OSError):  # a C library other than glibc
        kept, library = kept_bytes(memory_limit()), ctypes.CDLL(None)
        heap = (
            Heap(library, kept // _OF_A_SERVER, _SERVERS_MAPPED) if server else Heap(library, kept)
        )
        threading.Thread(target=_look, args=(heap,), name="heap", daemon=True).start()
        return heap.keep()
    return False


def kept_bytes(memory: int) -> int:
    """The limit of free memory for a process, with `memory` bytes for all."""
    return min(_KEPT, memory // _KEPT_SHARE)


def _look(heap: Heap) -> None:
    while True:
        time.sleep(_LOOK_SECS)
        heap.give_back()
