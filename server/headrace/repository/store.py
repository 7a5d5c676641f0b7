"""Stores: where models come from.

A store has models by name. Each has a token, which changes whenever the model does, and is brought
as a directory when it is loaded: whatever is above reads directories alone, in the layout of
`headrace.repository.layout`. A model repository on this machine is a store whose models need not
be brought; the files of load requests are one; others are plugins, by the scheme of their address.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import finalize

from headrace.core.errors import LoadFailed, RepositoryError

log = logging.getLogger(__name__)


class Lease:
    """The directory of a model, which stays as it is as long as this object is referred to."""

    def __init__(self, path: Path, release: Callable[[], object] = lambda: None) -> None:
        """`release` is called once, on any thread, when the directory is no longer needed."""
        self.path = path
        self.release = finalize(self, release)


class Store(Protocol):
    """A source of models. Methods are called on threads, may block, and raise `LoadFailed`.

    A plugin of the group `headrace.stores` is named like the scheme of its addresses, and is called
    with `SCHEME:…` as given to `--model-repository`. `address` names the store in messages and
    labels, without secrets.
    """

    @property
    def address(self) -> str: ...

    def names(self) -> Collection[str]:
        """The names of all its models.

        Not being reached is an error, never an empty list: models that are gone are unloaded.
        """
        ...

    def token(self, name: str) -> Hashable:
        """A value that changes with the model, such as a digest, a revision, or a time."""
        ...

    def materialise(self, name: str, token: Hashable) -> Lease:
        """The directory of a model in the state of `token`, complete.

        A store may refuse a token that is no longer the model's: the model is then loaded again
        when the new token is seen.
        """
        ...


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
