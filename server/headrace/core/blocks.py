"""Reusable memory blocks into which large messages are read.

The system zeroes every page it hands out, which takes longer than copying a message into it.
"""

from sys import getrefcount
from threading import Lock
from weakref import finalize

import numpy as np

from headrace.core.tensors import Array
from headrace.ipc.allocation import kept_bytes, memory_limit

_LEAST, _LARGEST = 1 << 20, 32 << 20  # sizes in bytes of blocks worth keeping
_SHARE = 0.75  # of the memory that a process may keep free; the heap gets the rest


def _references_of_one() -> int:
    """The reference count that numpy sees for an array held by one variable only."""
    whole = np.empty(1, np.uint8)
    return getrefcount(whole)


_ALONE = _references_of_one()


class Blocks:
    """A pool of reusable blocks, at most `kept` bytes in total, in use or free. Thread-safe."""

    def __init__(self, kept: int) -> None:
        self._kept = self._most = kept
        self._free: dict[int, Array] = {}  # by identity, so that any thread can return one
        self._owned = 0  # bytes of all blocks, free or in use
        self._lock = Lock()

    def block(self, nbytes: int) -> memoryview:
        """Return `nbytes` of uninitialised memory.

        The memory is not zeroed, as a bytearray would be: a message that is announced but never
        sent costs nothing. A large block is reused once no view of it is left. Blocks in use count
        against the limit, too: they take memory even if an announced message never arrives.
        """
        if not _LEAST <= nbytes <= _LARGEST or (whole := self._take(nbytes)) is None:
            return np.empty(nbytes, np.uint8).data
        # A memoryview, because numpy would record `whole` as the base of an `np.ndarray` made from
        # a view of its slice, and the block would be reused while that array is alive.
        part = np.frombuffer(whole.data, np.uint8, nbytes)
        finalize(part, self._free.__setitem__, id(whole), whole)
        return part.data

    def reserve(self, nbytes: int) -> bool:
        """Count `nbytes` of other memory against the limit; False if there is no room."""
        with self._lock:
            if room := self._make_room(nbytes):
                self._owned += nbytes
        return room

    def release(self, nbytes: int) -> None:
        """Count reserved memory no longer."""
        with self._lock:
            self._owned -= nbytes

    def spare(self, nbytes: int) -> None:
        """Lower the limit by `nbytes`."""
        self._most = self._kept - nbytes
        if self._free and self._owned > self._most:
            with self._lock:
                self._make_room(0)

    def _take(self, nbytes: int) -> Array | None:
        """Return a free block, or replace free blocks by a new one; None if all are in use."""
        with self._lock:
            for key in [
                key for key, one in self._free.copy().items() if nbytes <= one.nbytes <= 2 * nbytes
            ]:
                whole = self._free.pop(key)
                if getrefcount(whole) == _ALONE:
                    return whole
                self._owned -= whole.nbytes  # still in use otherwise
            if not self._make_room(nbytes):
                return None
            whole = np.empty(nbytes, np.uint8)
            self._owned += nbytes
        return whole

    def _make_room(self, nbytes: int) -> bool:
        while self._free and self._owned + nbytes > self._most:
            self._owned -= self._free.popitem()[1].nbytes
        return self._owned + nbytes <= self._most


BLOCKS = Blocks(int(kept_bytes(memory_limit()) * _SHARE))
