"""Files without a name, in which long frames lie: one for each, written once and mapped once.

They are gone with the last process that has them open, however it ends. They cannot shrink once
they were handed on, so that what maps them may count on their bytes.
"""

import fcntl
import mmap
import os
import resource
from collections.abc import Sequence

from headrace.core.tensors import Buffer
from headrace.wire.link_frames import BrokenLink
from headrace.workers.memory import write_all

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def allow_many_files() -> None:
    """Let this process have as many files open as it may: each mapped one counts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def write_file(buffers: Sequence[Buffer]) -> int:
    """A file with the bytes of `buffers`: its descriptor, to be closed; raises `OSError`."""
    descriptor = os.memfd_create("headrace-frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(descriptor, buffers)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file, read-only, until nothing refers to them any more.

    Raises `BrokenLink` if the file is shorter or may become so, and `OSError`.
    """
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise BrokenLink("a file that may shrink")
    if os.fstat(descriptor).st_size != size or not size:
        raise BrokenLink(f"a file that has not {size} bytes")
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
