"""Limits, garbage collection and threads of engine and front ends, set at its start."""

import fcntl
import gc
import os
import resource
import sys
from contextlib import suppress

# Allocations between garbage collections, collections of the youngest objects between those of the
# next ones, and so on. Requests leave no cycles behind, so that the collector need not run often: a
# batch of 64 has a thousand live objects, more than trigger a collection by default. 30 000 objects
# at once take 20 ms.
_COLLECT_AFTER = 10_000, 2, 100
_SWITCH_SECS = 0.001
_FILES = 1 << 16  # for which the table of descriptors has room from the start


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit.

    Connections, workers, mapped files and large tensors in transit each take descriptors. The
    process' table of descriptors, 8 bytes each, gets room for many at once: Linux doubles it as
    needed, and with several threads each step takes 20 to 50 ms of whoever opens the file.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_FILES, most) - 1))


def serve_promptly() -> None:
    """Set the garbage collector and the interpreter's lock for a process that serves requests.

    The event loop gives the lock up between callbacks, and then waits for a thread that decodes a
    request: up to 5 ms each time by default.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH_SECS)
