"""The state of one file, by what `stat` says of it."""

import errno
import os
from pathlib import Path
from typing import NamedTuple

# What says that nothing is there, or nothing for this process; any other error says nothing of it.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


class Stamp(NamedTuple):
    """What tells one state of a file from another.

    `changed_ns` is when anything was last done to the file. Only that tells two files apart that
    were given the same time, have the same size and, one after the other, the same number. It also
    tells of other permissions.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """The stamp of what `stat` has found."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of the file at a path, None if there is none; raises `OSError` if that is open."""
    try:
        return Stamp.of(path.stat())
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
