"""Temporary directories of this process, which are removed with it, or by a later process.

Each is locked while its process lives: one that is not is left over from a process that was killed.
Programs that are not trusted may fill one: its removal follows no link, and needs neither a stack
nor an open file for each level.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class KeptDirectory:
    """A directory for temporary files, by default for this user alone."""

    def __init__(self, prefix: str) -> None:
        """Make a directory whose name begins with `prefix`; raises `OSError`.

        Directories of that prefix that dead processes of this user have left behind are removed.
        """
        _remove_left_behind(Path(tempfile.gettempdir()), prefix)
        # It gets its name once it is locked: it might be removed as left behind otherwise.
        unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._lock = os.open(unlocked, _DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name[1:]))

    def close(self) -> None:
        """Remove the directory, as far as that is possible."""
        remove_tree(self.path)
        os.close(self._lock)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it; what cannot be removed stays.

    Directories below those at the top are moved there first.
    """
    with suppress(OSError):
        top = os.open(path, _DIRECTORY)
        try:
            while _remove_level(top):
                pass
        finally:
            os.close(top)
        path.rmdir()


def _remove_level(top: int) -> int:
    """Remove the uppermost level, and move the next one there; returns the number removed."""
    removed, lead = 0, token_hex(8)
    with os.scandir(top) as found:
        for number, entry in enumerate(found):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    _move_up(entry.name, top, f"{lead}.{number}")
                    os.rmdir(entry.name, dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=top)
                removed += 1
    return removed


def _move_up(name: str, top: int, lead: str) -> None:
    """Empty a directory: its files are removed, its directories moved."""
    _unlock(name, top)
    inner = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        with os.scandir(inner) as found:
            for number, entry in enumerate(found):
                if entry.is_dir(follow_symlinks=False):
                    _unlock(entry.name, inner)  # moving changes its entry for its parent
                    os.rename(entry.name, f"{lead}.{number}", src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=inner)
    finally:
        os.close(inner)


def _unlock(name: str, folder: int) -> None:
    """Permit its owner, this user, to change a directory, never what a link leads to."""
    held = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=folder)
    try:
        status = os.fstat(held)
        if status.st_uid == os.geteuid() and status.st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{held}", 0o700)
    finally:
        os.close(held)


def _remove_left_behind(directory: Path, prefix: str) -> None:
    """Remove the directories of this user's processes that no longer exist."""
    for path in _own(directory, prefix):
        with suppress(OSError):
            lock = os.open(path, _DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
            finally:
                os.close(lock)


def _own(directory: Path, prefix: str) -> Iterable[Path]:
    try:
        found = list(directory.glob(f"{prefix}*"))
    except OSError:
        return
    for path in found:
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield path
