"""Page-locked memory of the host, which a GPU copies from and to without the processor's help.

Getting it from the driver takes long, so blocks are kept: one goes back when the array made of it
is gone, by itself. Blocks have sizes that are powers of two. For any thread.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable
from threading import Lock
from weakref import finalize

import numpy as np

from headrace.core.tensors import Array

# What is smaller, the driver copies by way of memory of its own, as quickly.
LEAST = 64 << 10


class PinnedPool:
    """Blocks of up to `limit` bytes in all."""

    def __init__(self, pin: Callable[[int], int], limit: int) -> None:
        """`pin` gives the address of so many bytes, which are never given back; it may raise."""
        self.limit = limit
        self.allocated = 0  # bytes
        self._pin = pin
        self._lock = Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        # A block may come back while this thread holds the lock: by the garbage collector.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Array | None:
        """An array of bytes; None for a small one, or if there is no room: use any other memory."""
        if not LEAST <= nbytes <= self.limit:
            return None
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            self._take_back()
            free = self._free[size]
            if free:
                address = free.pop()
            elif self.allocated + size <= self.limit:
                try:
                    address = self._pin(size)
                except OSError:
                    return None
                self.allocated += size
            else:
                return None
        block = (ctypes.c_ubyte * size).from_address(address)
        finalize(block, self._returned.append, (size, address)).atexit = False
        return np.frombuffer(memoryview(block), np.uint8, nbytes)

    @property
    def used(self) -> int:
        """Bytes of blocks that arrays are made of."""
        with self._lock:
            self._take_back()
            return self.allocated - sum(size * len(free) for size, free in self._free.items())

    def _take_back(self) -> None:
        while self._returned:
            size, address = self._returned.popleft()
            self._free[size].append(address)
