"""Changes of the files of single models and of repositories, told when they are complete.

Files are looked at by `stat`: that needs no library and no descriptor, costs some microseconds for
the handful of files that a model is made of, and works alike on network file systems, bind mounts
and Kubernetes' volumes, of which some report no events. Events, from `watchfiles` on a thread of
its own, are a hint to look sooner and never relied on: many file systems have none, links may lead
to where none are asked for, and there is a limit to how many directories may be watched.

A change counts once nothing has changed for a while, so that what somebody is writing or copying is
not taken up half. What comes as a whole is seen as a whole: a file or directory that is renamed
into its place, a link that is turned to another one.

What cannot be looked at says nothing: a repository that cannot be read at present, or that is empty
because nothing is mounted there any more, is taken to be as it was, and so is a model in it whose
directory cannot be read. Only what is missing from a repository that can be read is gone, and only
if it still is after that while.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import TypeAlias

from headrace.core.errors import LoadFailed
from headrace.repository.layout import (
    Catalogue,
    ModelSource,
    model_directories,
    name_models,
    read_model_directory,
)
from headrace.repository.model_files import Fingerprint, Stamp, fingerprint

log = logging.getLogger(__name__)

QUIET_SECS = 0.5
_LONG_AGO = float("-inf")
_LOOK_SECS = 0.2


def _look_at(path: Path) -> tuple[Stamp | None, bool]:
    """Stamp of a file, None without one, and whether its last change came after it was written.

    That is so after a rename.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None, False
    stamp = Stamp.of(found)._replace(changed_ns=0)  # other permissions are no change
    return stamp, found.st_ctime_ns > found.st_mtime_ns


class WatchedFiles:
    """The files of one model, and whether they have changed. Used by one thread.

    `parts` says which files belong to `file`, itself being one of them; it is asked again after
    each change. `file` has to be there for a change to count, since nothing can be loaded without.
    """

    def __init__(self, file: Path, parts: Callable[[Path], Iterable[Path]]) -> None:
        self.file = file
        self._parts = parts
        self._seen: dict[Path, Stamp | None] = {}
        self._settled: dict[Path, Stamp | None] = {}
        self._resting: dict[Path, float] = {}  # since when, for what has changed
        self._told_gone = False
        self._settle()

    def look(self, now: float) -> list[Path]:
        """The files that have changed since they were last told, if the change is complete.

        `now` is a time in seconds that never goes back.
        """
        for path, before in self._seen.items():
            found, renamed = _look_at(path)
            if found != before:
                self._seen[path] = found
                # Another file than before, and complete: renaming is the last done to it.
                put = found and renamed and (before is None or before[:2] != found[:2])
                self._resting[path] = _LONG_AGO if put else now
        changed = [path for path in self._seen if self._seen[path] != self._settled[path]]
        if self._seen[self.file] is None:
            return []
        if any(now - self._resting[path] < QUIET_SECS for path in changed):
            return []
        if changed:
            self._settle()
        return changed

    def is_lost(self, now: float) -> bool:
        """True if `file` has been away for a while, at the last `look`; said once each time."""
        if self._seen[self.file] is not None:
            self._told_gone = False
            return False
        if self._told_gone or now - self._resting.get(self.file, _LONG_AGO) < QUIET_SECS:
            return False
        self._told_gone = True
        return True

    def _settle(self) -> None:
        """Take the files as they were seen; those that are new among them as they are now.

        What is gone may come back, also if nothing refers to it meanwhile.
        """
        gone = {path for path, stamp in self._seen.items() if stamp is None}
        paths = {self.file, *self._parts(self.file), *gone}
        self._settled = {
            path: self._seen[path] if path in self._seen else _look_at(path)[0] for path in paths
        }
        self._seen = dict(self._settled)
        self._resting.clear()


class FileWatcher:
    """Watches models' files on a thread of its own, since a network file system may not answer.

    `changed` is called on that thread, with the model's file and the files that have changed.
    """

    def __init__(
        self,
        files: Mapping[Path, Callable[[Path], Iterable[Path]]],
        changed: Callable[[Path, list[Path]], None],
    ) -> None:
        """`files` are the models' files and what tells which others belong to each.

        What they are like now is what changes are told against.
        """
        self._watched = [WatchedFiles(file, parts) for file, parts in files.items()]
        self._changed = changed
        self._stopped = Event()

    def start(self) -> None:
        """Look at the files until `stop`."""
        if self._watched:
            # A daemon: a file system that hangs must not keep the process from exiting.
            Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Stop telling of changes, without waiting for the thread."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECS):
            for watched in self._watched:
                try:
                    now = monotonic()
                    changed = watched.look(now)
                    if watched.is_lost(now):
                        log.warning(
                            "%s is gone: what was loaded of it goes on until it is back",
                            watched.file.name,
                        )
                    if changed and not self._stopped.is_set():
                        self._changed(watched.file, changed)
                except Exception:  # whatever it is, it must not end the watch
                    log.exception("bug while watching %s", watched.file)


_STEP_MS = 200  # between looks at what has come; events wait for so long at least
_GROUP_MS = 400  # and at most for so long, while others come
_FIRST_MS = 500  # from which on it is clear that everything is watched


