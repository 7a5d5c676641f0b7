"""Models that follow their files: repositories that change, and single files.

Watching for file changes, of single models and of repositories.

Files are examined by `stat`: that needs no library and no descriptor, costs some microseconds for
the handful of files of a model, and works alike on network file systems, bind mounts and Kubernetes
volumes, some of which report no events. Events, from `watchfiles` on a separate thread, only
trigger earlier checks and are never relied on: many file systems have none, links may lead to
unwatched places, and the number of watched directories is limited.

A change counts once files have been stable for a while, so that a file being written or copied is
not loaded half. Atomic changes are seen as a whole: a file or directory renamed into place, a link
pointed to another target.

Stores are asked side by side, each by a thread: one that hangs delays no other.

What cannot be examined is inconclusive: a repository that cannot be read at present, or that is
empty because nothing is mounted any more, counts as unchanged, and so does a model in it whose
directory cannot be read. Only an entry missing from a readable repository is gone, and only after
that while."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import TypeAlias

from headrace.core.errors import LoadFailed, RepositoryError
from headrace.engine.engine import Engine
from headrace.repository import model_files
from headrace.repository.catalogue import Catalogue, Directory, Place
from headrace.repository.layout import ModelSource, single_file
from headrace.repository.model_files import Fingerprint, Stamp, fingerprint
from headrace.repository.store import Listing, Store

log = logging.getLogger(__name__)

QUIET_SECS = 0.5
_LONG_AGO = float("-inf")
_LOOK_SECS = 0.2


def _look_at(path: Path) -> tuple[Stamp | None, bool]:
    """The stamp of a file, None if absent, and True if it was changed after it was written.

    This is the case after a rename.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None, False
    stamp = Stamp.of(found)._replace(changed_ns=0)  # ignores changes of permissions
    return stamp, found.st_ctime_ns > found.st_mtime_ns


class WatchedFiles:
    """The files of one model, and their changes. Used by one thread.

    `parts` returns the files that belong to `file`, including itself; it is called again after each
    change. `file` must exist for a change to count, since nothing can be loaded without it.
    """

    def __init__(self, file: Path, parts: Callable[[Path], Iterable[Path]]) -> None:
        self.file = file
        self._parts = parts
        self._seen: dict[Path, Stamp | None] = {}
        self._settled: dict[Path, Stamp | None] = {}
        self._resting: dict[Path, float] = {}  # time since which changed files are stable
        self._told_gone = False
        self._settle()

    def look(self, now: float) -> list[Path]:
        """The files changed since the last result, if the change is complete.

        `now` is in seconds of a monotonic clock.
        """
        for path, before in self._seen.items():
            found, renamed = _look_at(path)
            if found != before:
                self._seen[path] = found
                # Another file than before, and complete: renaming comes last.
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
        """True if `file` was absent for a while at the last `look`; reported once each time."""
        if self._seen[self.file] is not None:
            self._told_gone = False
            return False
        if self._told_gone or now - self._resting.get(self.file, _LONG_AGO) < QUIET_SECS:
            return False
        self._told_gone = True
        return True

    def _settle(self) -> None:
        """Accept the files as seen; newly found ones as they are now.

        Vanished files stay listed: they may reappear even if nothing refers to them meanwhile.
        """
        gone = {path for path, stamp in self._seen.items() if stamp is None}
        paths = {self.file, *self._parts(self.file), *gone}
        self._settled = {
            path: self._seen[path] if path in self._seen else _look_at(path)[0] for path in paths
        }
        self._seen = dict(self._settled)
        self._resting.clear()


_STEP_MS = 200  # milliseconds between checks for events, the least delay of an event
_GROUP_MS = 400  # the greatest delay, while more events arrive
_FIRST_MS = 500  # until all directories are watched


