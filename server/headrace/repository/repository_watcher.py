"""Looks at model repositories again and again: now and then, and soon after something happens."""

import logging
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic

from headrace.repository.events import FileEvents
from headrace.repository.following import Change, FollowedRepositories

log = logging.getLogger(__name__)

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
        """Tell of nothing more; nothing is waited for."""
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
