"""POSIX shared memory as a client has it: a file in /dev/shm, gone with the test."""

import os
import uuid
from pathlib import Path
from typing import Self


class SharedFile:
    """A shared memory object of `size` bytes; `key` is what a server is told."""

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
        """Make it longer or shorter."""
        os.ftruncate(self.descriptor, size)

    def put(self, data: bytes, offset: int = 0) -> None:
        """Write."""
        assert os.pwrite(self.descriptor, data, offset) == len(data)

    def get(self, size: int, offset: int = 0) -> bytes:
        """Read."""
        return os.pread(self.descriptor, size, offset)
