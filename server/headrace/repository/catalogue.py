"""The models of all stores and model files, by name, listed anew each time since they change.

Names come from stores and are kept in a dictionary; a name from a request is only ever looked up
there. What is here may block.
"""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.core.plugins import PluginGroup
from headrace.observability.statistics import Sourced
from headrace.repository.layout import (
    ModelSource,
    alone,
    materialised,
    model_directories,
    nothing_in,
    own_name,
    single_file,
    size_below,
)
from headrace.repository.model_files import MANIFEST, Digests, parse_manifest
from headrace.repository.store import Lease, Listing, Store, Stored, StoreOptions, explained

log = logging.getLogger(__name__)

STORES: PluginGroup[Callable[[str, StoreOptions], Store]] = PluginGroup("headrace.stores")
NO_SUCH = "no model of this name lies in a model repository"
DUPLICATE = "model appears in two or more repositories"


@dataclass(frozen=True)
class Directory(Store):
    """A model repository on this machine: a store whose models are directories already.

    They may change at any time, which their files' stamps tell: there are no tokens. A directory
    that is a model itself is called `name`, "" for its own name.
    """

    path: Path
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", str(self.path))

    def names(self) -> Collection[str]:
        """Implements `Store.names`."""
        found = model_directories(self.path)
        return [self._own] if found == [self.path] else [path.name for path in found]

    def token(self, name: str) -> Hashable:
        """Implements `Store.token`."""
        return ""

    def materialise(self, name: str, token: Hashable) -> Lease:
        """Implements `Store.materialise`."""
        return Lease(self.path if self.is_alone(name) else self.path / name)

    def size(self, name: str) -> int:
        """Implements `Store.size`; reads the directory."""
        return size_below(self.materialise(name, "").path)

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Store.publish`: another directory takes the model's place."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise LoadFailed(f"{name!r} cannot be the name of a model's directory")
        draft, old = (self.path / f".{name}.{part}.{os.getpid()}" for part in ("new", "old"))
        target = self.path / name
        try:
            draft.mkdir(parents=True)
            for path in parse_manifest(manifest):
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(directory / path, draft / path)
            (draft / MANIFEST).write_bytes(manifest)
            if target.exists():
                target.rename(old)
            try:
                draft.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
        except OSError as error:
            raise LoadFailed(f"{target} cannot be written: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def problems(self, name: str) -> list[str]:
        """Implements `Store.problems`."""
        directory = self.materialise(name, "").path
        if not (directory / MANIFEST).is_file():
            return [f"there is no {MANIFEST}"]
        return Digests().problems(directory)

    def is_alone(self, name: str) -> bool:
        """True if the directory is this model itself."""
        return name == self._own and model_directories(self.path) == [self.path]

    def read(self, source: ModelSource) -> ModelSource:
        """One of its models, as of now."""
        found = materialised(source, may_be_flat=False)
        return alone(found, bool(self.name)) if found.path == self.path else found

    @property
    def _own(self) -> str:
        return self.name or own_name(self.path)


NO_OPTIONS = StoreOptions()


def open_store(address: str, name: str = "", options: StoreOptions = NO_OPTIONS) -> Store:
    """The store with this address: a plugin's for `SCHEME:…`, if there is one, or a directory.

    `name` is that of a directory that is a model itself. Raises `LoadFailed`.
    """
    scheme, colon, _ = address.partition(":")
    plugin = STORES.installed().get(scheme) if colon else None
    if plugin is None or Path(address).exists():
        return Directory(Path(address), name)
    with explained(address):
        return plugin.load()(address, options)


class Place(NamedTuple):
    """A model in a store, by its name there."""

    store: Store
    name: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models of the configured stores and model files.

    `config_name` selects configurations. `namespacing` allows models of the same name in several
    stores. `name` is the name of the only model file, or of the directory if it is a model; "" for
    its own.
    """

    stores: tuple[Store, ...] = ()
    files: tuple[Path, ...] = ()
    config_name: str = ""
    namespacing: bool = False
    name: str = ""
    # Listings that `read` has not waited for: a store that hangs has one at a time.
    _late: dict[Store, Listing] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, paths: Iterable[str | Path]) -> "Catalogue":
        """The catalogue of these repositories and model files; raises `LoadFailed`."""
        found = [str(path) for path in paths]
        files = [path for path in found if Path(path).is_file()]
        stores = tuple(open_store(path) for path in found if path not in files)
        return cls(stores, tuple(map(Path, files)))

    def sources(self) -> tuple[list[ModelSource], list[str]]:
        """All models, and warnings about repositories without models.

        A model found in several stores is marked as duplicate. Raises `RepositoryError` for a
        missing repository or file.
        """
        known, lost = self._reached()
        if lost:
            raise _together(lost.values())
        places = self.places(known)
        sources = [self.source(name, found) for name, found in sorted(places.items())]
        full = {place.store for found in places.values() for place in found}
        warnings = [
            nothing_in(store.path)
            if isinstance(store, Directory)
            else f"no models in {store.address}"
            for store in self.stores
            if store not in full
        ]
        if self.name and sources and not any(source.renamed for source in sources):
            warnings.append(
                f"--model-name={self.name} has no effect: it is for a directory that is a model"
                f" itself, and {self.stores[0].address} is a repository, whose models have the"
                " names of their directories"
            )
        return sources + [single_file(path, self.name) for path in self.files], warnings

    def names(self) -> Mapping[str, str]:
        """All models, with the reason why one cannot be loaded, "" if unknown.

        Models of an unreadable repository are left out, which is logged.
        """
        known, lost = self._reached()
        for store, error in lost.items():
            if not store.trouble:  # which it has logged itself
                log.warning("%s", error)
        places = self.places(known)
        names = {name: "" if len(found) == 1 else DUPLICATE for name, found in places.items()}
        for name in (self.name or file.stem for file in self.files):
            names[name] = DUPLICATE if name in names else ""
        return names

    def read(self, name: str) -> ModelSource | None:
        """The model of this name; None if there is none.

        A store that has not answered after a while is left out if another one has the model. Raises
        `LoadFailed` for an ambiguous name, or if it is in none of the repositories that can be
        read, and there are others.
        """
        late = {store for store, each in self._late.items() if not each.wait()}
        listings = [Listing(store) for store in self.stores if store not in late]
        early = [each for each in listings if each.wait()]
        self._late.update({each.store: each for each in listings if each not in early})
        known, lost = _outcome(early)
        found = self._found(name, known)
        if found is None and len(early) < len(self.stores):
            known, lost = _outcome([*listings, *map(Listing, late)])
            found = self._found(name, known)
        if found is None and lost:
            raise _together(lost.values())
        return found

    def _found(self, name: str, known: Mapping[Store, Collection[str]]) -> ModelSource | None:
        """The model of this name among `known` ones; None if there is none."""
        places = self.places(known)
        found = places.get(name, [])
        files = [file for file in self.files if (self.name or file.stem) == name]
        if len(found) + len(files) > 1:
            raise LoadFailed(DUPLICATE)
        if files:
            return single_file(files[0], self.name)
        if found:
            return self.source(name, found)
        alike = namespaced(name, places)
        if alike:
            raise LoadFailed(ambiguous(name, alike))
        return None

    def places(self, known: Mapping[Store, Collection[str]]) -> dict[str, list[Place]]:
        """The stores of the models, by name, if `known` are the names in each.

        With `namespacing`, models whose name occurs in several stores are named `name@space`, where
        space is the last part of the store's address, with a number if that occurs twice.
        """
        named: dict[str, list[Place]] = {}
        for store in self.stores:
            for name in known.get(store, ()):
                named.setdefault(name, []).append(Place(store, name))
        if not self.namespacing:
            return named
        spaces = _spaces(self.stores)
        unique: dict[str, list[Place]] = {}
        for name, places in named.items():
            for place in places:
                full = name if len(places) == 1 else f"{name}@{spaces[place.store]}"
                unique.setdefault(full, []).append(place)
        return unique

    def source(self, name: str, places: Sequence[Place]) -> ModelSource:
        """The model of this name, in the last of its places; raises `LoadFailed`.

        One of a directory is read as it is now, one of another store by its token alone.
        """
        store, own = places[-1]
        with explained(store.address):
            stored = Stored(store, own, store.token(own), self.config_name)
            duplicate = len(places) > 1
            source = ModelSource(name, Path(), None, (), duplicate=duplicate, stored=stored)
            return store.read(source) if isinstance(store, Directory) else source

    def metrics(self) -> Iterable[Sourced]:
        """Metric families of the stores."""
        return chain.from_iterable(store.metrics() for store in self.stores)

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores:
            store.close()

    def _reached(self) -> tuple[dict[Store, Collection[str]], dict[Store, RepositoryError]]:
        """The names in the stores that can be read, and the errors of the others."""
        return _outcome([Listing(store) for store in self.stores])


def _outcome(
    listings: Sequence[Listing],
) -> tuple[dict[Store, Collection[str]], dict[Store, RepositoryError]]:
    """The names in the stores that can be read, and the errors of the others; waits for them."""
    for each in listings:
        each.join()
    known = {each.store: each.names for each in listings if each.error is None}
    lost = {each.store: _named(each.store, each.error) for each in listings if each.error}
    return known, lost


def _named(store: Store, error: RepositoryError) -> RepositoryError:
    """An error that says of which store it is, as those of directories do."""
    if isinstance(store, Directory) or store.address in str(error):
        return error
    return LoadFailed(f"{store.address}: {error}")


def _together(errors: Collection[RepositoryError]) -> RepositoryError:
    """One error for those of several stores."""
    return LoadFailed("; ".join(map(str, errors)), "; ".join(each.public for each in errors))


def _spaces(stores: Sequence[Store]) -> Mapping[Store, str]:
    spaces: dict[Store, str] = {}
    for store in stores:
        local = isinstance(store, Directory)
        name = PurePosixPath(Path(store.address).resolve() if local else store.address).name
        number = 1
        while (unique := name if number == 1 else f"{name}-{number}") in spaces.values():
            number += 1
        spaces.setdefault(store, unique)
    return spaces


def namespaced(name: str, names: Iterable[str]) -> list[str]:
    """The given names that stand for this model in any repository."""
    return sorted(other for other in names if other.startswith(f"{name}@"))


def at_start(sources: Sequence[ModelSource], names: Sequence[str]) -> list[ModelSource]:
    """The models to load at start, by name, `*` for all; a missing one has a `problem`."""
    if list(names) == ["*"]:
        return list(sources)
    known = {source.name for source in sources}
    wanted = [source for source in sources if source.name in names]
    for name in dict.fromkeys(names):
        if name not in known:
            alike = namespaced(name, known)
            wanted.append(
                ModelSource(
                    name, Path(), None, (), problem=ambiguous(name, alike) if alike else NO_SUCH
                )
            )
    return wanted


def ambiguous(name: str, names: Sequence[str]) -> str:
    """The message about a name that stands for several models, with these full `names`."""
    return (
        f"There are {len(names)} identifiers of model '{name}' in global map, model namespace must"
        f" be provided to resolve ambiguity: {', '.join(names)}"
    )
