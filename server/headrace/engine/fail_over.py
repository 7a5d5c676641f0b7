"""Fail-over of a version with several backends: active backend, and search for absent ones.

The server keeps looking for a backend that could not be loaded. Once it is available the model is
loaded again, beside this version, since its configuration may be completed from that backend.

Owned by the event-loop thread; the search runs on a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from headrace.core.daemon_thread import run_in_daemon_thread
from headrace.core.errors import ModelNotReady
from headrace.engine.loading import Backends
from headrace.observability.statistics import BackendCounts, BackendSeries
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import LoopClock
from headrace.scheduling.fail_over import Tiers

log = logging.getLogger(__name__)

_FIRST_LOOK_SECS = 0.25
_LONGEST_LOOK_SECS = 2.0
_FIRST_LOAD_SECS = 5.0  # after a failed load although the backend is available
_LONGEST_LOAD_SECS = 300.0


class FailOver:
    """The tiers of a version with several backends, and the search for absent ones."""

    def __init__(
        self,
        model: str,
        backends: Backends,
        batcher: Batcher,
        loop: asyncio.AbstractEventLoop,
        counts: dict[str, BackendCounts],
    ) -> None:
        """`counts` are the version's counters, possibly taken over from a replaced version."""
        queue_size = backends.queue_size
        self.tiers = Tiers(model, backends.labels, batcher, LoopClock(loop), counts, queue_size)
        self._model = model
        self._backends = backends
        self._loop = loop
        self._search: asyncio.Task[None] | None = None

    @property
    def incomplete(self) -> bool:
        """True if any backend is absent."""
        return bool(self._backends.absent)

    @property
    def reason(self) -> str:
        """The absent backends with their reasons; "" for none."""
        return "; ".join(
            f"{label} is not used: {why}" for label, why in self._backends.absent.items()
        )

    @property
    def detour(self) -> str:
        """The backend in use instead of the preferred ones; "" if it is the first, or none."""
        before: list[str] = []
        for tier in self.tiers:
            if tier.rank == self.tiers.active and before:
                return f"requests go to {tier.name} instead of {' and '.join(before)}"
            before.append(tier.name)
        return ""

    def waiting_error(self) -> ModelNotReady:
        """The error of a request that no backend can run."""
        names = ", ".join(tier.name for tier in self.tiers)
        return ModelNotReady(
            f"model '{self._model}' is not ready: none of its backends ({names}) can run it",
            retry_after=1,
        )

    def series(self) -> Sequence[BackendSeries]:
        """The backends, for a scrape."""
        return [
            BackendSeries(tier.name, tier.counts, tier.rank == self.tiers.active)
            for tier in self.tiers
        ]

    def search(self, load: Callable[[], Awaitable[str]]) -> None:
        """Search for absent backends until stopped, and call `load` once one is available.

        `load` returns the reason of a failure, "" on success.
        """
        if self.incomplete:
            self._search = self._loop.create_task(self._look(load))

    def stop_search(self) -> None:
        """Stop the search for absent backends."""
        if self._search is not None:
            self._search.cancel()

    async def _look(self, load: Callable[[], Awaitable[str]]) -> None:
        pause, load_pause = _FIRST_LOOK_SECS, _FIRST_LOAD_SECS
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECS)
            try:
                found = await run_in_daemon_thread(self._backends.look, f"look for {self._model}")
            except Exception:
                log.exception("bug while looking for a backend of model %s", self._model)
                continue
            if not found:
                continue
            log.info(
                "model %s: %s can be reached and the model is loaded again", self._model, found,
                extra={"model": self._model},
            )  # fmt: skip
            if not await load():
                return
            await asyncio.sleep(load_pause)
            load_pause = min(2 * load_pause, _LONGEST_LOAD_SECS)
