"""Contents of files in the cache of stores, each once, by its digest.

    <cache>/objects/<digits>/<sha256>   contents of files, read-only
    <cache>/partial/<key>               a file under way, of its final size
    <cache>/partial/<key>.parts         a byte for each part of it, not 0 once that is written
    <cache>/digests/<key>               the digest of a file that its store knows by a tag alone

Objects have a fixed time of change: one that has another, or another size, was written to by
others, and is fetched again. Parts that were written before a crash are not.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import NamedTuple, Self

from headrace.core.errors import LoadFailed
from headrace.repository.model_files import digest_of, replace_file

PART = 8 << 20  # bytes that are fetched at a time
_PAUSE_SECS = 0.1  # between two attempts to lock
_CHANGED_NS = 1_000_000_000 * 10**9  # time of change of every object
_STALE_SECS = 86_400.0  # after which a file under way is given up


class CachedContent(NamedTuple):
    """The content of a file of a model: digest, `sha256:…`, and bytes."""

    digest: str
    size: int


class CacheDirectory:
    """The directory, which need not exist yet: its locks, and the errors of its disk.

    Locks are the kernel's (`flock`), so that they end with their process, and work between threads
    and between servers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make it; raises `LoadFailed`, also if other users can change it."""
        with self.written():
            for name in ("objects", "trees", "partial", "digests", "listings"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            owner = self.path.stat()
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & stat.S_IWOTH:
            raise LoadFailed(
                f"the cache of stores {self.path} can be changed by others than this user; give"
                " another one (--store-cache)"
            )

    @contextmanager
    def written(self) -> Iterator[None]:
        """Raise an error of the file system as `LoadFailed`."""
        try:
            yield
        except OSError as error:
            raise LoadFailed(
                f"the cache of stores {self.path} cannot be written: {error.strerror or error}"
                " (--store-cache, --store-cache-bytes)"
            ) from error

    def locked(self, path: Path, kind: int) -> int | None:
        """The descriptor of a lock that is held; None if another one has it."""
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            try:
                lock = os.open(path, flags | os.O_CLOEXEC, 0o600)
                break
            except OSError:
                continue
        else:
            return None
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):  # otherwise it was removed in between
                return lock
        except OSError:
            pass
        os.close(lock)
        return None

    def lock(self, path: Path, kind: int, stopped: Event) -> int:
        """The descriptor of a lock, once it is held; raises `LoadFailed` when `stopped`."""
        while (lock := self.locked(path, kind)) is None:
            pause(stopped)
        return lock


class CachedContents:
    """All such contents of a cache."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory, self._root = directory, directory.path
        self._guard = Lock()
        self._nbytes = -1  # of all of them; -1 until they are counted

    def has(self, content: CachedContent) -> bool:
        """True if the content is there."""
        return is_sound(self._path(content.digest), content.size)

    def put(self, content: bytes) -> str:
        """Keep the content of a small file; returns its digest."""
        digest = digest_of(content)
        if not self.has(CachedContent(digest, len(content))):
            name = f"{self._path(digest).name}.{os.getpid()}.{get_ident()}"
            draft = self._root / "partial" / name
            with self._directory.written():
                draft.write_bytes(content)
            self.adopt(draft, CachedContent(digest, len(content)))
        return digest

    def adopt(self, file: Path, content: CachedContent) -> None:
        """Keep a file, which is moved, as this content, unless that is there."""
        target = self._path(content.digest)
        with self._directory.written():
            if self.has(content):
                file.unlink()
                return
            target.parent.mkdir(mode=0o755, exist_ok=True)
            _seal(file)
            file.replace(target)
        with self._guard:
            if self._nbytes >= 0:
                self._nbytes += content.size

    def link(self, content: CachedContent, target: Path) -> bool:
        """Make a file of a content; false if that is missing."""
        source = self._path(content.digest)
        if not self.has(content):
            return False
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # this file system has no hard links, or no more for this file
            shutil.copyfile(source, target)
            _seal(target)
        return True

    @contextmanager
    def partial(self, key: str, size: int, stopped: Event) -> Iterator["PartialFile"]:
        """A file under way, for this caller alone; another who has it is waited for."""
        path = self._root / "partial" / key
        lock = self._directory.lock(path, fcntl.LOCK_EX, stopped)
        try:
            with self._directory.written(), PartialFile(self, path, lock, size) as file:
                yield file
        finally:
            os.close(lock)

    def digest(self, key: str) -> str:
        """The digest that `keep_digest` has kept; "" if none."""
        try:
            return (self._root / "digests" / key).read_text("ascii")
        except (OSError, ValueError):
            return ""

    def keep_digest(self, key: str, digest: str) -> None:
        """Keep the digest of a file, so that it is not fetched again."""
        with self._directory.written():
            replace_file(self._root / "digests" / key, digest.encode())

    @property
    def known_bytes(self) -> int:
        """Bytes of all contents when they were last counted; does not block."""
        return max(self._nbytes, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all contents."""
        with self._guard:
            if self._nbytes < 0:
                self._nbytes = sum(status.st_size for _, status in self._all())
            return self._nbytes

    def counted(self) -> int:
        """Bytes of all contents, counted anew: others may have changed them."""
        with self._guard:
            self._nbytes = -1
        return self.nbytes

    def remove_unused(self) -> None:
        """Remove contents of no tree, and files under way that nobody has continued for long."""
        for path, status in self._all():
            if status.st_nlink == 1:
                path.unlink(missing_ok=True)
        for path in (self._root / "digests").glob("*"):
            if not self._path(self.digest(path.name)).exists():
                path.unlink(missing_ok=True)
        before = time.time() - _STALE_SECS
        for path in (self._root / "partial").glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _all(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self._root / "objects").glob("*/*"):
            with suppress(OSError):
                yield path, path.stat()

    def _path(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        return self._root / "objects" / name[:2] / name


class PartialFile:
    """A file under way, locked by its owner: it knows which parts were written, also earlier."""

    def __init__(self, contents: CachedContents, path: Path, lock: int, size: int) -> None:
        """`lock` is a descriptor of the file at `path`, which stays open."""
        self._contents, self._path, self._data, self._size = contents, path, lock, size
        os.truncate(lock, size)
        self._notes = Path(f"{path}.parts")
        self._parts = os.open(self._notes, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._parts)

    def missing(self) -> list[tuple[int, int]]:
        """Begin and end of each part that has not been written."""
        starts = range(0, self._size, PART)
        done = os.pread(self._parts, len(starts), 0).ljust(len(starts), b"\0")
        found = zip(starts, done, strict=True)
        return [(at, min(at + PART, self._size)) for at, is_done in found if not is_done]

    def write(self, start: int, content: bytes) -> None:
        """Write a part, and note that; from any thread."""
        os.pwrite(self._data, content, start)
        os.fdatasync(self._data)  # before the note: neither is to be believed after a power cut
        os.pwrite(self._parts, b"\1", start // PART)

    def digest(self) -> str:
        """The digest of its content."""
        with self.opened() as file:
            return digest_of(file)

    def opened(self) -> BufferedReader:
        """The content, for reading, once all of it is written."""
        file = os.fdopen(os.dup(self._data), "rb")
        file.seek(0)
        return file

    def finish(self, digest: str) -> None:
        """Keep it, complete, as the content of this digest."""
        self._contents.adopt(self._path, CachedContent(digest, self._size))
        self._notes.unlink()

    def give_up(self) -> None:
        """Remove it: its content is wrong, or no longer needed."""
        for each in (self._path, self._notes):
            each.unlink(missing_ok=True)


def is_sound(path: Path, size: int) -> bool:
    """True if a file is as it was put here, as far as `stat` tells."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_size == size and found.st_mtime_ns == _CHANGED_NS


def pause(stopped: Event) -> None:
    """Wait before another attempt to lock; raises `LoadFailed` when `stopped`."""
    if stopped.wait(_PAUSE_SECS):
        raise LoadFailed("the store is closed: the server is shutting down")


def _seal(path: Path) -> None:
    path.chmod(0o444)
    os.utime(path, ns=(_CHANGED_NS, _CHANGED_NS))