class FileEvents:
    """Reports file system events below directories, until stopped.

    `happened` is called on this object's thread with the names of the directories' entries
    concerned, or None if it may be any.
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
        """Start reporting events."""
        self._thread.start()

    def renew(self) -> None:
        """Watch the current directories at the paths."""
        self._interrupted.set()

    def stop(self) -> None:
        """Stop reporting events."""
        self._stopped.set()
        self._interrupted.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, for at most `seconds`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it logs every event
        while not self._stopped.is_set():
            try:
                self._watch()
            except Exception as error:  # any error of the library: periodic checks remain
                self._tell(error)
                self._stopped.wait(self._retry_secs)

    def _watch(self) -> None:
        """Watch until the set of directories changes."""
        # Imported here since it is rarely used.
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
            if begun:  # events before everything was watched are lost
                begun = False
                self._happened(None)
            elif paths:
                self._happened(self._names(paths))
            if any(os.path.islink(path) for path in paths):
                return  # its new target is not watched yet

    def _names(self, paths: Iterable[str]) -> frozenset[str] | None:
        names = set()
        for path in paths:
            root = next((d for d in self._directories if Path(path).is_relative_to(d)), None)
            if root is None or Path(path) == root:
                return None
            name = Path(path).relative_to(root).parts[0]
            if name.startswith("."):
                return None  # targets of links, as in Kubernetes volumes
            names.add(name)
        return frozenset(names)

    def _tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._told = str(error)
            log.info("no events of the file system for model repositories: %s", error)


@dataclass(frozen=True, slots=True)
class Changed:
    """A model has changed, or is `new`."""

    source: ModelSource
    new: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A model was removed."""

    name: str


Change: TypeAlias = Changed | Gone


class _Repository:
    """One store with its content when it could last be read."""

    def __init__(
        self, store: Store, known: Collection[str] = (), late: Callable[[], None] = lambda: None
    ) -> None:
        """`known` are the names of its models that are known already."""
        self.store = store
        self.models: Collection[str] = known
        self._late = late
        self._listing: Listing | None = None
        # Device and inode of its directory; None while it cannot be read, and for other stores.
        self.place: tuple[int, int] | None = None
        self._device: int | None = None  # device when it could last be read
        self.lost = False  # true while it cannot be read

    @property
    def unclear(self) -> bool:
        """True while it cannot be read, or has not answered."""
        return self.lost or self._listing is not None

    def ask(self) -> None:
        """Begin to list its models, unless that is under way, or quick."""
        if self._listing is None and not isinstance(self.store, Directory):
            self._listing = Listing(self.store, self._late)

    def look(self) -> None:
        """List its models, if possible."""
        store, name = self.store, f"model repository {self.store.address}"
        place = None
        try:
            if self._listing is not None:
                if not self._listing.wait():
                    return
                listing, self._listing = self._listing, None
                if listing.error is not None:
                    raise listing.error
                found = listing.names
            elif isinstance(store, Directory):
                found = store.names()
                status = store.path.stat()
                place = status.st_dev, status.st_ino
            else:
                return
        except RepositoryError as error:
            self._lose(str(error))
            return
        except OSError as error:
            self._lose(f"{name} cannot be read: {error.strerror}")
            return
        device = None if place is None else place[0]
        elsewhere = self._device not in (None, device)
        if not found and self.models and elsewhere:
            self._lose(f"{name} is empty, and on another file system")
            return
        if self.lost:
            self.lost = False
            log.info("%s is back", name)
        self.models, self._device, self.place = found, device, place

    def _lose(self, why: str) -> None:
        self.place = None
        if not self.lost:
            self.lost = True
            log.warning("%s: the models loaded from it stay", why)


