"""Places: the engines and clients that the runners of a process share.

There is one for each address, or repository and settings, opened at the first use, and closed when
the last runner that has used it is gone. A forked process has its own: those of its parent are left
alone. Runners that came by pickle, as to the executors of a cluster, come and go with each task, so
what they have opened is kept for a while longer.
"""

import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.client.address import is_address
from headrace.client.blocking import BlockingModels, Client
from headrace.repository.catalogue import STORES
from headrace.runner.embedded import EmbeddedEngine
from headrace.serving.sources import ServeError

_LINGER_SECS = 60.0


class SharedModels:
    """A shared engine or client, with the number of runners that have used it."""

    def __init__(self, address: str, settings: Mapping[str, Any]) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.closing: threading.Timer | None = None
        self._address = address
        self._settings = settings
        self._found: BlockingModels[Any] | None = None
        self._loaded: set[str] = set()

    def models(self, model: str) -> BlockingModels[Any]:
        """The engine with that model loaded, or the client; opens it on first use."""
        if (found := self.opened(model)) is not None:  # as mostly, without the lock
            return found
        with self.lock:
            if self._found is None:
                self._found = self._opened(model)
            elif model not in self._loaded and self._loads:
                self._found.load(model, timeout=0)
            self._loaded.add(model)
            return self._found

    def opened(self, model: str) -> BlockingModels[Any] | None:
        """The engine or client if that model needs no waiting; None otherwise."""
        return self._found if model in self._loaded else None

    def close(self) -> None:
        """Close the engine or client, if it was opened."""
        with self.lock:
            found, self._found = self._found, None
            self._loaded.clear()
        if found is not None:
            found.close()

    @property
    def _loads(self) -> bool:
        return not is_address(self._address) and not (
            {"model_control_mode", "load_model"} & set(self._settings)
        )

    def _opened(self, model: str) -> BlockingModels[Any]:
        given = dict(self._settings)
        if is_address(self._address):
            return Client(self._address, **given)
        if self._loads:
            given |= {"model_control_mode": "explicit", "load_model": model}
        if os.path.isdir(self._address):
            return EmbeddedEngine(self._address, **given)
        if self._address.partition(":")[0] in STORES.installed():
            return EmbeddedEngine(model_repository=self._address, **given)
        raise ServeError(
            f"{self._address} is neither a directory nor an address such as grpc://host:8001"
        )


@dataclass
class Places:
    """The places of one process."""

    lock: threading.RLock  # a runner may be collected while it is held
    known: dict[Hashable, SharedModels]

    def enter(self, address: str, settings: Mapping[str, Any]) -> tuple[Hashable, SharedModels]:
        """The place, for one runner more; each calls `leave` once."""
        key = (address, repr(sorted(settings.items())))
        with self.lock:
            place = self.known.setdefault(key, SharedModels(address, settings))
            place.users += 1
            if place.closing is not None:
                place.closing.cancel()
                place.closing = None
        return key, place

    def leave(self, key: Hashable, process: int, lingers: bool) -> None:
        """A runner is gone; in a child of the process that it was in, nothing is done."""
        if process != os.getpid():
            return
        with self.lock:
            place = self.known[key]
            place.users -= 1
            if place.users:
                return
            if lingers:
                place.closing = threading.Timer(_LINGER_SECS, self._drop, (key,))
                place.closing.daemon = True
                place.closing.start()
                return
        self._drop(key)

    def _drop(self, key: Hashable) -> None:
        with self.lock:
            place = self.known.get(key)
            if place is None or place.users:
                return
            del self.known[key]
        place.close()


# By process, so that a child has new locks too; those of the parent are kept, unclosed.
_PLACES: dict[int, Places] = {}


def places() -> Places:
    """The places of this process."""
    found = _PLACES.get(os.getpid())
    return found or _PLACES.setdefault(os.getpid(), Places(threading.RLock(), {}))
