"""The directory of models from stores, which all servers of a machine may share.

    <cache>/trees/<key>/                a model in one state: hard links to objects, and a manifest
    <cache>/trees/<key>.json            its document, written last: without it, there is no tree
    <cache>/trees/<key>.lock            exclusive for making and removal, shared for use
    <cache>/partial/<key>.d/            files of a tree that come together, until it is made
    <cache>/listings/<key>.json         the models of a store when it was last asked
    <cache>/objects.lock                shared while a tree is made, exclusive for removal

The rest of it are the contents of files (`contents.py`). A tree without a document, as after a
crash, is made anew, and so is one whose files others have written to. A read-only cache serves what
it has. All methods block, and are for threads.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import (
    CachedContent,
    CachedContents,
    CacheDirectory,
    is_sound,
    pause,
)
from headrace.repository.model_files import MANIFEST, digest_of, new_manifest, replace_file
from headrace.repository.store import Lease

log = logging.getLogger(__name__)


def key_of(*parts: str) -> str:
    """A file name for these texts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


class StoreCache:
    """One such directory, which need not exist yet; `limit` bytes, or any for 0."""

    def __init__(self, root: Path, limit: int = 0) -> None:
        self.root = root
        self._limit = limit
        self._directory = CacheDirectory(root)
        self.contents = CachedContents(self._directory)

    # --- trees

    def use(self, key: str, origin: Path) -> Lease | None:
        """A tree, which stays as long as its lease; None if it is not there."""
        path = self._tree(key)
        there = path.with_suffix(".json").exists()
        lock = self._lock(path, fcntl.LOCK_SH) if there else None
        if lock is None:
            return None
        if not _is_whole(path):
            os.close(lock)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(path.with_suffix(".json"))
        return Lease(path, lambda: os.close(lock), origin)

    @contextmanager
    def making(self, key: str, stopped: Event) -> Iterator[bool]:
        """Make a tree within this block: true if this caller is to, false if another one has.

        Contents that are put into the cache meanwhile stay. Raises `LoadFailed` if it cannot be
        written, or when `stopped`.
        """
        path = self._tree(key)
        self._directory.make()
        while (lock := self._lock(path, fcntl.LOCK_EX)) is None:
            if self.use(key, path) is not None:
                yield False
                return
            pause(stopped)
        try:
            if _is_whole(path):
                yield False
                return
            shared = self._directory.lock(self.root / "objects.lock", fcntl.LOCK_SH, stopped)
            try:
                yield True
            finally:
                os.close(shared)
        finally:
            os.close(lock)

    def make(
        self, key: str, files: Mapping[str, CachedContent], manifest: bytes, model: str
    ) -> None:
        """Make the tree of these files and this manifest, within `making`; raises `LoadFailed`.

        `model` is for people who look at its document.
        """
        path = self._tree(key)
        with self._directory.written():
            shutil.rmtree(path, ignore_errors=True)  # leftovers of a crash
            path.mkdir(mode=0o755)
            for name, content in files.items():
                target = path / name
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                if not self.contents.link(content, target):
                    raise LoadFailed(f"the cache of stores {self.root} has lost files of {model}")
            (path / MANIFEST).write_bytes(manifest)
            told = {"model": model, "files": {n: list(c) for n, c in files.items()}}
            replace_file(path.with_suffix(".json"), json.dumps(told).encode())

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
                    with self._directory.written():
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
        with self._directory.written():
            for path in sorted(draft.rglob("*")):
                name = str(path.relative_to(draft))
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise LoadFailed(f"{model}: {name} is no file")
                if name == MANIFEST:
                    manifest = path.read_bytes()
                elif path.is_file():
                    with path.open("rb") as file:
                        files[name] = CachedContent(digest_of(file), path.stat().st_size)
                    self.contents.adopt(path, files[name])
        digests = {name: content.digest for name, content in files.items()}
        self.make(key, files, manifest or new_manifest(digests), model)

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
            self._directory.make()
            document = json.dumps({"store": store, "models": models}).encode()
            replace_file(self._listing(store), document)

    # --- size

    def make_room(self, needed: int = 0) -> None:
        """Remove the least recently used trees beyond the limit, `needed` bytes below it.

        None that a server has loaded; nothing as long as another tree is made.
        """
        if self.contents.nbytes + needed <= self._limit or not self._limit:
            return
        lock = self._directory.locked(self.root / "objects.lock", fcntl.LOCK_EX)
        if lock is None:
            return  # whoever makes the last tree makes room
        try:
            self.contents.remove_unused()
            trees = iter(self._oldest_first())
            while self.contents.counted() + needed > self._limit and (path := next(trees, None)):
                if self._remove(path):
                    log.info("removed %s from the cache of stores, which exceeded its limit: %s",
                             path.name, self.root)  # fmt: skip
                    self.contents.remove_unused()
        finally:
            os.close(lock)

    def _oldest_first(self) -> Sequence[Path]:
        """The trees by the time of their last use."""
        found = []
        for document in (self.root / "trees").glob("*.json"):
            with suppress(OSError):
                found.append((document.stat().st_mtime_ns, document))
        return [document.with_suffix("") for _, document in sorted(found)]

    def _remove(self, path: Path) -> bool:
        """Remove a tree, its document first; false if it is in use."""
        lock = self._lock(path, fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            path.with_suffix(".json").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True

    # --- places

    def _lock(self, tree: Path, kind: int) -> int | None:
        return self._directory.locked(tree.with_suffix(".lock"), kind)

    def _tree(self, key: str) -> Path:
        return self.root / "trees" / key

    def _listing(self, store: str) -> Path:
        return self.root / "listings" / f"{key_of(store)}.json"


def _is_whole(path: Path) -> bool:
    """True for a complete tree whose files nobody has changed."""
    try:
        files = json.loads(path.with_suffix(".json").read_bytes())["files"]
        return all(is_sound(path / name, size) for name, (_, size) in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