class FileEvents:
    """Tells when something has happened below directories, until it is stopped.

    `happened` is called on the thread of this object with the names of those entries of the
    directories that it happened in or to, or None if it may be any.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        retry_secs: float,
        happened: Callable[[frozenset[str] | None], None],
    ) -> None:
        """Directories that cannot be watched are tried again every `retry_secs`."""
        self._directories = [Path(os.path.abspath(path)) for path in directories]
        self._retry_secs = retry_secs
        self._happened = happened
        self._stopped = Event()
        self._interrupted = Event()
        self._told = ""
        # A daemon: a file system that hangs must not keep the process from exiting.
        self._thread = Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Start telling of events."""
        self._thread.start()

    def renew(self) -> None:
        """Watch the directories that lie under the paths now."""
        self._interrupted.set()

    def stop(self) -> None:
        """Stop telling of events."""
        self._stopped.set()
        self._interrupted.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for so long at most."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells of every event
        while not self._stopped.is_set():
            try:
                self._watch()
            except Exception as error:  # of a library; whatever it is, there are looks besides
                self._tell(error)
                self._stopped.wait(self._retry_secs)

    def _watch(self) -> None:
        """Watch until something makes it necessary to begin anew."""
        # Imported here because few want it.
        from watchfiles import watch

        begun = True
        self._interrupted.clear()
        if self._stopped.is_set():
            return
        for changes in watch(
            *self._directories,
            watch_filter=None,
            debounce=_GROUP_MS,
            step=_STEP_MS,
            stop_event=self._interrupted,
            rust_timeout=_FIRST_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
            ignore_permission_denied=True,
        ):
            paths = [path for _, path in changes]
            if begun:  # what happened before everything was watched, nobody has told
                begun = False
                self._happened(None)
            elif paths:
                self._happened(self._names(paths))
            if any(os.path.islink(path) for path in paths):
                return  # what it leads to now is not watched yet

    def _names(self, paths: Iterable[str]) -> frozenset[str] | None:
        names = set()
        for path in paths:
            root = next((d for d in self._directories if Path(path).is_relative_to(d)), None)
            if root is None or Path(path) == root:
                return None
            name = Path(path).relative_to(root).parts[0]
            if name.startswith("."):
                return None  # what links lead to, as in volumes of Kubernetes
            names.add(name)
        return frozenset(names)

    def _tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._told = str(error)
            log.info("no events of the file system for model repositories: %s", error)


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
        """True if it is to be told of, as it was found."""
        self._gone_since = None
        self._unclear = ""
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self.told or now - self._since < QUIET_SECS:
            return False
        self.told = found
        return True

    def miss(self, now: float) -> bool:
        """True if it is to be told that it is gone, since it was not found."""
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= QUIET_SECS

    def be_unclear(self, why: str) -> None:
        """Note that the model could not be looked at; logged once for each reason."""
        self._gone_since = None
        if why != self._unclear:
            self._unclear = why
            log.warning("%s: what was loaded goes on", why)

    @property
    def settled(self) -> bool:
        """True if nothing has to be looked at again soon."""
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
        """True if nothing is under way that has to be looked at again soon."""
        return not self._unsettled

    @property
    def repositories(self) -> Sequence[Path]:
        """Paths of the repositories."""
        return self._catalogue.repositories

    @property
    def places(self) -> Sequence[tuple[int, int] | None]:
        """Device and inode of each repository, by which another directory is noticed."""
        return [repository.place for repository in self._repositories]

    def look(self, now: float, only: Collection[str] | None = None) -> list[Change]:
        """Changes that are complete, each told once.

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


_SOON_SECS = 0.2  # between looks while something is under way
_END_SECS = 2.0  # that threads are waited for


class RepositoryWatcher:
    """Looks on a thread of its own, since a network file system may not answer.

    `changed` is called on that thread with what has changed.
    """

    def __init__(
        self,
        followed: FollowedRepositories,
        poll_secs: float,
        changed: Callable[[Sequence[Change]], None],
        events: bool = True,
    ) -> None:
        """Everything is looked at every `poll_secs`, and sooner if `events` tell to."""
        self._followed = followed
        self._poll_secs = poll_secs
        self._changed = changed
        self._hints: SimpleQueue[frozenset[str] | None] = SimpleQueue()
        paths = followed.repositories
        self._events = FileEvents(paths, poll_secs, self._hints.put) if events else None
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="repositories", daemon=True)

    def start(self) -> None:
        """Look until `stop`."""
        self._thread.start()
        if self._events is not None:
            self._events.start()

    def stop(self) -> None:
        """Stop telling of changes, without waiting for the thread."""
        self._stopped.set()
        self._hints.put(frozenset())
        if self._events is not None:
            self._events.stop()

    def join(self) -> None:
        """Wait for the threads to end, for a while."""
        if self._events is not None:
            self._events.join(_END_SECS)

    def _run(self) -> None:
        due = monotonic()
        while not self._stopped.is_set():
            now = monotonic()
            only: set[str] | None = None
            if now < due:
                only = self._wait(_SOON_SECS if not self._followed.settled else due - now)
            if only is None:
                due = monotonic() + self._poll_secs
            if self._stopped.is_set():
                return
            try:
                self._look(only)
            except Exception:  # whatever it is, it must not end the watch
                log.exception("bug while looking at model repositories")

    def _wait(self, seconds: float) -> set[str] | None:
        """Wait for a hint; the names of where something may have happened, None for everywhere."""
        names: set[str] = set()
        try:
            hint = self._hints.get(timeout=seconds)
            while hint is not None:
                names |= hint
                hint = self._hints.get_nowait()
        except Empty:
            return names
        return None

    def _look(self, only: set[str] | None) -> None:
        places = self._followed.places
        changes = self._followed.look(monotonic(), only)
        if self._events is not None and places != self._followed.places:
            self._events.renew()
        if changes and not self._stopped.is_set():
            self._changed(changes)
