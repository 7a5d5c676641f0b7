"""Stores of models that lie elsewhere, and what becomes of models when those are out of reach.

A store that cannot be asked is asked again after a growing pause; until then models that are loaded
stay, those in the cache can be loaded, and others are refused with the reason. At start, the models
are those that it had when it was last asked. A model that could not be brought gets another token
after a growing pause, so that what follows the store loads it again.

Methods of `RemoteStore` are called on threads. `_guard` protects what is known.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import NamedTuple

from headrace.core.errors import LoadFailed
from headrace.observability.statistics import Family, Sourced
from headrace.placement.child_process import Backoff
from headrace.plugins.stores.cache import StoreCache, cache_of, key_of
from headrace.plugins.stores.download import ModelDownloads, StoreCounts
from headrace.plugins.stores.remote import ModelState, Remote, Unreached, pauses
from headrace.repository.store import Download, Lease, Store, StoreOptions

log = logging.getLogger(__name__)


class RemoteToken(NamedTuple):
    """The state of a model, and how often it had to be tried anew in this state or another."""

    state: str
    attempt: int = 0


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


class RemoteStore(Store):
    """The models of a place, through the cache."""

    def __init__(
        self, remote: Remote, options: StoreOptions, counts: StoreCounts | None = None
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
        self._guard = Lock()
        self._stopped = Event()
        self._downloads = ModelDownloads(remote, self.cache, self.counts, self._stopped)

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
                            self._downloads.bring(key, name, token.state)
        except LoadFailed:
            self._fail()
            with self._guard:
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
        return self._downloads.under_way

    # --- writing and verifying

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Store.publish`."""
        self.remote.publish(name, directory, manifest)

    def problems(self, name: str) -> list[str]:
        """Implements `Store.problems`."""
        return self._downloads.problems(name)

    # --- implementation

    def _known(self, name: str) -> ModelState | None:
        return (self._models or {}).get(name)

    def _fail(self) -> None:
        with self.counts.guard:
            self.counts.failures += 1

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
            self._fail()
            if before is None:
                log.warning("%s: models loaded from it stay", error)
            raise
        with self._guard:
            outage, self._outage = self._outage, None
        if outage is not None:
            log.info("%s can be reached again", self.address)


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
        "headrace_store_cache_bytes", "gauge", lambda store: store.cache.contents.known_bytes,
        "Bytes of all models in the cache that the store uses",
    ),
)  # fmt: skip
