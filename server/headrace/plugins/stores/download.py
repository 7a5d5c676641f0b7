"""Downloads to the cache: what is brought is complete, or it is not served.

**Complete.** A model with a manifest (`headrace-manifest.json`, written last) is exactly what that
lists, and everything brought has its digests. A model without one is compared twice: sizes and tags
of all its files are the same before and after they were fetched, and each part is asked for by the
tag. Either way the directory has a manifest in the end, so that a version which two states have in
common is seen to be the same, and is not loaded again.

**Parts.** Files are fetched in parts of some megabytes, several at a time. A part that fails is
tried again; what was fetched is kept for the next attempt, by this process or another one.

Everything here is called on threads, and blocks.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, Thread
from time import monotonic
from typing import TypeAlias

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import StoreCache, key_of
from headrace.plugins.stores.contents import PART, CachedContent, CachedContents, PartialFile
from headrace.plugins.stores.remote import (
    Remote,
    RemoteFile,
    Unreached,
    is_inside,
    pauses,
    run_all,
)
from headrace.repository.model_files import MANIFEST, new_manifest, parse_manifest
from headrace.repository.store import Download

log = logging.getLogger(__name__)

_TRIES = 3  # of each part
_SETTLING_SECS = 2.0  # between the two looks at a model that was changed only just now
_TOLD_SECS = 10.0  # between lines of the log about one download

# Reads the bytes of a file between two positions.
Read: TypeAlias = Callable[[int, int], bytes]


@dataclass
class StoreCounts:
    """Counters of a store, changed under `guard`: `failures` to be asked, or to bring a model."""

    read_bytes: int = 0
    brought: int = 0
    failures: int = 0
    guard: Lock = field(default_factory=Lock, repr=False, compare=False)


class FileDownloads:
    """Downloads of files in parts, each of which is tried several times, and counted."""

    def __init__(self, contents: CachedContents, counts: StoreCounts, stopped: Event) -> None:
        self._contents, self._counts, self._stopped = contents, counts, stopped

    def part(self, what: str, read: Read, download: Download, start: int, stop: int) -> bytes:
        """A part of the file that messages call `what`; raises `LoadFailed`."""
        backoff = pauses()
        while True:
            try:
                found = read(start, stop) if stop > start else b""
                break
            except Unreached:
                if backoff.failures + 1 == _TRIES or self._stopped.wait(backoff.failed()):
                    raise
        if len(found) != stop - start:
            raise LoadFailed(f"{what}: {len(found)} bytes came in place of {stop - start}")
        with self._counts.guard:
            self._counts.read_bytes += len(found)
            download.done += len(found)
        return found

    @contextmanager
    def large(
        self, key: str, size: int, what: str, read: Read, download: Download
    ) -> Iterator[PartialFile]:
        """A file with all its parts, several of which are fetched at a time, by one caller alone.

        The cache has it under this key, until it is finished or given up. `read` calls `part`, the
        log calls the file `what`.
        """
        with self._contents.partial(key, size, self._stopped) as draft:
            missing = draft.missing()
            here = size - sum(stop - start for start, stop in missing)
            with self._counts.guard:
                download.done += here
            if here:
                log.info("%s is continued, %d bytes are here", what, here)

            def fetch(start: int, stop: int) -> None:
                draft.write(start, read(start, stop))

            run_all(fetch, missing, self._stopped)
            yield draft


class ModelDownloads:
    """Downloads of the models of a place."""

    def __init__(
        self, remote: Remote, cache: StoreCache, counts: StoreCounts, stopped: Event
    ) -> None:
        self._remote, self._cache, self._counts, self._stopped = remote, cache, counts, stopped
        self._address = remote.address
        self._contents = cache.contents
        self._files = FileDownloads(cache.contents, counts, stopped)
        self._under_way: dict[Download, None] = {}  # in their order

    @property
    def under_way(self) -> Sequence[Download]:
        """The downloads under way, the first one first."""
        return tuple(self._under_way)

    def bring(self, key: str, name: str, state: str) -> None:
        """Bring a model in this state, and make its tree in the cache; raises `LoadFailed`."""
        begun, where = monotonic(), f"{self._address}: {name}"
        contents = self._remote.contents(name)
        if contents.state != state:
            raise self._remote.changing(name)
        digests = parse_manifest(contents.manifest) if contents.manifest else {}
        files = {path: file for path, file in contents.files.items() if path != MANIFEST}
        for path in files:
            if not is_inside(path):
                raise LoadFailed(f"{where}: {path!r} is no path within its directory")
        known = {
            path: CachedContent(
                file.digest or self._contents.digest(self._key(name, path, file)), file.size
            )
            for path, file in files.items()
        }
        missing = {
            path: file for path, file in files.items()
            if not (known[path].digest and self._contents.has(known[path]))
        }  # fmt: skip
        nbytes = sum(file.size for file in missing.values())
        log.info(
            "bringing %s from %s: %d files with %d bytes", name, self._address, len(missing),
            nbytes, extra={"model": name},
        )  # fmt: skip
        with self._progress(name, nbytes) as download:
            for path, digest in self._fetch(name, missing, download).items():
                known[path] = CachedContent(digest, files[path].size)
                if not files[path].digest:
                    self._contents.keep_digest(self._key(name, path, files[path]), digest)
        if not contents.manifest:
            if contents.fresh and self._stopped.wait(_SETTLING_SECS):
                raise LoadFailed(f"{self._address}: the server is shutting down")
            if self._remote.contents(name).state != state:
                raise self._remote.changing(name)
        wrong = [path for path, digest in digests.items() if known[path].digest != digest]
        if wrong:
            raise LoadFailed(f"{where}: {wrong[0]} does not have its digest")
        manifest = contents.manifest or new_manifest({p: c.digest for p, c in known.items()})
        self._cache.make(key, known, manifest, f"{name} of {self._address}")
        with self._counts.guard:
            self._counts.brought += 1
        log.info("brought %s in %.2f s", name, monotonic() - begun, extra={"model": name})

    def problems(self, name: str) -> list[str]:
        """The problems of the files of a model, all of which are read; raises `LoadFailed`."""
        contents = self._remote.contents(name)
        if not contents.manifest:
            return [f"there is no {MANIFEST}"]
        found: dict[str, str] = {}

        def check(path: str, file: RemoteFile) -> None:
            digest = hashlib.sha256()
            for start in range(0, file.size, PART):
                stop = min(start + PART, file.size)
                digest.update(self._part(name, path, file, Download(name, 0), start, stop))
            if f"sha256:{digest.hexdigest()}" != file.digest:
                found[path] = f"{path} does not hold what it is to hold"

        run_all(check, contents.files.items(), self._stopped)
        return [found[path] for path in sorted(found)]

    def _fetch(
        self, name: str, files: Mapping[str, RemoteFile], download: Download
    ) -> Mapping[str, str]:
        """Fetch files into the cache; returns their digests."""
        found: dict[str, str] = {}

        def small(path: str, file: RemoteFile) -> None:
            found[path] = self._contents.put(self._part(name, path, file, download, 0, file.size))
            self._compare(name, path, file, found[path])

        run_all(small, (one for one in files.items() if one[1].size <= PART), self._stopped)
        for path, file in files.items():
            if file.size > PART:
                found[path] = self._fetch_large(name, path, file, download)
        return found

    def _fetch_large(self, name: str, path: str, file: RemoteFile, download: Download) -> str:
        key = self._key(name, path, file)
        read = partial(self._part, name, path, file, download)
        with self._files.large(key, file.size, f"{name}: {path}", read, download) as draft:
            digest = draft.digest()
            try:
                self._compare(name, path, file, digest)
            except LoadFailed:
                draft.give_up()
                raise
            draft.finish(digest)
        return digest

    def _part(
        self, name: str, path: str, file: RemoteFile, download: Download, start: int, stop: int
    ) -> bytes:
        read = partial(self._remote.read, name, path, file)
        return self._files.part(f"{self._address}: {name}/{path}", read, download, start, stop)

    def _compare(self, name: str, path: str, file: RemoteFile, digest: str) -> None:
        if file.digest and digest != file.digest:
            raise LoadFailed(
                f"{self._address}: {name}: {path} does not hold what its manifest tells"
            )

    def _key(self, name: str, path: str, file: RemoteFile) -> str:
        """A file name for the content of a file."""
        return key_of(self._address, name, path, file.tag, str(file.size))

    @contextmanager
    def _progress(self, name: str, nbytes: int) -> Iterator[Download]:
        """Report a download: in metrics and the status, and if it takes long in the log."""
        download, done = Download(name, nbytes), Event()

        def tell() -> None:
            while not done.wait(_TOLD_SECS):
                share = 100 * download.done / nbytes
                log.info("bringing %s: %.0f %%", name, share, extra={"model": name})

        if nbytes > PART:
            Thread(target=tell, name=f"progress of {name}", daemon=True).start()
        self._under_way[download] = None
        try:
            yield download
        finally:
            del self._under_way[download]
            done.set()
