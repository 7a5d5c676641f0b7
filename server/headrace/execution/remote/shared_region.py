"""A piece of system memory that a server on this machine can open by its name.

It is a file in /dev/shm, as `shm_open` makes it. A lock says that somebody still has it: the system
takes that back from a process that has ended, however it has, in whichever container. So what has
no lock was left behind, and goes.

All of this blocks, but for the attributes.
"""

import fcntl
import mmap
import os
import re
import secrets
import stat
from contextlib import suppress

_NAME = re.compile(r"headrace-[0-9]+-[0-9a-f]{24}")
_FOLDER = "/dev/shm"


class SharedRegion:
    """`size` bytes that have their place in memory from the start, and are zeros."""

    __slots__ = ("_descriptor", "memory", "name", "size")

    def __init__(self, size: int) -> None:
        """Raises `OSError` where there is no room for it."""
        self.size = size
        self.name = f"headrace-{os.getpid()}-{secrets.token_hex(12)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(_path(self.name), flags, 0o600)
        try:
            # Another process may hold the lock for a moment, to see whether there is one.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._descriptor).st_nlink:
                raise OSError("it was taken for one that was left behind")
            # Without it, memory that is not there would be noticed by whoever writes, who is killed
            # for that.
            os.posix_fallocate(self._descriptor, 0, size)
            populate = getattr(mmap, "MAP_POPULATE", 0)
            flags = mmap.MAP_SHARED | populate
            self.memory = memoryview(mmap.mmap(self._descriptor, size, flags))
        except BaseException:
            self.dispose()
            raise

    @property
    def key(self) -> str:
        """What `shm_open` is given."""
        return f"/{self.name}"

    def dispose(self) -> None:
        """Remove the file; the memory is there for as long as anybody refers to `memory`."""
        if self._descriptor >= 0:
            with suppress(FileNotFoundError):
                os.unlink(_path(self.name))
            os.close(self._descriptor)
            self._descriptor = -1


def is_ours(name: str) -> bool:
    """Whether it is the name of a region of this server or another one of its kind."""
    return _NAME.fullmatch(name) is not None


def exists(name: str) -> bool:
    """Whether there is a region of this name, whoever has made it."""
    return os.path.lexists(_path(name))


def remove_left_behind() -> int:
    """Remove what ended servers of this user have left; how many regions that was."""
    removed = 0
    try:
        names = [name for name in os.listdir(_FOLDER) if is_ours(name)]
    except OSError:
        return 0
    for name in names:
        with suppress(OSError):  # it is gone, or is somebody else's
            removed += _removed(_path(name))
    return removed


def _removed(path: str) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError: it is in use
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def _path(name: str) -> str:
    return os.path.join(_FOLDER, name)
