"""Blocks of memory into which long messages are read, a few of which are kept for the next ones.

The system clears each page that it hands out, which takes longer than to copy a message into it.
"""

from sys import getrefcount
from threading import Lock
from weakref import finalize

import numpy as np

from headrace.core.tensors import Array
from headrace.workers.allocation import kept_bytes, memory_limit

_LEAST, _LARGEST = 1 << 20, 32 << 20  # bytes of a block that is worth keeping
_SHARE = 0.75  # of what a process may keep; the rest is its heap's


def _references_of_one() -> int:
    """How many references an array counts that only a variable refers to."""
    whole = np.empty(1, np.uint8)
    return getrefcount(whole)


_ALONE = _references_of_one()


class Blocks:
    """At most `kept` bytes of blocks that are used again, in use or not. For any thread."""

    def __init__(self, kept: int) -> None:
        self._kept = self._most = kept
        self._free: dict[int, Array] = {}  # by identity, so that one can be put back by any thread
        self._owned = 0  # bytes of all of them
        self._lock = Lock()

    def block(self, nbytes: int) -> memoryview:
        """`nbytes` of memory, to be written to before they are read.

        Not written to from end to end as a bytearray is: a message that is announced takes nothing
        before it comes. A long one is used again once no view of it is left. Those in use count,
        too: they take memory also where a message was announced and does not come.
        """
        if not _LEAST <= nbytes <= _LARGEST or (whole := self._take(nbytes)) is None:
            return np.empty(nbytes, np.uint8).data
        # By a memoryview: numpy would take `whole` for the owner of what `np.ndarray` makes of a
        # view of its slice, and the block would be used again under that array.
        part = np.frombuffer(whole.data, np.uint8, nbytes)
        finalize(part, self._free.__setitem__, id(whole), whole)
        return part.data

    def spare(self, nbytes: int) -> None:
        """Keep so much less than otherwise."""
        self._most = self._kept - nbytes
        if self._free and self._owned > self._most:
            with self._lock:
                self._make_room(0)

    def _take(self, nbytes: int) -> Array | None:
        """One that is free, or a new one in the place of those that are; None if all are in use."""
        with self._lock:
            for key in [
                key for key, one in self._free.copy().items() if nbytes <= one.nbytes <= 2 * nbytes
            ]:
                whole = self._free.pop(key)
                if getrefcount(whole) == _ALONE:
                    return whole
                self._owned -= whole.nbytes  # something refers to it past its view: it stays theirs
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
