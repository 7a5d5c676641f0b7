"""Events of the file system below directories: a hint to look, never what is relied on.

They come from `watchfiles`, on a thread of its own. Many file systems have none, links may lead to
where none are asked for, and there is a limit to how many directories may be watched: so whoever is
told here looks by itself as well, only less often.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event, Thread

log = logging.getLogger(__name__)

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
        """What cannot be watched is tried again every `retry_secs`."""
        self._directories = [Path(os.path.abspath(path)) for path in directories]
        self._retry_secs = retry_secs
        self._happened = happened
        self._stopped = Event()
        self._interrupted = Event()
        self._told = ""
        # A daemon: a file system that hangs must not keep the process from exiting.
        self._thread = Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Tell from now on."""
        self._thread.start()

    def renew(self) -> None:
        """Watch the directories that lie under the paths now."""
        self._interrupted.set()

    def stop(self) -> None:
        """Tell no more."""
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