class _Watched:
    """One model: its last reported and its last seen state."""

    def __init__(self, told: Fingerprint | None = None) -> None:
        self.told = told
        self._seen = told
        self._since = 0.0
        self._gone_since: float | None = None
        self._unclear = ""  # why it cannot be examined

    def look(self, found: Fingerprint, now: float) -> bool:
        """True if the found state is to be reported."""
        self._gone_since = None
        self._unclear = ""
        if found != self._seen:
            self._seen, self._since = found, now
        if found == self.told or now - self._since < QUIET_SECS:
            return False
        self.told = found
        return True

    def miss(self, now: float) -> bool:
        """True if the model is to be reported as removed; called when it was not found."""
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since >= QUIET_SECS

    def be_unclear(self, why: str) -> None:
        """Note that the model could not be examined; logged once for each reason."""
        self._gone_since = None
        if why != self._unclear:
            self._unclear = why
            log.warning("%s: the loaded model stays", why)

    @property
    def settled(self) -> bool:
        """True if no early check is needed."""
        return self._seen == self.told and self._gone_since is None


class FollowedRepositories:
    """The repositories of a catalogue, compared from one look to the next. Used by one thread."""

    def __init__(
        self,
        catalogue: Catalogue,
        sources: Iterable[ModelSource],
        late: Callable[[], None] = lambda: None,
    ) -> None:
        """`sources` are the known models; later looks are compared with their current state.

        `late` is called on any thread when a store answers that no look has waited for.
        """
        sources = list(sources)
        known: dict[Store, set[str]] = {store: set() for store in catalogue.stores}
        for source in sources:
            if source.stored is not None:
                known[source.stored.store].add(source.stored.name)
        self._catalogue = catalogue
        self._repositories = [_Repository(store, known[store], late) for store in catalogue.stores]
        self._models = {s.name: _Watched(_state(s)) for s in sources if s.file is None}
        self._unsettled: set[str] = set()
        for repository in self._repositories:
            repository.look()

    @property
    def settled(self) -> bool:
        """True if no change in progress needs an early check."""
        return not self._unsettled

    @property
    def places(self) -> Sequence[tuple[int, int] | None]:
        """Device and inode of each repository, to detect a replaced directory."""
        return [repository.place for repository in self._repositories]

    def look(self, now: float, only: Collection[str] | None = None) -> list[Change]:
        """Complete changes, each reported once.

        `now` is in seconds of a monotonic clock. `only` are the names of directories to examine,
        None for all; new ones and those with changes in progress are always examined.
        """
        for repository in self._repositories:
            repository.ask()
        for repository in self._repositories:
            repository.look()
        places = self._catalogue.places({each.store: each.models for each in self._repositories})
        lost = {repository.store for repository in self._repositories if repository.unclear}
        changes: list[Change] = []
        for name, of_name in sorted(places.items()):
            if any(place.store in lost for place in of_name):
                continue
            known = name in self._models and name not in self._unsettled
            hinted = only is None or any(_is_named(place, only) for place in of_name)
            if hinted or not known:
                changes += self._look_at(name, of_name, now)
        for name in sorted(self._models.keys() - places.keys()):
            self._unsettled.add(name)
            if self._models[name].miss(now):
                watched = self._models.pop(name)
                self._unsettled.discard(name)
                if watched.told is not None:
                    changes.append(Gone(name))
        return changes

    def _look_at(self, name: str, places: Sequence[Place], now: float) -> list[Change]:
        known = self._models.get(name)
        try:
            source = self._catalogue.source(name, places)
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


def _is_named(place: Place, names: Collection[str]) -> bool:
    """True if events of these names may concern a model; there are none but of directories."""
    store, name = place
    return isinstance(store, Directory) and (name in names or store.is_alone(name))


def _state(source: ModelSource) -> Fingerprint | None:
    try:
        return fingerprint(source)
    except LoadFailed:
        return None  # so that it is reported once it can be examined


