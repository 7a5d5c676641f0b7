"""A file of lines that is replaced when it has grown."""

import logging
import os
import stat

from headrace.observability.logs import write_all

log = logging.getLogger(__name__)


class RotatingFile:
    """A file at whose end lines are written; belongs to the writing thread.

    A file that was moved away or removed is created anew, so that other programs may rotate it,
    too. Devices and pipes are neither.
    """

    def __init__(self, path: str, max_bytes: int, files: int, noun: str = "the log") -> None:
        """Raises `OSError` if the file cannot be opened. `max_bytes` 0 means no limit. `noun` names
        the file in the log.
        """
        self._path = path
        self._noun = noun
        self._max_bytes = max_bytes
        self._files = files
        self._descriptor = -1
        self._stuck = False  # the last rotation failed
        self._open()

    def write(self, lines: bytes) -> None:
        """Write whole lines, all or none; raises `OSError`."""
        self._follow()
        size = os.fstat(self._descriptor).st_size if self._is_regular else 0
        if size and self._max_bytes and size + len(lines) > self._max_bytes:
            size = self._rotate(size)
        try:
            write_all(self._descriptor, lines)
        except OSError:
            if self._is_regular:
                os.ftruncate(self._descriptor, size)  # no half line
            raise

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        found = os.open(self._path, flags, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = found
        self._is_regular = stat.S_ISREG(os.fstat(found).st_mode)

    def _follow(self) -> None:
        """Open the file anew if the path has another one, or none."""
        if not self._is_regular:
            return
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            same = False
        if not same:
            self._open()

    def _rotate(self, size: int) -> int:
        """Start a new file; returns its size. If that fails, the old one grows beyond its limit:
        entries are worth more than the limit.
        """
        try:
            for number in range(self._files, 0, -1):
                older = f"{self._path}.{number - 1}" if number > 1 else self._path
                if os.path.exists(older):
                    os.replace(older, f"{self._path}.{number}")
            if not self._files:
                os.unlink(self._path)
            self._open()
        except OSError as error:
            if not self._stuck:
                log.error("cannot rotate %s %s: %s", self._noun, self._path, error.strerror)
            self._stuck = True
            return size
        self._stuck = False
        return os.fstat(self._descriptor).st_size
