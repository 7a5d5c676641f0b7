"""Models that follow their files: repositories that change, and single files."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
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


class Reloader:
    """Has the engine load what has changed. Made, started and stopped on the event-loop thread."""

    def __init__(
        self, engine: Engine, sources: Sequence[ModelSource], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`sources` are all models; those are watched that are single files, under their own names.

        To be made before they are loaded: then what changes while they are is not missed.
        """
        names = Counter(source.name for source in sources)
        files = [s.file for s in sources if s.file is not None and names[s.name] == 1]
        self._engine = engine
        self._loop = loop
        self._stopped = False
        self._watcher = FileWatcher(dict.fromkeys(files, model_files.parts), self._on_change)

    def start(self) -> None:
        """Begin, once the engine knows the models."""
        if self._watcher.files:
            self._watcher.start()

    def stop(self) -> None:
        """Load nothing again from now on."""
        self._stopped = True
        self._watcher.stop()

    def _on_change(self, file: Path, changed: list[Path]) -> None:
        """Called by the watcher, on its thread."""
        try:
            self._loop.call_soon_threadsafe(self._load, file, changed)
        except RuntimeError:  # the loop is closed: the server has ended
            self._watcher.stop()

    def _load(self, file: Path, changed: list[Path]) -> None:
        if self._stopped:
            return
        try:
            source = single_file(file)
        except LoadFailed:
            return  # it is gone again; what was loaded of it goes on
        names = ", ".join(sorted(path.name for path in changed))
        log.info(
            "%s has changed: loading model %s again", names, source.name,
            extra={"model": source.name},
        )  # fmt: skip
        self._engine.follow(source, False)
