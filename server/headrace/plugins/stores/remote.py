"""Stores of models that lie elsewhere: what is brought is complete, or it is not served.

**Complete.** A model with a manifest (`headrace-manifest.json`, written last) is exactly what that
lists, and everything brought has its digests. A model without one is compared twice: sizes and tags
of all its files are the same before and after they were fetched, and each part is asked for by the
tag. Either way the directory has a manifest in the end, so that a version which two states have in
common is seen to be the same, and is not loaded again.

**Parts.** Files are fetched in parts of some megabytes, several at a time. A part that fails is
tried again; what was fetched is kept for the next attempt, by this process or another one.

**Out of reach.** A store that cannot be asked is asked again after a growing pause; until then
models that are loaded stay, those in the cache can be loaded, and others are refused with the
reason. At start, the models are those that it had when it was last asked. A model that could not be
brought gets another token after a growing pause, so that what follows the store loads it again.

Methods of `RemoteStore` are called on threads. `_guard` protects the counters and what is known.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Event, Lock, Thread
from time import monotonic
from typing import NamedTuple

from headrace.core.errors import LoadFailed
from headrace.observability.statistics import Family, Sourced
from headrace.placement.child_process import Backoff
from headrace.plugins.stores.cache import PART, CachedContent, StoreCache, cache_of, key_of
from headrace.repository.model_files import MANIFEST, new_manifest, parse_manifest
from headrace.repository.store import Download, Lease, Store, StoreOptions

log = logging.getLogger(__name__)

# Hosts that are asked without TLS if an address does not say how.
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
_AT_ONCE = 8  # requests of a store
LONGEST_TEXT = 300  # of errors
_TRIES = 3  # of each part
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0
_SETTLING_SECS = 2.0  # between the two looks at a model that was changed only just now
_TOLD_SECS = 10.0  # between lines of the log about one download


class RemoteFile(NamedTuple):
    """A file: bytes, and a tag that changes with its content; its digest, if that is known."""

    size: int
    tag: str
    digest: str = ""


class ModelState(NamedTuple):
    """The state of a model, which changes with it, and the bytes of its files."""

    state: str
    size: int

    @classmethod
    def of(cls, files: Mapping[str, RemoteFile]) -> "ModelState":
        """The state of a model with these files, by path."""
        return cls(state_of(files), sum(file.size for file in files.values()))


@dataclass(frozen=True, slots=True)
class RemoteContents:
    """The files of a model in one state, by path; `manifest` is empty if it has none.

    `fresh` means that it was changed only just now, and may still be changing.
    """

    state: str
    files: Mapping[str, RemoteFile]
    manifest: bytes = b""
    fresh: bool = False

    @classmethod
    def by_digests(cls, state: str, files: Mapping[str, RemoteFile]) -> "RemoteContents":
        """The contents of a model without a manifest, all of whose digests are known."""
        return cls(state, files, new_manifest({path: file.digest for path, file in files.items()}))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Remote:
    """A place with models. Methods are called on any threads, block, and raise `LoadFailed`.

    `address` is that of the store, without secrets. Only the first three methods must be
    implemented; `publishing` says how models get to a place whose `publish` is not.
    """

    address: str
    publishing = "it is read only"

    def models(self) -> Mapping[str, ModelState]:
        """All models as of now."""
        raise NotImplementedError

    def contents(self, name: str) -> RemoteContents:
        """The files of one model as of now."""
        raise NotImplementedError

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Part of a file, which must still have its tag."""
        raise NotImplementedError

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Replace a model, as `Store.publish`."""
        raise LoadFailed(f"{self.address} cannot be written: {self.publishing}")

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on changes, as `Store.watch`."""

    def close(self) -> None:
        """End threads and connections, as `Store.close`."""


class RemoteToken(NamedTuple):
    """The state of a model, and how often it had to be tried anew in this state or another."""

    state: str
    attempt: int = 0


def pauses() -> Backoff:
    """Growing pauses between attempts that fail."""
    return Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)


