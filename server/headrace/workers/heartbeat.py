"""A sign of life: a page of memory that two processes share, in which the worker goes on counting.

What counts is a thread of the worker's interpreter. It stands still if the process is stopped, and
if native code keeps the interpreter to itself; a model that merely computes for long does not stop
it. Looking at the count costs the server no system call.
"""

import fcntl
import mmap
import os
import threading
import time

BEAT_SECS = 0.5
_ORPHAN_SECS = 10.0  # that a model has to end by itself once the server is no more
_SIZE = mmap.PAGESIZE
_MOST = 2**64


class Heartbeat:
    """The server's end. `descriptor` is for the worker, and for the owner to close."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.descriptor = os.memfd_create(
            "headrace-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(self.descriptor, _SIZE)
            # A worker that could shrink it could kill the server with it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._page = mmap.mmap(self.descriptor, _SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            os.close(self.descriptor)
            raise
        self._counts = memoryview(self._page).cast("Q")

    @property
    def count(self) -> int:
        """How often the worker has counted."""
        return self._counts[0]

    def close(self) -> None:
        """Unmap the page."""
        self._counts.release()
        self._page.close()


def beat(descriptor: int, orphan_secs: float = _ORPHAN_SECS) -> None:
    """Count in the page behind `descriptor`, which is closed, from now on, on a thread.

    The process ends `orphan_secs` after the one that started it, if it has not ended by itself: it
    may be in the middle of loading a model, or hang.
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
