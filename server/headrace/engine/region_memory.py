"""What the bytes of a shared memory region lie in: a file, or memory of a GPU."""

import os
from typing import Protocol

from headrace.backends.gpus import CudaDriver


class Memory(Protocol):
    """What a region's bytes lie in. Methods block, and may be called on any thread."""

    def read(self, into: memoryview, offset: int) -> int:
        """Fill `into` from `offset` on; the bytes that were there. Raises `OSError`."""

    def write(self, data: memoryview, offset: int) -> bool:
        """Write `data` at `offset`, unless the memory is too short. Raises `OSError`."""

    def close(self) -> None:
        """Let go of it."""


class SharedFile:
    """An open file of system shared memory, from `start` on."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start

    def read(self, into: memoryview, offset: int) -> int:
        """`Memory.read`."""
        done = 0
        while done < len(into):  # one call gives 2 GiB at most
            count = os.preadv(self._descriptor, [into[done:]], self._start + offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, data: memoryview, offset: int) -> bool:
        """`Memory.write`."""
        # A file that has become shorter would grow again: what it had is the client's to give.
        if os.fstat(self._descriptor).st_size < self._start + offset + len(data):
            return False
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self._start + offset + done)
        return True

    def close(self) -> None:
        """`Memory.close`."""
        os.close(self._descriptor)


class CudaMemory:
    """Memory of a GPU that another process has allocated."""

    def __init__(self, cuda: CudaDriver, device: int, address: int) -> None:
        self._cuda = cuda
        self._device = device
        self._address = address

    def read(self, into: memoryview, offset: int) -> int:
        """`Memory.read`."""
        self._cuda.to_host(self._device, self._address + offset, into)
        return len(into)

    def write(self, data: memoryview, offset: int) -> bool:
        """`Memory.write`."""
        self._cuda.to_device(self._device, self._address + offset, data)
        return True

    def close(self) -> None:
        """`Memory.close`."""
        self._cuda.close(self._device, self._address)
