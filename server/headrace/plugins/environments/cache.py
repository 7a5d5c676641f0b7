"""The directory of cached environments, each named by a key of its ingredients.

    <cache>/<key>/                     an environment; built in place, because it knows its own path
    <cache>/<key>/environment.json     written last: without it, the environment is none
    <cache>/<key>.lock              exclusive for building and removal, shared for use

Locks are the kernel's (`flock`), so that they end with their process, and work between threads of a
server and between servers. Leftovers of a crash have no document, and are removed by the next
build. A read-only cache serves its content.

A build that makes the cache exceed its limit is followed by the removal of the least recently used
environments that are not in use.

All methods may block on files and are for loading threads and commands.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.core.errors import LoadFailed

log = logging.getLogger(__name__)

DOCUMENT = "environment.json"
CANNOT_BE_BUILT = "the model's environment cannot be built; the server's log says why"
_OURS = re.compile(r"[0-9a-f]{32}(\.lock)?")
_PAUSE_SECS = 0.1  # between two attempts to lock


@dataclass(frozen=True, slots=True)
class CachedEnvironment:
    """A complete environment. `wanted` are its requirements, `used` is a Unix time.

    `numpy` names the numpy outside of it that it is linked to, if any.
    """

    key: str
    path: Path
    wanted: tuple[str, ...]
    python: str
    numpy: str
    nbytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Built:
    """A builder's description of a built environment, as in `CachedEnvironment`."""

    wanted: tuple[str, ...]
    python: str
    numpy: str = ""


class Hold:
    """Keeps an environment from being removed while this object exists."""

    def __init__(self, entry: CachedEnvironment, descriptor: int) -> None:
        """`descriptor` is an open lock, or -1 if locks are unavailable."""
        self.entry = entry
        if descriptor >= 0:
            weakref.finalize(self, os.close, descriptor)


