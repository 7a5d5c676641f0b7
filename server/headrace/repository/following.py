"""What has changed in model repositories from one look to the next: plain decisions over looks.

A change counts once a model's files have not changed for a while, so that what somebody is writing
or copying is not taken up half. What comes as a whole, because a directory is renamed into its
place or a link is turned to another one, is seen as a whole.

What cannot be looked at says nothing: a repository that cannot be read at present, or that is empty
because nothing is mounted there any more, is taken to be as it was, and so is a model in it whose
directory cannot be read. Only what is missing from a repository that can be read is gone, and only
if it still is after that while.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from headrace.core.errors import LoadFailed
from headrace.repository.catalogue import Catalogue
from headrace.repository.fingerprint import Fingerprint, fingerprint
from headrace.repository.layout import (
    ModelSource,
    model_directories,
    name_models,
    read_model_directory,
)
from headrace.repository.watching import QUIET_SECS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Changed:
    """A model is another than before, or is `new`."""

    source: ModelSource
    new: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A model is there no more."""

    name: str


Change: TypeAlias = Changed | Gone


class _Repository:
    """One repository with what was found there when it could last be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models: list[Path] = []
        # Device and number of its directory, None while it cannot be read.
        self.place: tuple[int, int] | None = None
        self._device: int | None = None  # when it could last be read
        self.lost = False  # it cannot be read at present

    def look(self) -> None:
        """List its models, if that is possible."""
        try:
            found = list(model_directories(self.path))
            status = self.path.stat()
        except LoadFailed as error:
            self._lose(str(error))
            return
        except OSError as error:
            self._lose(f"model repository {self.path} cannot be read: {error.strerror}")
            return
        elsewhere = self._device not in (None, status.st_dev)
        if not found and self.models and elsewhere:
            self._lose(f"model repository {self.path} is empty, and on another file system")
            return
        if self.lost:
            self.lost = False
            log.info("model repository %s is back", self.path)
        self.models, self._device = found, status.st_dev
        self.place = status.st_dev, status.st_ino

    def _lose(self, why: str) -> None:
        self.place = None
        if not self.lost:
            self.lost = True
            log.warning("%s: what was loaded from it goes on", why)


class _Watched:
    """One model: as it was told of last, and as it was seen last."""

    def __init__(self, told: Fingerprint | None = None) -> None:
        self.told = told
        self._seen = told
        self._since = 0.0
        self._gone_since: float | None = None
        self._unclear = ""  # why it cannot be looked at

    def look(self, found: Fingerprint, now: float) -> bool:
        """Whether it is to be told of, as it was found."""
        self._gone_since = None
        self._unclear = ""
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self.told or now - self._since < QUIET_SECS:
            return False
        self.told = found
        return True

    def miss(self, now: float) -> bool:
        """Whether it is to be told that it is gone, since it was not found."""
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= QUIET_SECS

    def be_unclear(self, why: str) -> None:
        """It could not be looked at; said once."""
        self._gone_since = None
        if why != self._unclear:
            self._unclear = why
            log.warning("%s: what was loaded goes on", why)

    @property
    def settled(self) -> bool:
        """Whether nothing has to be looked at again soon."""
        return self._seen == self.told and self._gone_since is None


class FollowedRepositories:
    """The repositories of a catalogue from one look to the next. Used by one thread."""

    def __init__(self, catalogue: Catalogue, sources: Iterable[ModelSource]) -> None:
        """`sources` are the models as they are known; what they are like now is what is held
        against later looks.
        """
        self._catalogue = catalogue
        self._repositories = [_Repository(path) for path in catalogue.repositories]
        self._models = {s.name: _Watched(_state(s)) for s in sources if s.file is None}
        self._unsettled: set[str] = set()
        for repository in self._repositories:
            repository.look()

    @property
    def settled(self) -> bool:
        """Whether nothing is under way that has to be looked at again soon."""
        return not self._unsettled

    @property
    def repositories(self) -> Sequence[Path]:
        """Where they lie."""
        return self._catalogue.repositories

    @property
    def places(self) -> Sequence[tuple[int, int] | None]:
        """What tells whether a repository's directory is another one than before."""
        return [repository.place for repository in self._repositories]

    def look(self, now: float, only: Collection[str] | None = None) -> list[Change]:
        """What has changed and is complete; each change is told once.

        `now` is a time in seconds that never goes back. `only` are the names of directories in the
        repositories to be looked into, None for all; those that are new or under way are, anyway.
        """
        for repository in self._repositories:
            repository.look()
        listings = [(r.path, r.models) for r in self._repositories]
        places = name_models(listings, self._catalogue.namespacing)
        lost = {repository.path for repository in self._repositories if repository.lost}
        changes: list[Change] = []
        for name, paths in sorted(places.items()):
            if any(path.parent in lost for path in paths):
                continue
            known = name in self._models and name not in self._unsettled
            if not known or only is None or any(path.name in only for path in paths):
                changes += self._look_at(name, paths, now)
        for name in sorted(self._models.keys() - places.keys()):
            self._unsettled.add(name)
            if self._models[name].miss(now):
                watched = self._models.pop(name)
                self._unsettled.discard(name)
                if watched.told is not None:
                    changes.append(Gone(name))
        return changes

    def _look_at(self, name: str, paths: Sequence[Path], now: float) -> list[Change]:
        known = self._models.get(name)
        source = read_model_directory(paths[-1], self._catalogue.config_name)
        source = replace(source, name=name, duplicate=len(paths) > 1)
        try:
            if source.problem and known is not None:
                raise LoadFailed(f"{source.path}: {source.problem}")
            found = fingerprint(source)
        except LoadFailed as error:
            if known is not None:
                known.be_unclear(str(error))
            return []
        watched = self._models.setdefault(name, _Watched())
        new = watched.told is None
        told = watched.look(found, now)
        (self._unsettled.discard if watched.settled else self._unsettled.add)(name)
        return [Changed(source, new)] if told else []


def _state(source: ModelSource) -> Fingerprint | None:
    try:
        return fingerprint(source)
    except LoadFailed:
        return None  # so that it is told of once it can be looked at
