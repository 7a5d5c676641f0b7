"""Whether the server takes requests, and who is told when that changes.

The server is ready once every model that is to be there at start was tried, as long as a door is
open and shutdown has not begun. What becomes of a model that was loaded (workers that end, servers
that cannot be reached) is that model's readiness alone: else one model would take a pod out of
service with all others.

Whatever may have changed it announces that; it is looked at once, at the end of that turn of the
loop, and only if somebody watches. Nobody polls. Owned by the event-loop thread.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.engine.admission import Admission

if TYPE_CHECKING:  # a front end has readiness, and no models
    from headrace.engine.model import Model

_NAMED = 5  # models that a reason names


class Readiness:
    """What `look` says, and those who are told when it says something else."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._watchers: set[Callable[[], None]] = set()
        self._told = False  # what it was when they were last called, or the first one came
        self._scheduled = False

    @property
    def ready(self) -> bool:
        """Whether the server takes requests."""
        return self._look()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `ready` has changed, until `unwatch`."""
        if not self._watchers:
            self._told = self._look()
        self._watchers.add(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Do not call `callback`."""
        self._watchers.discard(callback)

    def may_have_changed(self) -> None:
        """Have it looked at soon; takes nothing while nobody watches."""
        if self._watchers and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._scheduled = False
        ready = self._look()
        if ready is not self._told:
            self._told = ready
            for callback in list(self._watchers):
                callback()


class ServerReadiness(Readiness):
    """That of an engine; if it is `strict`, of one whose models are all loaded."""

    def __init__(self, models: "Mapping[str, Model]", admission: Admission, strict: bool) -> None:
        super().__init__(lambda: not self.reason)
        self.initialised = False  # all models are known
        self._models = models
        self._admission = admission
        self._strict = strict
        self._started = False
        self._shutting_down = False
        self._reachable = True
        admission.watch_close(self.may_have_changed)

    @property
    def reason(self) -> str:
        """Why the server is not ready, "" if it is."""
        if self._shutting_down or self._admission.exiting:
            return "the server is shutting down"
        if not self._reachable:
            return "no front end is open"
        models = self._models.values()
        if not self._started:
            loading = [model.name for model in models if model.loading is not None]
            return f"models are being loaded: {_list(loading)}" if loading else "it is starting"
        if self._strict and (missing := [model.name for model in models if not model.loaded]):
            return f"models are not loaded (--strict-readiness): {_list(missing)}"
        return ""

    def initialise(self) -> None:
        """All models are known."""
        self.initialised = True

    def start(self) -> None:
        """Every model that is to be there at start was tried."""
        self._started = True
        self.may_have_changed()

    def begin_shutdown(self) -> None:
        """Be not ready from now on."""
        self._shutting_down = True
        self.may_have_changed()

    def set_reachable(self, reachable: bool) -> None:
        """Know whether any door is open."""
        self._reachable = reachable
        self.may_have_changed()


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