class _Following:
    """Watches files on a thread, and applies what it finds on the event loop, until it is stopped.

    Create it before the models are loaded, so that changes during the load are not missed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, name: str) -> None:
        """`name` is the thread's name."""
        self._engine = engine
        self._loop = loop
        self._stopped = Event()
        # A daemon: a file system that hangs must not keep the process from exiting.
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start, once the engine knows the models."""
        self._thread.start()

    def stop(self) -> None:
        """Apply no further changes; does not wait for the thread."""
        self._stopped.set()

    async def stopped(self) -> None:
        """Wait for threads that must not exist when the process exits."""

    def _run(self) -> None:
        raise NotImplementedError

    def _apply(self, work: Callable[..., None], *given: object) -> None:
        """Call `work` on the event loop; on the thread."""

        def apply() -> None:
            if not self._stopped.is_set():
                work(*given)

        try:
            self._loop.call_soon_threadsafe(apply)
        except RuntimeError:  # the loop is closed: the server has ended
            self._stopped.set()


_SOON_SECS = 0.2  # between checks while a change is in progress
_END_SECS = 2.0  # time limit for joining threads


class Follower(_Following):
    """Loads and unloads models that change in repositories."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        sources: Sequence[ModelSource],
        poll_secs: float,
        loop: asyncio.AbstractEventLoop,
        events: bool = True,
    ) -> None:
        """`sources` are the initial models of the engine.

        The repositories are examined every `poll_secs`, and earlier on `events`.
        """
        super().__init__(engine, loop, "repositories")
        self._poll_secs = poll_secs
        self._hints: SimpleQueue[frozenset[str] | None] = SimpleQueue()
        self._followed = FollowedRepositories(catalogue, sources, partial(self._hints.put, None))
        paths = [store.path for store in catalogue.stores if isinstance(store, Directory)]
        for store in catalogue.stores:
            store.watch(partial(self._hints.put, None))
        self._events = FileEvents(paths, poll_secs, self._hints.put) if events and paths else None

    def start(self) -> None:
        super().start()
        if self._events is not None:
            self._events.start()

    def stop(self) -> None:
        super().stop()
        self._hints.put(frozenset())
        if self._events is not None:
            self._events.stop()

    async def stopped(self) -> None:
        """Wait for the thread of events to end, for a bounded time."""
        if self._events is not None:
            await asyncio.to_thread(self._events.join, _END_SECS)

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
            except Exception:  # no error may end the watch
                log.exception("bug while looking at model repositories")

    def _wait(self, seconds: float) -> set[str] | None:
        """Wait for an event; returns the names concerned, None for all."""
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
        for change in changes:
            self._apply(self._follow, change)

    def _follow(self, change: Change) -> None:
        if isinstance(change, Changed):
            name = change.source.name
            what = "is new" if change.new else "has changed"
            log.info("model %s %s in its repository", name, what, extra={"model": name})
            self._engine.follow(change.source, change.new)
        else:
            log.info(
                "model %s is gone from its repository: unloading it", change.name,
                extra={"model": change.name},
            )  # fmt: skip
            self._engine.unload(change.name)


class Reloader(_Following):
    """Reloads models from single files that change."""

    def __init__(
        self, engine: Engine, sources: Sequence[ModelSource], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`sources` are all models; single files under their own names are watched."""
        super().__init__(engine, loop, "watch")
        names = Counter(source.name for source in sources)
        self._names = {s.file: s.name for s in sources if s.file is not None and names[s.name] == 1}
        self._watched = [WatchedFiles(file, model_files.parts) for file in self._names]

    def start(self) -> None:
        if self._watched:
            super().start()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECS):
            for watched in self._watched:
                try:
                    self._look(watched, monotonic())
                except Exception:  # no error may end the watch
                    log.exception("bug while watching %s", watched.file)

    def _look(self, watched: WatchedFiles, now: float) -> None:
        changed = watched.look(now)
        if watched.is_lost(now):
            log.warning("%s is gone: the loaded model stays until it is back", watched.file.name)
        if changed:
            self._apply(self._load, watched.file, changed)

    def _load(self, file: Path, changed: list[Path]) -> None:
        try:
            source = replace(single_file(file), name=self._names[file])
        except LoadFailed:
            return  # removed again; the loaded model stays
        names = ", ".join(sorted(path.name for path in changed))
        log.info(
            "%s has changed: loading model %s again", names, source.name,
            extra={"model": source.name},
        )  # fmt: skip
        self._engine.follow(source, False)
