"""Models that come, change and go with the repositories that they lie in."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from headrace.engine.engine import Engine
from headrace.repository.layout import Catalogue, ModelSource
from headrace.repository.watching import Change, Changed, FollowedRepositories, RepositoryWatcher

log = logging.getLogger(__name__)


class Follower:
    """Has the engine load and unload what has changed. Used on the event-loop thread."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        sources: Sequence[ModelSource],
        poll_secs: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`sources` are the models that the engine is given at first.

        To be made before they are loaded: then what changes while they are is not missed.
        """
        self._engine = engine
        self._loop = loop
        self._stopped = False
        followed = FollowedRepositories(catalogue, sources)
        self._watcher = RepositoryWatcher(followed, poll_secs, self._on_changes)

    def start(self) -> None:
        """Begin, once the engine knows the models."""
        self._watcher.start()

    def stop(self) -> None:
        """Change nothing from now on."""
        self._stopped = True
        self._watcher.stop()

    async def stopped(self) -> None:
        """Wait for threads that must not be there when the process ends."""
        await asyncio.to_thread(self._watcher.join)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        """Called by the watcher, on its thread."""
        try:
            self._loop.call_soon_threadsafe(partial(self._apply, changes))
        except RuntimeError:  # the loop is closed: the server has ended
            self._watcher.stop()

    def _apply(self, changes: Sequence[Change]) -> None:
        if self._stopped:
            return
        for change in changes:
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
