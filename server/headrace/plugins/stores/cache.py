"""The directory of models from stores, which all servers of a machine may share.

    <cache>/objects/<digits>/<sha256>   contents of files, read-only
    <cache>/trees/<key>/                a model in one state: hard links to objects, and a manifest
    <cache>/trees/<key>.json            its document, written last: without it, there is no tree
    <cache>/trees/<key>.lock            exclusive for making and removal, shared for use
    <cache>/partial/<key>               a file under way, of its final size
    <cache>/partial/<key>.d/            files of a tree that come together, until it is made
    <cache>/partial/<key>.parts         a byte for each part of it, not 0 once that is written
    <cache>/digests/<key>               the digest of a file that its store knows by a tag alone
    <cache>/listings/<key>.json         the models of a store when it was last asked
    <cache>/objects.lock                shared while a tree is made, exclusive for removal

Locks are the kernel's (`flock`), so that they end with their process, and work between threads and
between servers. Leftovers of a crash are used: parts that were written are not fetched again, and
a tree without a document is made anew. A read-only cache serves what it has.

Objects have a fixed time of change: one that has another, or another size, was written to by
others, and is fetched again. All methods block, and are for threads.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from threading import Event, Lock, get_ident
from typing import Any, NamedTuple

from headrace.core.errors import LoadFailed
from headrace.repository.model_files import MANIFEST, digest_of, new_manifest, replace_file
from headrace.repository.store import Lease

log = logging.getLogger(__name__)

PART = 8 << 20  # bytes that are fetched at a time
_PAUSE_SECS = 0.1  # between two attempts to lock
_CHANGED_NS = 1_000_000_000 * 10**9  # time of change of every object
_STALE_SECS = 86_400.0  # after which a file under way is given up


class CachedContent(NamedTuple):
    """The content of a file of a model: digest, `sha256:…`, and bytes."""

    digest: str
    size: int


def key_of(*parts: str) -> str:
    """A file name for these texts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


class PartialFile:
    """A file under way, locked by its owner: it knows which parts were written, also earlier."""

    def __init__(self, data: int, parts: int, size: int) -> None:
        """`data` and `parts` are descriptors, which it closes."""
        self._data, self._parts, self._size = data, parts, size
        os.truncate(data, size)

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

    def close(self) -> None:
        """Unlock it."""
        os.close(self._data)
        os.close(self._parts)