class EnvironmentCache:
    """The environments in one directory, which need not exist yet; `limit` bytes, or any for 0."""

    def __init__(self, root: Path, limit: int = 0) -> None:
        self._root = root
        self._limit = limit

    def entries(self) -> Iterator[CachedEnvironment]:
        """All complete environments, by key."""
        with suppress(FileNotFoundError):
            for path in sorted(self._root.iterdir()):
                if entry := self.entry(path.name):
                    yield entry

    def entry(self, key: str) -> CachedEnvironment | None:
        """A complete environment; raises `LoadFailed` if other users can change it."""
        document = self._root / key / DOCUMENT
        try:
            told = json.loads(document.read_text("utf-8"))
            wanted, python = tuple(map(str, told["wanted"])), str(told["python"])
            numpy, nbytes = str(told["numpy"]), int(told["nbytes"])
            used = document.stat().st_mtime
            owner = document.parent.stat()
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & stat.S_IWOTH:
            raise LoadFailed(
                f"the environment {document.parent} can be changed by others than this user;"
                " remove it, or use another cache (--environment-cache)",
                CANNOT_BE_BUILT,
            )
        return CachedEnvironment(key, document.parent, wanted, python, numpy, nbytes, used)

    def acquire(
        self, key: str, model: str, build: Callable[[Path, int], Built], wait_secs: float
    ) -> Hold:
        """An environment, built by `build` if missing; raises `LoadFailed`.

        `build` fills a directory, and receives the lock's descriptor for its child processes. A
        concurrent build of the same environment is awaited.
        """
        deadline = time.monotonic() + wait_secs
        waits = built = False
        while True:
            if hold := self._use(key):
                if built and self._limit:
                    with suppress(LoadFailed):  # which are about other environments
                        self._trim()
                return hold
            lock = self._lock(key)
            if lock >= 0:
                try:
                    if self.entry(key) is None:
                        self._build(key, build, lock)
                        built = True
                finally:
                    os.close(lock)
            elif time.monotonic() > deadline:
                text = f"its environment was still being built by another after {wait_secs:.0f} s"
                raise LoadFailed(text, CANNOT_BE_BUILT)
            else:
                if not waits:
                    log.info("%s waits for its environment, which another builds", model)
                waits = True
                time.sleep(_PAUSE_SECS)

    def prune(self, before: float) -> tuple[list[CachedEnvironment], list[CachedEnvironment]]:
        """Remove environments last used before a time; returns (removed, still in use).

        Leftovers of crashes are removed whatever their age.
        """
        removed: list[CachedEnvironment] = []
        kept: list[CachedEnvironment] = []
        names = os.listdir(self._root) if self._root.is_dir() else ()
        # Only by valid names: other files may exist in the directory.
        for name in sorted({n.removesuffix(".lock") for n in names if _OURS.fullmatch(n)}):
            entry = self.entry(name)
            if entry is not None and entry.used >= before:
                continue
            gone = self._removed(name)
            if entry is not None:
                (removed if gone else kept).append(entry)
        return removed, kept

    def _trim(self) -> None:
        """Remove the least recently used environments beyond the limit, unless in use."""
        entries = sorted(self.entries(), key=lambda entry: entry.used)
        excess = sum(entry.nbytes for entry in entries) - self._limit
        for entry in entries:
            if excess <= 0:
                return
            if self._removed(entry.key):
                excess -= entry.nbytes
                log.info("removed %s from the environment cache, which exceeded its limit: %s",
                         entry.key, ", ".join(entry.wanted) or "numpy")  # fmt: skip

    def _removed(self, key: str) -> bool:
        """Remove an environment; returns False if it is in use."""
        lock = self._lock(key)
        if lock < 0:
            return False
        try:
            self._remove(key)
        finally:
            os.close(lock)
        return True

    def _use(self, key: str) -> Hold | None:
        """Hold a complete environment, and note its use."""
        entry = self.entry(key)
        if entry is None:
            return None
        lock = self._open(key)
        if lock >= 0:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # being removed
                os.close(lock)
                return None
            except OSError:  # no locks on this file system; existing environments can be used
                os.close(lock)
                lock = -1
        if self.entry(key) is None:  # removed in between
            if lock >= 0:
                os.close(lock)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(entry.path / DOCUMENT)
        return Hold(entry, lock)

    def _open(self, key: str) -> int:
        """The lock file, for using an environment; -1 if it cannot be created."""
        path = self._root / f"{key}.lock"
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            with suppress(OSError):
                return os.open(path, flags | os.O_CLOEXEC, 0o600)
        return -1

    def _lock(self, key: str) -> int:
        """The lock, held exclusively; -1 if another process holds it. Raises `LoadFailed`."""
        path = self._root / f"{key}.lock"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):  # otherwise it was removed in between
                return lock
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(lock)
                raise self._unusable(error) from error
        os.close(lock)
        return -1

    def _unusable(self, error: OSError) -> LoadFailed:
        return LoadFailed(
            f"the environment cache {self._root} cannot be written: {error.strerror};"
            " --environment-cache names another directory",
            "the model's environment cannot be built, for its cache cannot be written",
        )

    def _build(self, key: str, build: Callable[[Path, int], Built], lock: int) -> None:
        path = self._root / key
        try:
            shutil.rmtree(path, ignore_errors=True)  # leftovers of a crash
            path.mkdir(mode=0o755)  # usable by others, too: for example built by root into an image
            document = asdict(build(path, lock)) | {"nbytes": _size(path)}
            draft = path / f"{DOCUMENT}.new"
            draft.write_text(json.dumps(document), "utf-8")
            draft.rename(path / DOCUMENT)
        except OSError as error:
            self._remove(key)
            raise self._unusable(error) from error
        except BaseException:
            self._remove(key)
            raise

    def _remove(self, key: str) -> None:
        """Remove an environment, its document first; requires the exclusive lock."""
        path = self._root / key
        with suppress(OSError):
            (path / DOCUMENT).unlink()
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            log.warning("%s cannot be removed", path)
        with suppress(OSError):
            (self._root / f"{key}.lock").unlink()


def key_of(document: object) -> str:
    """The key of `document`, a JSON value."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def _size(path: Path) -> int:
    """Bytes of all files below a directory."""
    folders = os.walk(path)
    return sum(
        os.lstat(os.path.join(at, name)).st_size for at, _, names in folders for name in names
    )


def cache_of(root: str, limit: int = 0) -> EnvironmentCache:
    """The cache in a directory, or in the default one for ""; raises `LoadFailed`."""
    return EnvironmentCache(Path(root).absolute() if root else default_root(os.environ), limit)


def default_root(environment: Mapping[str, str]) -> Path:
    """The default directory of environments; raises `LoadFailed`."""
    base = Path(environment.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            text = "there is no home directory for environments; give --environment-cache"
            raise LoadFailed(text, CANNOT_BE_BUILT) from error
    return base / "headrace" / "environments"
