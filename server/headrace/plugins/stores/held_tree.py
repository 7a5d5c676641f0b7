"""The models of a store that are brought all at once, as those of an archive are.

They are in one tree of the cache, which stays as long as the store is in that state: models are
taken from it as from any other place, so that those with the same files as before stay loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import NamedTuple

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.cache import StoreCache, key_of
from headrace.plugins.stores.remote import Remote, RemoteFile
from headrace.repository.store import Lease


class HeldModel(NamedTuple):
    """A model in the tree: its directory, and its files with their digests."""

    directory: Path
    files: Mapping[str, RemoteFile]


class RefusedArchive(LoadFailed):
    """An archive whose content is refused, as often as it is unpacked."""


# The models in a directory with these files.
Divide = Callable[[Path, Mapping[str, RemoteFile]], Mapping[str, HeldModel]]


class _TreeInUse(NamedTuple):
    state: str
    lease: Lease
    models: Mapping[str, HeldModel]


class HeldTree:
    """The tree of a store's last state. Methods are called on any threads."""

    def __init__(self, remote: Remote, cache: StoreCache, divide: Divide) -> None:
        self.stopped = Event()
        self._remote, self._cache, self._divide = remote, cache, divide
        self._held: _TreeInUse | None = None
        self._refused = ("", "")  # the state whose archives are refused, and why

    def models(
        self, state: str, nbytes: int, fill: Callable[[Path], None]
    ) -> Mapping[str, HeldModel]:
        """The models in a state; `fill` writes its files into a directory if they are not there.

        They are about `nbytes`. Raises `LoadFailed`; `RefusedArchive` again without another fill.
        """
        if self._refused[0] == state:
            raise RefusedArchive(self._refused[1])
        if self._held is None or self._held.state != state:
            address = self._remote.address
            key = key_of(address, state)
            try:
                lease, found = self._cache.bring(key, address, nbytes, fill, self.stopped)
            except RefusedArchive as error:
                self._refused = state, str(error)
                raise
            files = {
                path: RemoteFile(size, digest, digest) for path, (digest, size) in found.items()
            }
            self._held = _TreeInUse(state, lease, self._divide(lease.path, files))
        return self._held.models

    def read(self, name: str, path: str, start: int, stop: int) -> bytes:
        """A part of a file, for contents that the cache has lost since; raises `LoadFailed`."""
        held = self._held
        if held is None or name not in held.models:
            raise self._remote.changing(name)
        file = held.models[name].directory / path
        try:
            with file.open("rb") as opened:
                opened.seek(start)
                return opened.read(stop - start)
        except OSError as error:
            raise LoadFailed(f"{file} cannot be read: {error.strerror}") from error
