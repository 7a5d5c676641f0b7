"""The directory in which environments lie, each under the name of what it was made from.

    <cache>/<key>/                     an environment; built in place, because it knows its own path
    <cache>/<key>/environment.json     written last: without it, the environment is none
    <cache>/<key>.lock                 held alone by who builds or removes it, shared by who uses it

Locks are the kernel's (`flock`), so that they end with their process, and hold among the threads of
a server and among servers. What a crash has left has no document, and is removed by who builds it
next. A cache that cannot be written serves what it has.

All methods may wait for files and are for loading threads and commands.
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
_PAUSE_SECS = 0.1  # between two looks at a lock


@dataclass(frozen=True, slots=True)
class Entry:
    """An environment that is whole. `wanted` says what was asked for, times are of the epoch."""

    key: str
    path: Path
    wanted: tuple[str, ...]
    python: str
    built: float
    used: float


@dataclass(frozen=True, slots=True)
class Built:
    """Description of a built environment, by its builder."""

    wanted: tuple[str, ...]
    python: str


class Hold:
    """Keeps an environment from being removed for as long as this value is referred to."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """`descriptor` is an open lock, or -1 where none can be had."""
        self.path = path
        if descriptor >= 0:
            weakref.finalize(self, os.close, descriptor)


class EnvironmentCache:
    """The environments in one directory, which need not be there yet."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def entries(self) -> Iterator[Entry]:
        """All that are whole, by key."""
        with suppress(FileNotFoundError):
            for path in sorted(self._root.iterdir()):
                if entry := self.entry(path.name):
                    yield entry

    def entry(self, key: str) -> Entry | None:
        """An environment that is whole; raises `LoadFailed` if others can change it."""
        document = self._root / key / DOCUMENT
        try:
            told = json.loads(document.read_text("utf-8"))
            wanted, python = tuple(map(str, told["wanted"])), str(told["python"])
            built, used = float(told["built"]), document.stat().st_mtime
            owner = document.parent.stat()
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & stat.S_IWOTH:
            raise LoadFailed(
                f"the environment {document.parent} can be changed by others than this user;"
                " remove it, or use another cache (--environment-cache)",
                CANNOT_BE_BUILT,
            )
        return Entry(key, document.parent, wanted, python, built, used)

    def acquire(
        self, key: str, model: str, build: Callable[[Path, int], Built], wait_secs: float
    ) -> Hold:
        """An environment, from `build` if it is not there; raises `LoadFailed`.

        `build` fills a directory, and is given the lock's descriptor so that what it starts can
        hold on to it. If somebody else builds the same environment, that is awaited.
        """
        deadline = time.monotonic() + wait_secs
        waits = False
        while True:
            if hold := self._use(key):
                return hold
            lock = self._lock(key)
            if lock >= 0:
                try:
                    if self.entry(key) is None:
                        self._build(key, build, lock)
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

    def prune(self, before: float) -> tuple[list[Entry], list[Entry]]:
        """Remove what was last used before a time: (removed, those that are in use and stay).

        What a crash has left is removed whatever its age.
        """
        removed: list[Entry] = []
        kept: list[Entry] = []
        names = os.listdir(self._root) if self._root.is_dir() else ()
        # By their names only: whatever else may lie there is not ours.
        for name in sorted({n.removesuffix(".lock") for n in names if _OURS.fullmatch(n)}):
            entry = self.entry(name)
            if entry is not None and entry.used >= before:
                continue
            lock = self._lock(name)
            if lock >= 0:
                try:
                    self._remove(name)
                finally:
                    os.close(lock)
            if entry is not None:
                (removed if lock >= 0 else kept).append(entry)
        return removed, kept

    def _use(self, key: str) -> Hold | None:
        """Hold an environment that is whole, and note that it is used."""
        entry = self.entry(key)
        if entry is None:
            return None
        lock = self._open(key)
        if lock >= 0:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # it is being removed
                os.close(lock)
                return None
            except OSError:  # no locks on this file system; what is there can be used
                os.close(lock)
                lock = -1
        if self.entry(key) is None:  # removed in between
            if lock >= 0:
                os.close(lock)
            return None
        with suppress(OSError):  # of a cache that cannot be written
            os.utime(entry.path / DOCUMENT)
        return Hold(entry.path, lock)

    def _open(self, key: str) -> int:
        """A lock's file, for one who only uses what is there; -1 where none can be made."""
        path = self._root / f"{key}.lock"
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            with suppress(OSError):
                return os.open(path, flags | os.O_CLOEXEC, 0o600)
        return -1

    def _lock(self, key: str) -> int:
        """The lock, held alone; -1 if another holds it. Raises `LoadFailed`."""
        path = self._root / f"{key}.lock"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):  # else it was removed in between
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
            shutil.rmtree(path, ignore_errors=True)  # what a crash has left
            path.mkdir(mode=0o755)  # to be used by others too: built by root into an image, say
            document = asdict(build(path, lock)) | {"built": time.time()}
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
        """Take an environment away, its document first; for who holds the lock alone."""
        path = self._root / key
        with suppress(OSError):
            (path / DOCUMENT).unlink()
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            log.warning("%s cannot be removed", path)
        with suppress(OSError):
            (self._root / f"{key}.lock").unlink()


def key_of(document: object) -> str:
    """The name of what is made from `document`, a value that JSON can hold."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def default_root(environment: Mapping[str, str]) -> Path:
    """Where environments lie unless the operator says otherwise; raises `LoadFailed`."""
    base = Path(environment.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            text = "there is no home directory for environments; give --environment-cache"
            raise LoadFailed(text, CANNOT_BE_BUILT) from error
    return base / "headrace" / "environments"
