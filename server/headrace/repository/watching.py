"""When files have changed, and the change is complete.

Files are looked at by `stat`, a few times a second: that needs no library and no descriptor, costs
some microseconds for the handful of files that a model is made of, and works alike on network file
systems, bind mounts and Kubernetes' volumes, of which some report no events.

A file that somebody is writing must not be loaded. So a change counts once nothing has changed for
a while; but one that came as a whole, because it was written elsewhere and then put in place of the
file by a rename, counts at once.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import NamedTuple

from headrace.repository.stamps import Stamp

log = logging.getLogger(__name__)

QUIET_SECS = 0.5
_LONG_AGO = float("-inf")
_LOOK_SECS = 0.2


class Look(NamedTuple):
    """A file as it was seen; `stamp` is None if it is not there.

    `whole` is whether something was done to it after it was last written, such as a rename.
    """

    stamp: Stamp | None
    whole: bool


def look_at(path: Path) -> Look:
    """A file as it is now."""
    try:
        found = os.stat(path)
    except OSError:
        return Look(None, False)
    stamp = Stamp.of(found)._replace(changed_ns=0)  # other permissions are no change
    return Look(stamp, found.st_ctime_ns > found.st_mtime_ns)


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
            found = look_at(path)
            if found.stamp != before:
                self._seen[path] = found.stamp
                self._resting[path] = _LONG_AGO if _is_put_in_place(before, found) else now
        changed = [path for path in self._seen if self._seen[path] != self._settled[path]]
        if self._seen[self.file] is None:
            return []
        if any(now - self._resting[path] < QUIET_SECS for path in changed):
            return []
        if changed:
            self._settle()
        return changed

    def is_lost(self, now: float) -> bool:
        """Whether `file` has been away for a while, at the last `look`; said once each time."""
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
            path: self._seen[path] if path in self._seen else look_at(path).stamp for path in paths
        }
        self._seen = dict(self._settled)
        self._resting.clear()


def _is_put_in_place(before: Stamp | None, look: Look) -> bool:
    """Whether a file is another one than before, and complete: renaming is the last done to it."""
    if look.stamp is None or not look.whole:
        return False
    return before is None or (before.device, before.inode) != (look.stamp.device, look.stamp.inode)


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

    @property
    def files(self) -> list[Path]:
        """The models' files."""
        return [watched.file for watched in self._watched]

    def start(self) -> None:
        """Look at the files until `stop`."""
        # A daemon: a file system that hangs must not keep the process from exiting.
        Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Tell of nothing more; nothing is waited for."""
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
