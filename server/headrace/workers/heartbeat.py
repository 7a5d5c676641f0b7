"""Heartbeat of a worker: a counter in a memory page that two processes share.

A thread of the worker's interpreter increments it. It stops if the process is stopped, or if native
code holds the interpreter lock; long computations in Python do not stop it. Reading the counter
costs the server no system call.
"""

import fcntl
import mmap
import os
import threading
import time

BEAT_SECS = 0.5
_ORPHAN_SECS = 10.0  # for a model to end by itself after the server's end
_SIZE = mmap.PAGESIZE
_MOST = 2**64


class Heartbeat:
    """The server's end. `descriptor` is for the worker; the owner must close it."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.descriptor = os.memfd_create(
            "headrace-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(self.descriptor, _SIZE)
            # A worker that could shrink the file could crash the server.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._page = mmap.mmap(self.descriptor, _SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            os.close(self.descriptor)
            raise
        self._counts = memoryview(self._page).cast("Q")

    @property
    def count(self) -> int:
        """The number of beats so far."""
        return self._counts[0]

    def close(self) -> None:
        """Unmap the page."""
        self._counts.release()
        self._page.close()


def beat(descriptor: int, orphan_secs: float = _ORPHAN_SECS) -> None:
    """Start beating on a thread, in the page of `descriptor`, which is closed.

    The process ends `orphan_secs` after its parent, if it has not ended by itself: it may be
    loading a model, or hang.
    """
    page = mmap.mmap(descriptor, _SIZE)
    os.close(descriptor)
    counts = memoryview(page).cast("Q")
    parent = os.getppid()

    def run() -> None:
        left = orphan_secs
        while left > 0 or os.getppid() == parent:
            counts[0] = (counts[0] + 1) % _MOST
            time.sleep(BEAT_SECS)
            if os.getppid() != parent:
                left -= BEAT_SECS
        os._exit(1)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
