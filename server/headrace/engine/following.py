"""Reloading of models when their files change: repositories, and single files."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.engine import Engine
from headrace.repository import model_files
from headrace.repository.layout import Catalogue, ModelSource, single_file
from headrace.repository.watching import (
    Change,
    Changed,
    FileWatcher,
    FollowedRepositories,
    RepositoryWatcher,
)

log = logging.getLogger(__name__)


class _Following:
    """Passes a watcher's findings from its thread to the event loop, until it is stopped."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._stopped = False
        self._watcher: FileWatcher | RepositoryWatcher

    def start(self) -> None:
        """Start, once the engine knows the models."""
        self._watcher.start()

    def stop(self) -> None:
        """Apply no further changes."""
        self._stopped = True
        self._watcher.stop()

    def _take(self, work: Callable[..., None], *given: object) -> None:
        """Receive a finding on the watcher's thread."""

        def take() -> None:
            if not self._stopped:
                work(*given)

        try:
            self._loop.call_soon_threadsafe(take)
        except RuntimeError:  # the loop is closed: the server has ended
            self._watcher.stop()


class Follower(_Following):
    """Loads and unloads models that change in repositories. Used on the event-loop thread."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        sources: Sequence[ModelSource],
        poll_secs: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`sources` are the initial models of the engine.

        Create it before they are loaded, so that changes during the load are not missed.
        """
        super().__init__(engine, loop)
        followed = FollowedRepositories(catalogue, sources)
        self._watcher: RepositoryWatcher = RepositoryWatcher(
            followed, poll_secs, partial(self._take, self._apply)
        )

    async def stopped(self) -> None:
        """Wait for threads that must end before the process."""
        await asyncio.to_thread(self._watcher.join)

    def _apply(self, changes: Sequence[Change]) -> None:
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


class Reloader(_Following):
    """Reloads models from single files that change. Used on the event-loop thread."""

    def __init__(
        self, engine: Engine, sources: Sequence[ModelSource], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`sources` are all models; single files under their own names are watched.

        Create it before they are loaded, so that changes during the load are not missed.
        """
        super().__init__(engine, loop)
        names = Counter(source.name for source in sources)
        files = [s.file for s in sources if s.file is not None and names[s.name] == 1]
        parts = dict.fromkeys(files, model_files.parts)
        self._watcher = FileWatcher(parts, partial(self._take, self._load))

    def _load(self, file: Path, changed: list[Path]) -> None:
        try:
            source = single_file(file)
        except LoadFailed:
            return  # removed again; the loaded model stays
        names = ", ".join(sorted(path.name for path in changed))
        log.info(
            "%s has changed: loading model %s again", names, source.name,
            extra={"model": source.name},
        )  # fmt: skip
        self._engine.follow(source, False)
