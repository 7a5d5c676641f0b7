"""What doors that are elsewhere have to know of the models that other servers run.

Owned by the event-loop thread.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.core.requests import Passes
from headrace.engine.model import Model

Watcher = Callable[[Mapping[str, Sequence[str]], Mapping[str, str]], None]


class PassingModels:
    """By model, the names of headers that go on to its servers, in lower case; and the door whose
    requests do as they came, of those of which they do so whatever version they are for.
    """

    def __init__(self) -> None:
        self._headers: dict[str, tuple[str, ...]] = {}
        self._passes: dict[str, str] = {}
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with both whenever they change, and now if there are any."""
        self._watchers.append(watcher)
        if self._headers or self._passes:
            watcher(dict(self._headers), dict(self._passes))

    def follow(self, model: Model) -> None:
        """Other versions of a model may be ready than before."""
        versions = model.ready_versions()
        headers = self._headers.get(model.name, ())
        if versions:  # otherwise requests may have it loaded again, which bring them along then
            headers = tuple(sorted({name for v in versions for name in v.forwarded_headers}))
        kinds = {version.passes for version in versions}
        passes = kinds.pop() if len(kinds) == 1 and model.router is None else Passes.NONE
        before = self._headers.get(model.name, ()), self._passes.get(model.name, "")
        if before == (headers, passes):
            return
        self._headers.pop(model.name, None)
        self._passes.pop(model.name, None)
        if headers:
            self._headers[model.name] = headers
        if passes:
            self._passes[model.name] = passes.value
        for watcher in self._watchers:
            watcher(dict(self._headers), dict(self._passes))
