"""A client's POSIX shared memory: a file in /dev/shm, removed after the test."""

import os
import uuid
from pathlib import Path
from typing import Self


class SharedFile:
    """A shared memory object of `size` bytes; `key` is its name for a server."""

    def __init__(self, size: int, prefix: str = "headrace-test-") -> None:
        self.key = f"/{prefix}{uuid.uuid4().hex}"
        self.path = Path("/dev/shm") / self.key[1:]
        self._size = size
        self.descriptor = -1

    def __enter__(self) -> Self:
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.resize(self._size)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self.path.unlink()

    def resize(self, size: int) -> None:
        """Truncate or extend the object."""
        os.ftruncate(self.descriptor, size)

    def put(self, data: bytes, offset: int = 0) -> None:
        """Write bytes."""
        assert os.pwrite(self.descriptor, data, offset) == len(data)

    def get(self, size: int, offset: int = 0) -> bytes:
        """Read bytes."""
        return os.pread(self.descriptor, size, offset)