@dataclass
class StoreOutage:
    """A time in which a store cannot be asked, and until when it is not."""

    reason: str = ""
    until: float = 0.0
    backoff: Backoff = field(default_factory=pauses)

    def fail(self, reason: str, now: float) -> None:
        """Begin a pause, longer than the last one."""
        self.reason, self.until = reason, now + self.backoff.failed()


@dataclass
class Attempts:
    """Failed attempts to bring a model, and the time of the next one."""

    count: int = 0
    until: float = 0.0
    backoff: Backoff = field(default_factory=pauses)
    due: bool = False  # it has failed, and has not been offered again

    def fail(self, now: float) -> None:
        """Note a failure."""
        self.until = now + self.backoff.failed()
        self.due = True

    def succeed(self) -> None:
        """Note a success: the model's token stays as it is."""
        self.backoff.succeeded()
        self.due = False

    def offered(self, now: float) -> int:
        """The number for the model's token, which changes when it is to be tried again."""
        if self.due and now >= self.until:
            self.due = False
            self.count += 1
        return self.count


@dataclass
class StoreCounts:
    """Counters of a store: `failures` to be asked, or to bring a model."""

    read_bytes: int = 0
    brought: int = 0
    failures: int = 0


class RemoteStore(Store):
    """The models of a place, through the cache."""

    def __init__(
        self, remote: Remote, options: StoreOptions, counts: "StoreCounts | None" = None
    ) -> None:
        """`counts` are the counters of a remote that fetches files by itself."""
        self.address = remote.address
        self.remote = remote
        self.cache: StoreCache = cache_of(options.cache, options.cache_bytes)
        self.counts = counts or StoreCounts()
        self._offline = options.offline
        self._models: Mapping[str, ModelState] | None = None
        self._attempts: dict[str, Attempts] = {}
        self._outage: StoreOutage | None = None
        self._downloads: dict[Download, None] = {}  # in their order
        self._guard = Lock()
        self._stopped = Event()

    # --- what there is

    def names(self) -> Collection[str]:
        """Implements `Store.names`."""
        if self._offline:
            return self._remembered(f"{self.address} is not asked (--store-offline)")
        with self._guard:
            outage = self._outage
        if outage is not None and monotonic() < outage.until:
            if self._models is None:
                return self._remembered(outage.reason)
            raise LoadFailed(outage.reason)
        try:
            with self._asking():
                found = self.remote.models()
        except LoadFailed as error:
            if self._models is not None:
                raise
            log.warning("%s; its models are those of the cache until it can be asked", error)
            return self._remembered(str(error))
        if found != self._models:
            self.cache.keep_listing(self.address, found)
        self._models = found
        return found.keys()

    def token(self, name: str) -> Hashable:
        """Implements `Store.token`: that of the last listing."""
        known = self._known(name)
        if known is None:
            raise LoadFailed(f"{self.address} has no model {name}")
        return RemoteToken(known.state, self._attempt(name))

    def current(self, name: str) -> Hashable:
        """Implements `Store.current`; the last known one if the store cannot be asked."""
        if self._offline or self.trouble:
            return self.token(name)
        with self._asking():
            found = self.remote.contents(name)
        with self._guard:
            known = dict(self._models or {})
            known[name] = ModelState(found.state, found.size)
            self._models = known
        return RemoteToken(found.state, self._attempt(name))

    def size(self, name: str) -> int:
        """Implements `Store.size`."""
        known = self._known(name)
        return 0 if known is None else known.size

    @property
    def trouble(self) -> str:
        """Implements `Store.trouble`."""
        outage = self._outage
        return "" if outage is None else outage.reason

    def watch(self, changed: Callable[[], None]) -> None:
        """Implements `Store.watch`."""
        if not self._offline:
            self.remote.watch(changed)

    def close(self) -> None:
        """Implements `Store.close`."""
        self._stopped.set()
        self.remote.close()

    def metrics(self) -> Iterable[Sourced]:
        """Implements `Store.metrics`."""
        own = [({"store": self.address}, self)]
        return [(family, own) for family in _FAMILIES]

    # --- bringing models

    def materialise(self, name: str, token: Hashable) -> Lease:
        """Implements `Store.materialise`."""
        assert isinstance(token, RemoteToken), "a token of another store. This is a bug."
        key = key_of(self.address, name, token.state)
        origin = Path(self.address, name)
        try:
            while (lease := self.cache.use(key, origin)) is None:
                if self._offline:
                    raise LoadFailed(
                        f"{self.address}: {name} is not in the cache (--store-offline)"
                    )
                self.cache.make_room(self.size(name))  # not within: a tree in the making keeps all
                with self.cache.making(key, self._stopped) as wanted:
                    if wanted:
                        with self._asking():
                            self._make(key, name, token.state)
        except LoadFailed:
            with self._guard:
                self.counts.failures += 1
                self._attempts.setdefault(name, Attempts()).fail(monotonic())
            raise
        with self._guard:
            if attempts := self._attempts.get(name):
                attempts.succeed()
        self.cache.make_room()
        return lease

    @property
    def left_bytes(self) -> int:
        """Bytes of downloads under way that are still to be fetched."""
        return sum(max(each.nbytes - each.done, 0) for each in self.downloads)

    @property
    def downloads(self) -> Sequence[Download]:
        """Implements `Store.downloads`."""
        return tuple(self._downloads)

    def _make(self, key: str, name: str, state: str) -> None:
        """Bring a model, and make its tree in the cache."""
        begun = monotonic()
        contents = self.remote.contents(name)
        self._check(name, state, contents)
        digests = parse_manifest(contents.manifest) if contents.manifest else {}
        files = {path: file for path, file in contents.files.items() if path != MANIFEST}
        for path in files:
            if not is_inside(path):
                raise LoadFailed(
                    f"{self.address}: {name}: {path!r} is no path within its directory"
                )
        known = {
            path: CachedContent(
                file.digest or self.cache.digest(self._key(name, path, file)), file.size
            )
            for path, file in files.items()
        }
        missing = {
            path: file for path, file in files.items()
            if not (known[path].digest and self.cache.has(known[path]))
        }  # fmt: skip
        nbytes = sum(file.size for file in missing.values())
        log.info(
            "bringing %s from %s: %d files with %d bytes", name, self.address, len(missing), nbytes,
            extra={"model": name},
        )  # fmt: skip
        with self._progress(name, nbytes) as download:
            for path, digest in self._fetch(name, missing, download).items():
                known[path] = CachedContent(digest, files[path].size)
                if not files[path].digest:
                    self.cache.keep_digest(self._key(name, path, files[path]), digest)
        if not contents.manifest:
            if contents.fresh and self._stopped.wait(_SETTLING_SECS):
                raise LoadFailed(f"{self.address}: the server is shutting down")
            self._check(name, state, self.remote.contents(name))
        wrong = [path for path, digest in digests.items() if known[path].digest != digest]
        if wrong:
            raise LoadFailed(f"{self.address}: {name}: {wrong[0]} does not have its digest")
        manifest = contents.manifest or new_manifest({p: c.digest for p, c in known.items()})
        if not self.cache.make(key, known, manifest, f"{name} of {self.address}"):
            raise LoadFailed(f"the cache of stores {self.cache.root} has lost files of {name}")
        with self._guard:
            self.counts.brought += 1
        log.info(
            "brought %s in %.2f s", name, monotonic() - begun, extra={"model": name}
        )  # fmt: skip

    def _check(self, name: str, state: str, found: RemoteContents) -> None:
        if found.state != state:
            raise changing(self.address, name)

    def _fetch(
        self, name: str, files: Mapping[str, RemoteFile], download: Download
    ) -> Mapping[str, str]:
        """Fetch files into the cache; returns their digests."""
        found: dict[str, str] = {}

        def whole(path: str, file: RemoteFile) -> None:
            content = self._read(name, path, file, 0, file.size, download)
            found[path] = self.cache.put(content)
            if file.digest and found[path] != file.digest:
                raise LoadFailed(_other_content(self.address, name, path))

        small = [partial(whole, *each) for each in files.items() if each[1].size <= PART]
        run_all(small, self._stopped)
        for path, file in files.items():
            if file.size > PART:
                found[path] = self._fetch_large(name, path, file, download)
        return found

    def _fetch_large(self, name: str, path: str, file: RemoteFile, download: Download) -> str:
        key = self._key(name, path, file)
        with self.cache.partial(key, file.size, self._stopped) as draft:
            missing = draft.missing()
            here = file.size - sum(stop - start for start, stop in missing)
            with self._guard:
                download.done += here
            if here:
                log.info("%s: %s is continued, %d bytes are here", name, path, here)

            def part(start: int, stop: int) -> None:
                draft.write(start, self._read(name, path, file, start, stop, download))

            run_all([partial(part, *each) for each in missing], self._stopped)
            digest = draft.digest()
            if file.digest and digest != file.digest:
                self.cache.give_up(key)
                raise LoadFailed(_other_content(self.address, name, path))
            self.cache.finish(key, file.size, digest)
        return digest

    def _read(
        self, name: str, path: str, file: RemoteFile, start: int, stop: int, download: Download
    ) -> bytes:
        """A part of a file, tried several times."""
        for left in reversed(range(_TRIES)):
            try:
                found = self.remote.read(name, path, file, start, stop) if stop > start else b""
            except Unreached:
                if not left or self._stopped.wait(_FIRST_PAUSE_SECS):
                    raise
                continue
            if len(found) != stop - start:
                raise LoadFailed(
                    f"{self.address}: {name}/{path}: {len(found)} bytes came in place of"
                    f" {stop - start}"
                )
            with self._guard:
                self.counts.read_bytes += len(found)
                download.done += len(found)
            return found
        raise AssertionError("a loop that never ends here. This is a bug.")

    # --- writing and verifying

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Store.publish`."""
        self.remote.publish(name, directory, manifest)

    def problems(self, name: str) -> list[str]:
        """Implements `Store.problems`."""
        contents = self.remote.contents(name)
        if not contents.manifest:
            return [f"there is no {MANIFEST}"]
        found: dict[str, str] = {}

        def check(path: str, file: RemoteFile) -> None:
            digest = hashlib.sha256()
            for start in range(0, file.size, PART):
                stop = min(start + PART, file.size)
                digest.update(self._read(name, path, file, start, stop, Download(name, 0)))
            if f"sha256:{digest.hexdigest()}" != file.digest:
                found[path] = f"{path} does not hold what it is to hold"

        run_all([partial(check, *each) for each in contents.files.items()], self._stopped)
        return [found[path] for path in sorted(found)]

    # --- implementation

    def _key(self, name: str, path: str, file: RemoteFile) -> str:
        """A file name for the content of a file."""
        return key_of(self.address, name, path, file.tag, str(file.size))

    def _known(self, name: str) -> ModelState | None:
        return (self._models or {}).get(name)

    def _attempt(self, name: str) -> int:
        with self._guard:
            attempts = self._attempts.get(name)
            return 0 if attempts is None else attempts.offered(monotonic())

    def _remembered(self, why: str) -> Collection[str]:
        """The models that the store had when it was last asked; raises `LoadFailed`."""
        if self._models is None:
            found = self.cache.listing(self.address)
            if not found:
                raise LoadFailed(why)
            self._models = {name: ModelState(*told) for name, told in found.items()}
        return self._models.keys()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Note if the store can be asked; raises what was raised."""
        try:
            yield
        except Unreached as error:
            with self._guard:
                before, self._outage = self._outage, self._outage or StoreOutage()
                self._outage.fail(str(error), monotonic())
                self.counts.failures += 1
            if before is None:
                log.warning("%s: models loaded from it stay", error)
            raise
        with self._guard:
            outage, self._outage = self._outage, None
        if outage is not None:
            log.info("%s can be reached again", self.address)

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
        self._downloads[download] = None
        try:
            yield download
        finally:
            del self._downloads[download]
            done.set()


class Unreached(LoadFailed):
    """A store that cannot be asked, whatever the question."""


def not_there(address: str, name: str) -> LoadFailed:
    """The error for a model that the store does not have."""
    return LoadFailed(f"{address}: {name} is not there")


def changing(address: str, name: str) -> LoadFailed:
    """The error for a model in another state than expected."""
    return LoadFailed(f"{address}: {name} is being changed; it is brought once it rests")


def state_of(files: Mapping[str, RemoteFile]) -> str:
    """The state of a model by its files: by its manifest alone, if it has one."""
    if MANIFEST in files:
        files = {MANIFEST: files[MANIFEST]}
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:32]


def with_digests(remote: Remote, name: str, files: Mapping[str, RemoteFile]) -> RemoteContents:
    """The contents of a model whose files have a manifest, which is read.

    Raises `LoadFailed` if a file of it is missing.
    """
    manifest = remote.read(name, MANIFEST, files[MANIFEST], 0, files[MANIFEST].size)
    listed: dict[str, RemoteFile] = {}
    for path, digest in parse_manifest(manifest).items():
        if path not in files:
            raise LoadFailed(f"{remote.address}: {name}: {path} of its manifest is not there")
        listed[path] = files[path]._replace(digest=digest)
    return RemoteContents(state_of(files), listed, manifest)


def unreached(address: str, why: object) -> Unreached:
    """The error for a store that cannot be asked."""
    return Unreached(f"{address} cannot be reached: {why}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text without queries, which may have signatures."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\?\S*", "", text)[:LONGEST_TEXT]


@contextmanager
def client_errors(address: str) -> Iterator[None]:
    """Raise all errors of a client of many libraries as `Unreached`."""
    try:
        yield
    except Exception as error:
        raise unreached(address, first_line(error)) from error


@contextmanager
def needed(what: str, package: str) -> Iterator[None]:
    """Raise the error of an import that fails as `LoadFailed`: `what` need this `package`."""
    try:
        yield
    except ImportError as error:
        raise LoadFailed(f"{what} need the package {package}") from error


def root_url(scheme: str, host: str) -> str:
    """The URL of a host: with TLS unless it is this machine, or `scheme` says otherwise."""
    return (scheme or ("http://" if _LOOPBACK.fullmatch(host) else "https://")) + host


def is_inside(path: str) -> bool:
    """True for a relative path in its plain form, which cannot leave a directory."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and path == "/".join(parts) and "\0" not in path
    return plain and ".." not in parts and parts[0] != "/"


def _other_content(address: str, name: str, path: str) -> str:
    return f"{address}: {name}: {path} does not hold what its manifest tells"


def run_all(jobs: Sequence[Callable[[], None]], stopped: Event) -> None:
    """Run jobs on threads that no exit waits for; raises the first error, after all have ended."""
    if len(jobs) == 1:
        jobs[0]()
        return
    errors: list[BaseException] = []
    numbers = count()

    def work() -> None:
        while not (errors or stopped.is_set()) and (number := next(numbers)) < len(jobs):
            try:
                jobs[number]()
            except BaseException as error:
                errors.append(error)

    threads = [
        Thread(target=work, name="store", daemon=True) for _ in range(min(_AT_ONCE, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if stopped.is_set():
        raise LoadFailed("the store is closed: the server is shutting down")


_FAMILIES: Sequence[Family[RemoteStore]] = (
    Family(
        "headrace_store_up", "gauge", lambda store: float(not store.trouble),
        "1 if the store could be asked the last time, 0 if not",
    ),
    Family(
        "headrace_store_read_bytes_total", "counter", lambda store: store.counts.read_bytes,
        "Bytes of models fetched from the store",
    ),
    Family(
        "headrace_store_left_bytes", "gauge", lambda store: store.left_bytes,
        "Bytes of downloads under way that are still to be fetched",
    ),
    Family(
        "headrace_store_brought_total", "counter", lambda store: store.counts.brought,
        "Models brought from the store to the cache",
    ),
    Family(
        "headrace_store_failures_total", "counter", lambda store: store.counts.failures,
        "Times that the store could not be asked, or a model not be brought",
    ),
    Family(
        "headrace_store_cache_bytes", "gauge", lambda store: store.cache.known_bytes,
        "Bytes of all models in the cache that the store uses",
    ),
)  # fmt: skip