class StoreCache:
    """One such directory, which need not exist yet; `limit` bytes, or any for 0."""

    def __init__(self, root: Path, limit: int = 0) -> None:
        self.root = root
        self._limit = limit
        self._guard = Lock()
        self._nbytes = -1  # of all objects; -1 until they are counted

    # --- trees

    def use(self, key: str, origin: Path) -> Lease | None:
        """A tree, which stays as long as its lease; None if it is not there."""
        path = self._tree(key)
        there = path.with_suffix(".json").exists()
        lock = self._locked(path.with_suffix(".lock"), fcntl.LOCK_SH) if there else None
        if lock is None:
            return None
        if not self._is_whole(path):
            os.close(lock)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(path.with_suffix(".json"))
        return Lease(path, lambda: os.close(lock), origin)

    @contextmanager
    def making(self, key: str, stopped: Event) -> Iterator[bool]:
        """Make a tree within this block: true if this caller is to, false if another one has.

        What is put into the cache meanwhile stays. Raises `LoadFailed` if it cannot be written, or
        when `stopped`.
        """
        path = self._tree(key)
        self._make_directories()
        while (lock := self._locked(path.with_suffix(".lock"), fcntl.LOCK_EX)) is None:
            if self.use(key, path) is not None:
                yield False
                return
            _wait(stopped)
        try:
            if self._is_whole(path):
                yield False
                return
            while (shared := self._locked(self.root / "objects.lock", fcntl.LOCK_SH)) is None:
                _wait(stopped)
            try:
                yield True
            finally:
                os.close(shared)
        finally:
            os.close(lock)

    def make(
        self, key: str, files: Mapping[str, CachedContent], manifest: bytes, model: str
    ) -> bool:
        """Make the tree of these files and this manifest; false if an object is missing.

        Only within `making`. `model` is for people who look at its document.
        """
        path = self._tree(key)
        with self._written():
            shutil.rmtree(path, ignore_errors=True)  # leftovers of a crash
            path.mkdir(mode=0o755)
            for name, content in files.items():
                target = path / name
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                source = self._object(content.digest)
                if not _is_sound(source, content.size):
                    return False
                try:
                    os.link(source, target)
                except FileExistsError:
                    raise
                except OSError:  # this file system has no hard links, or no more for this file
                    shutil.copyfile(source, target)
                    _seal(target)
            (path / MANIFEST).write_bytes(manifest)
            told = {"model": model, "files": {n: list(c) for n, c in files.items()}}
            replace_file(path.with_suffix(".json"), json.dumps(told).encode())
        return True

    def bring(
        self, key: str, model: str, nbytes: int, fill: Callable[[Path], None], stopped: Event
    ) -> tuple[Lease, Mapping[str, CachedContent]]:
        """A tree and its files, made of those that `fill` writes into a directory if it is absent.

        They are about `nbytes`. Raises `LoadFailed` if it cannot be written, for links and the
        like, or when `stopped`.
        """
        path = self._tree(key)
        while (lease := self.use(key, path)) is None:
            self.make_room(nbytes)  # not within: a tree in the making keeps all
            with self.making(key, stopped) as wanted:
                if wanted:
                    draft = self.root / "partial" / f"{key}.d"
                    with self._written():
                        shutil.rmtree(draft, ignore_errors=True)  # leftovers of a crash
                        draft.mkdir(mode=0o700)
                    try:
                        fill(draft)
                        self._adopt(key, model, draft)
                    finally:
                        shutil.rmtree(draft, ignore_errors=True)
        told = json.loads(path.with_suffix(".json").read_bytes())["files"]
        return lease, {name: CachedContent(*found) for name, found in told.items()}

    def _adopt(self, key: str, model: str, draft: Path) -> None:
        """Make the tree of the files in a directory, which are moved."""
        files: dict[str, CachedContent] = {}
        manifest = b""
        with self._written():
            for path in sorted(draft.rglob("*")):
                name = str(path.relative_to(draft))
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise LoadFailed(f"{model}: {name} is no file")
                if name == MANIFEST:
                    manifest = path.read_bytes()
                elif path.is_file():
                    with path.open("rb") as file:
                        digest = digest_of(file)
                    files[name] = CachedContent(digest, path.stat().st_size)
                    if not self.has(files[name]):
                        self._place(path, self._object(digest))
        digests = {name: content.digest for name, content in files.items()}
        if not self.make(key, files, manifest or new_manifest(digests), model):
            raise LoadFailed(f"the cache of stores {self.root} has lost files of {model}")

    # --- objects

    def has(self, content: CachedContent) -> bool:
        """True if the content is there."""
        return _is_sound(self._object(content.digest), content.size)

    def put(self, content: bytes) -> str:
        """Keep the content of a small file; returns its digest. Only within `making`."""
        digest = digest_of(content)
        target = self._object(digest)
        if not _is_sound(target, len(content)):
            with self._written():
                draft = self.root / "partial" / f"{target.name}.{os.getpid()}.{get_ident()}"
                draft.write_bytes(content)
                self._place(draft, target)
        return digest

    @contextmanager
    def partial(self, key: str, size: int, stopped: Event) -> Iterator[PartialFile]:
        """A file under way, for this caller alone; another who has it is waited for."""
        path = self.root / "partial" / key
        while (lock := self._locked(path, fcntl.LOCK_EX)) is None:
            _wait(stopped)
        try:
            with self._written():
                parts = os.open(f"{path}.parts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                file = PartialFile(os.dup(lock), parts, size)
            try:
                with self._written():
                    yield file
            finally:
                file.close()
        finally:
            os.close(lock)

    def finish(self, key: str, size: int, digest: str) -> None:
        """Keep a complete file under way as the content of this digest; only by its owner."""
        path = self.root / "partial" / key
        target = self._object(digest)
        with self._written():
            if _is_sound(target, size):
                path.unlink()
            else:
                self._place(path, target)
            Path(f"{path}.parts").unlink()

    def give_up(self, key: str) -> None:
        """Remove a file under way, whose content is wrong; only by its owner."""
        path = self.root / "partial" / key
        for each in (path, Path(f"{path}.parts")):
            each.unlink(missing_ok=True)

    def digest(self, key: str) -> str:
        """The digest that `keep_digest` has kept; "" if none."""
        try:
            return (self.root / "digests" / key).read_text("ascii")
        except (OSError, ValueError):
            return ""

    def keep_digest(self, key: str, digest: str) -> None:
        """Keep the digest of a file, so that it is not fetched again. Only within `making`."""
        with self._written():
            replace_file(self.root / "digests" / key, digest.encode())

    # --- listings

    def listing(self, store: str) -> Mapping[str, Any]:
        """The last listing of a store, by model; empty if none was kept."""
        try:
            found = json.loads(self._listing(store).read_bytes())
        except (OSError, ValueError):
            return {}
        return found["models"] if isinstance(found, dict) and "models" in found else {}

    def keep_listing(self, store: str, models: Mapping[str, Any]) -> None:
        """Keep what a store has, for a time when it cannot be asked; not if that is impossible."""
        with suppress(OSError, LoadFailed):
            self._make_directories()
            document = json.dumps({"store": store, "models": models}).encode()
            replace_file(self._listing(store), document)

    # --- size

    @property
    def known_bytes(self) -> int:
        """Bytes of all contents when they were last counted; does not block."""
        return max(self._nbytes, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all contents."""
        with self._guard:
            if self._nbytes < 0:
                self._nbytes = sum(status.st_size for _, status in self._objects())
            return self._nbytes

    def make_room(self, needed: int = 0) -> None:
        """Remove the least recently used trees beyond the limit, `needed` bytes below it.

        None that a server has loaded; nothing as long as another tree is made.
        """
        if self.nbytes + needed <= self._limit or not self._limit:
            return
        lock = self._locked(self.root / "objects.lock", fcntl.LOCK_EX)
        if lock is None:
            return  # whoever makes the last tree makes room
        try:
            self._remove_unused()
            documents = iter(self._oldest_first())
            while self._counted() + needed > self._limit and (found := next(documents, None)):
                if self._remove_tree(found.with_suffix("")):
                    log.info("removed %s from the cache of stores, which exceeded its limit: %s",
                             found.stem, self.root)  # fmt: skip
                    self._remove_unused()
        finally:
            os.close(lock)

    def _counted(self) -> int:
        """Bytes of all contents, counted anew: others may have changed them."""
        with self._guard:
            self._nbytes = -1
        return self.nbytes

    # --- implementation

    def _oldest_first(self) -> Sequence[Path]:
        found = []
        for document in (self.root / "trees").glob("*.json"):
            with suppress(OSError):
                found.append((document.stat().st_mtime_ns, document))
        return [document for _, document in sorted(found)]

    def _remove_tree(self, path: Path) -> bool:
        """Remove a tree, its document first; false if it is in use."""
        lock = self._locked(path.with_suffix(".lock"), fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            path.with_suffix(".json").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True

    def _remove_unused(self) -> None:
        """Remove objects of no tree, and files under way that nobody has continued for long."""
        for path, status in self._objects():
            if status.st_nlink == 1:
                path.unlink(missing_ok=True)
        for path in (self.root / "digests").glob("*"):
            if not self._object(self.digest(path.name)).exists():
                path.unlink(missing_ok=True)
        before = time.time() - _STALE_SECS
        for path in (self.root / "partial").glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _objects(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self.root / "objects").glob("*/*"):
            with suppress(OSError):
                yield path, path.stat()

    def _is_whole(self, path: Path) -> bool:
        """True for a complete tree whose files nobody has changed."""
        try:
            files = json.loads(path.with_suffix(".json").read_bytes())["files"]
            return all(_is_sound(path / name, size) for name, (_, size) in files.items())
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _place(self, draft: Path, target: Path) -> None:
        target.parent.mkdir(mode=0o755, exist_ok=True)
        _seal(draft)
        draft.replace(target)
        with self._guard:
            if self._nbytes >= 0:
                self._nbytes += target.stat().st_size

    def _tree(self, key: str) -> Path:
        return self.root / "trees" / key

    def _object(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        return self.root / "objects" / name[:2] / name

    def _listing(self, store: str) -> Path:
        return self.root / "listings" / f"{key_of(store)}.json"

    def _make_directories(self) -> None:
        """Make the directories; raises `LoadFailed`, also if other users can change the cache."""
        with self._written():
            for name in ("objects", "trees", "partial", "digests", "listings"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            owner = self.root.stat()
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & stat.S_IWOTH:
            raise LoadFailed(
                f"the cache of stores {self.root} can be changed by others than this user; give"
                " another one (--store-cache)"
            )

    def _locked(self, path: Path, kind: int) -> int | None:
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

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Raise an error of the file system as `LoadFailed`."""
        try:
            yield
        except OSError as error:
            raise LoadFailed(
                f"the cache of stores {self.root} cannot be written: {error.strerror or error}"
                " (--store-cache, --store-cache-bytes)"
            ) from error


def _is_sound(path: Path, size: int) -> bool:
    """True if a file is as it was put here, as far as `stat` tells."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_size == size and found.st_mtime_ns == _CHANGED_NS


def _seal(path: Path) -> None:
    path.chmod(0o444)
    os.utime(path, ns=(_CHANGED_NS, _CHANGED_NS))


def _wait(stopped: Event) -> None:
    if stopped.wait(_PAUSE_SECS):
        raise LoadFailed("the store is closed: the server is shutting down")


def cache_of(directory: str, limit: int = 0) -> StoreCache:
    """The cache in a directory, or in the default one for ""; raises `LoadFailed`."""
    if directory:
        return StoreCache(Path(directory).absolute(), limit)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise LoadFailed(
                "there is no home directory for the cache of stores; give --store-cache"
            ) from error
    return StoreCache(base / "headrace" / "stores", limit)
