"""The engine as doors have it: models that are traced are found with what traces them before."""

from typing import Any

from headrace.engine.admission import Admission
from headrace.engine.doors import Entrance, Target
from headrace.engine.tracing import Tracing

_MAX_FOUND = 1024  # as the engine's own


class TracedEntrance:
    """`Entrance` to an engine. What was found stands until `forget`, while it is ready."""

    def __init__(self, engine: Entrance, admission: Admission, tracing: Tracing) -> None:
        self.admission = admission
        self._engine = engine
        self._tracing = tracing
        self.known: dict[tuple[str, str], Any] = {}
        tracing.changed = self.forget

    @property
    def exiting(self) -> bool:
        """Whether nothing new is admitted any more."""
        return self.admission.exiting

    def find(self, name: str, version: str = "") -> Target:
        """What serves requests for a model; raises as the engine does."""
        found = self._tracing.dress(self._engine.find(name, version))
        if len(self.known) >= _MAX_FOUND:
            self.known.clear()
        self.known[name, version] = found
        return found

    def forget(self) -> None:
        """Find everything anew: other versions may serve, or other models be traced."""
        self.known.clear()
