"""Model directories that requests have brought along, kept for as long as something uses them.

All lie in one directory that only the server's user may look into. It is made anew, so that nothing
is there that a path could lead out by, and paths are checked before anything is written. It goes
with the process; what a killed one has left behind goes when the next one begins to keep something.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from weakref import finalize

from headrace.core.errors import InvalidRequest, LoadFailed
from headrace.core.tensors import Buffer

_PREFIX = "headrace-models-"
MOST_FILES = 1_000
_MOST_LEVELS = 16
_LONGEST_NAME = 255  # bytes, as file systems have it
_LONGEST_PATH = 1_024


class Upload:
    """One model directory; it is removed when this value is gone, or at once by `remove`."""

    def __init__(self, path: Path, gone: Callable[[], None]) -> None:
        """`gone` is called then, on any thread."""
        self.path = path
        self.remove = finalize(self, _remove, path, gone)


class Uploads:
    """The directories that there are; they may be made and removed on any thread."""

    def __init__(self, max_bytes: int) -> None:
        """At most `max_bytes` of files are kept at a time."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._root: Path | None = None
        self._root_lock = -1
        self._guard = RLock()  # a value may be gone at any time, also while this is held

    def write(self, files: Mapping[tuple[str, ...], Buffer]) -> Upload:
        """Write files, by the parts of their paths as `checked_paths` gives them.

        Raises `LoadFailed`, with nothing left behind.
        """
        nbytes = sum(map(len, files.values()))
        self._count(nbytes)
        try:
            upload = Upload(self._make_directory(), partial(self._count, -nbytes))
        except OSError as error:
            self._count(-nbytes)
            raise _failed(error) from error
        try:
            for parts, content in files.items():
                path = upload.path.joinpath(*parts)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(path, content)
        except OSError as error:
            raise _failed(error) from error
        return upload

    def close(self) -> None:
        """Remove everything, whoever uses it."""
        with self._guard:
            root, self._root = self._root, None
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
                os.close(self._root_lock)

    def _count(self, nbytes: int) -> None:
        with self._guard:
            if nbytes > 0 and self._bytes + nbytes > self._max_bytes:
                raise LoadFailed(
                    f"{nbytes} bytes of files are too many beside those of other load requests;"
                    f" {self._max_bytes} are kept at most (--max-override-bytes)"
                )
            self._bytes += nbytes

    def _make_directory(self) -> Path:
        with self._guard:
            if self._root is None:
                _remove_left_behind(Path(tempfile.gettempdir()))
                root = Path(tempfile.mkdtemp(prefix=_PREFIX))
                self._root_lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._root_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._root = root
            return Path(tempfile.mkdtemp(dir=self._root))


def checked_paths(files: Mapping[str, Buffer]) -> dict[tuple[str, ...], Buffer]:
    """Files by the parts of their paths; raises `InvalidRequest` unless all lie in one directory.

    No part may lead elsewhere, and no path may be a file and a directory.
    """
    if len(files) > MOST_FILES:
        raise InvalidRequest(f"at most {MOST_FILES} files are taken, got {len(files)}")
    found = {_parts(path): content for path, content in files.items()}
    directories = {parts[:n] for parts in found for n in range(1, len(parts))}
    for parts in found:
        if parts in directories:
            raise InvalidRequest(f"{_shown('/'.join(parts))} is a file and a directory")
    return found


def _parts(path: str) -> tuple[str, ...]:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{_shown(path)} is not text") from None
    parts = tuple(path.split("/"))
    if path.startswith("/"):
        problem = "must be relative to the model's directory"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "must consist of names, without '.', '..' and empty ones"
    elif any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in path):
        problem = "must have neither control characters nor backslashes"
    elif size > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        problem = f"is too long: {_LONGEST_PATH} bytes at most, {_LONGEST_NAME} for each name"
    elif len(parts) > _MOST_LEVELS:
        problem = f"must have at most {_MOST_LEVELS} names"
    else:
        return parts
    raise InvalidRequest(f"file path {_shown(path)} {problem}")


def _shown(path: str) -> str:
    return repr(path if len(path) <= 80 else f"{path[:80]}…")


def _write(path: Path, content: Buffer) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def _failed(error: OSError) -> LoadFailed:
    return LoadFailed(f"its files cannot be kept: {error.strerror}")


def _remove(path: Path, gone: Callable[[], None]) -> None:
    """On a thread, since it may take long and whoever lets go of it last may not wait."""
    gone()
    try:
        Thread(target=shutil.rmtree, args=(path, True), daemon=True).start()
    except RuntimeError:  # the process ends
        shutil.rmtree(path, ignore_errors=True)


def _remove_left_behind(directory: Path) -> None:
    """Remove what processes of this user have kept that are no more."""
    for path in _own(directory):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _own(directory: Path) -> Iterable[Path]:
    try:
        found = list(directory.glob(f"{_PREFIX}*"))
    except OSError:
        return
    for path in found:
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield path
