"""Stores: where models come from.

A store has models by name. Each has a token, which changes whenever the model does, and is brought
as a directory when it is loaded: whatever is above reads directories alone, in the layout of
`headrace.repository.layout`. A model repository on this machine is a store whose models need not
be brought; the files of load requests are one; others are plugins, by the scheme of their address.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import NamedTuple
from weakref import finalize

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.observability.statistics import Sourced

log = logging.getLogger(__name__)

PATIENCE_SECS = 1.0  # for stores, all at once, before others go on without those that take longer


class Lease:
    """The directory of a model, which stays as it is as long as this object is referred to."""

    def __init__(
        self,
        path: Path,
        release: Callable[[], object] = lambda: None,
        origin: Path | None = None,
    ) -> None:
        """`release` is called once, on any thread, when the directory is no longer needed.

        `origin` is the same for all directories of a model whose manifest has all their digests:
        versions of equal digests in two of them are the same. By default, it is the directory.
        """
        self.path = path
        self.origin = origin or path
        self.release = finalize(self, release)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of stores: `cache` is a directory, "" for the default, of at most `cache_bytes`.

    An `offline` store has what is in the cache, and is never asked. `cache_bytes` may be 0 for any.
    An archive may have `archive_files` files, and unpack to `archive_bytes`, or `archive_ratio`
    times its own bytes, whichever is more.
    """

    cache: str = ""
    cache_bytes: int = 0
    offline: bool = False
    archive_files: int = 100_000
    archive_bytes: int = 1 << 30
    archive_ratio: int = 200


@dataclass(eq=False, slots=True)
class Download:
    """A model that is being brought: the bytes that were missing, and those of them fetched."""

    model: str
    nbytes: int
    done: int = 0


class Store:
    """A source of models. Methods are called on threads, may block, and raise `LoadFailed`.

    A plugin of the group `headrace.stores` is named like the scheme of its addresses, and is called
    with `SCHEME:…` as given to `--model-repository`, and the options. `address` names the store in
    messages and labels, without secrets. Only the first three methods must be implemented.
    """

    address: str

    def names(self) -> Collection[str]:
        """The names of all its models.

        Not being reached is an error, never an empty list: models that are gone are unloaded.
        """
        raise NotImplementedError

    def token(self, name: str) -> Hashable:
        """A value that changes with the model, such as a digest, a revision, or a time."""
        raise NotImplementedError

    def current(self, name: str) -> Hashable:
        """The token as of now, for a model that is about to be loaded on request."""
        return self.token(name)

    def materialise(self, name: str, token: Hashable) -> Lease:
        """The directory of a model in the state of `token`, complete.

        A store may refuse a token that is no longer the model's: the model is then loaded again
        when the new token is seen.
        """
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Bytes of a model's files, as far as known without asking; 0 if unknown."""
        return 0

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Replace a model by the files of its manifest in one step, by `headrace models push`."""
        raise LoadFailed(f"{self.address} cannot be written")

    def problems(self, name: str) -> list[str]:
        """The problems of the files of a model, all of which are read."""
        raise LoadFailed(f"{self.address} cannot be verified")

    @property
    def trouble(self) -> str:
        """The reason why the store cannot be asked at present; "" if it can."""
        return ""

    @property
    def downloads(self) -> Sequence[Download]:
        """The downloads under way, the first one first. Read on any thread."""
        return ()

    def metrics(self) -> Iterable[Sourced]:
        """Metric families of the store; its samples have the label `store`."""
        return ()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` on any thread when models may have changed, until it is closed.

        Called once, and only a means to be asked early.
        """

    def close(self) -> None:
        """End threads and connections; leases stay. A call under way fails soon."""


class Listing:
    """The names in a store, listed by a thread of its own, so that it delays no other store."""

    def __init__(self, store: Store, late: Callable[[], None] = lambda: None) -> None:
        """`late` is called on the thread if it ends after somebody has given up `wait`."""
        self.store = store
        self.names: Collection[str] = ()
        self.error: RepositoryError | None = None
        self._late = late
        self._until = monotonic() + PATIENCE_SECS
        self._given_up = False
        self._done = Event()
        # A daemon: a store that hangs must not keep the process from exiting.
        Thread(target=self._run, name=f"names of {store.address}", daemon=True).start()

    def wait(self) -> bool:
        """True if it has ended, for which this waits until it has taken `PATIENCE_SECS`."""
        if not self._done.wait(max(self._until - monotonic(), 0.0)):
            self._given_up = True
        return self._done.is_set()

    def join(self) -> None:
        """Wait until it has ended, however long that takes."""
        self._done.wait()

    def _run(self) -> None:
        try:
            with explained(self.store.address):
                self.names = self.store.names()
        except RepositoryError as error:
            self.error = error
        self._done.set()
        if self._given_up:
            self._late()


class Stored(NamedTuple):
    """A model in a store, in the state of `token`; `config_name` selects its configuration."""

    store: Store
    name: str
    token: Hashable
    config_name: str = ""

    def lease(self) -> Lease:
        """Bring its directory; may block. Raises `LoadFailed`."""
        with explained(self.store.address):
            return self.store.materialise(self.name, self.token)

    def now(self) -> "Stored":
        """The model in its current state; may block. Raises `LoadFailed`."""
        with explained(self.store.address):
            return self._replace(token=self.store.current(self.name))


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Raise `LoadFailed` for a bug in a plugin's store; the traceback goes to the log."""
    try:
        yield
    except RepositoryError:
        raise
    except Exception as error:
        log.error("bug in the store of %s", address, exc_info=error)
        raise LoadFailed(f"{address}: its store failed: {type(error).__name__}") from error
