"""Which headers of clients go on to other servers, for doors in other processes.

Owned by the event-loop thread.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.engine.model import Model

Watcher = Callable[[Mapping[str, Sequence[str]]], None]


class ForwardedHeaders:
    """By model, the names of headers that go on to the servers which run it, in lower case."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, ...]] = {}
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with the names whenever they change, and now if there are any."""
        self._watchers.append(watcher)
        if self._names:
            watcher(dict(self._names))

    def follow(self, model: Model) -> None:
        """Take the names of a model whose ready versions may have changed.

        Those of a model without a ready version stay: requests may have it loaded again, and bring
        their headers along then.
        """
        versions = model.ready_versions()
        names = tuple(sorted({name for v in versions for name in v.forwarded_headers or ()}))
        if not versions or names == self._names.get(model.name, ()):
            return
        self._names.pop(model.name, None)
        if names:
            self._names[model.name] = names
        for watcher in self._watchers:
            watcher(dict(self._names))
