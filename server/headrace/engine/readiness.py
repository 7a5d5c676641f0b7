"""Whether the server takes requests, and who is told when that changes.

It follows from much that changes in many places: models and versions, their workers and servers,
doors, and shutdown. Each of these announces that it may have changed it; it is looked at once, at
the end of that turn of the loop, and only if somebody watches. Nobody polls. Owned by the
event-loop thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.engine.admission import Admission

if TYPE_CHECKING:  # a front end has readiness, and no models
    from headrace.engine.model import Model


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
    """That of an engine; if it is `strict`, of every model that it knows.

    `on_request`: models are loaded when they are asked for, so that what is not in memory keeps
    nobody from asking.
    """

    def __init__(
        self, models: "Mapping[str, Model]", admission: Admission, strict: bool, on_request: bool
    ) -> None:
        super().__init__(self._is_ready)
        self.initialised = False  # all models are known
        self._models = models
        self._admission = admission
        self._strict = strict
        self._on_request = on_request
        self._shutting_down = False
        self._reachable = True
        admission.watch_close(self.may_have_changed)

    def initialise(self) -> None:
        """All models are known."""
        self.initialised = True
        self.may_have_changed()

    def begin_shutdown(self) -> None:
        """Be not ready from now on."""
        self._shutting_down = True
        self.may_have_changed()

    def set_reachable(self, reachable: bool) -> None:
        """Know whether any door is open."""
        self._reachable = reachable
        self.may_have_changed()

    def _is_ready(self) -> bool:
        begun = self.initialised and self._reachable
        if not begun or self._shutting_down or self._admission.exiting:
            return False
        if not self._strict:
            return True
        if self._on_request:
            versions = (v for model in self._models.values() for v in model.versions.values())
            return all(version.healthy for version in versions if version.ready)
        return all(model.healthy for model in self._models.values())
