"""A version of a model: its identity and its life.

Its calls pass its chain, everything that is told about it is in its report, and both follow its
state. Owned by the event-loop thread.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from headrace.core.errors import ModelNotReady
from headrace.core.limits import ABANDONED_SECS
from headrace.engine.loading import Change, LoadedVersion
from headrace.engine.model_services import EngineServices
from headrace.engine.report import VersionReport
from headrace.engine.running import RunningVersion
from headrace.engine.shared_memory import Regions
from headrace.engine.version_chain import VersionChain
from headrace.observability.statistics import VersionStatistics
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.store import Lease


class State(StrEnum):
    """The state of a version, under the protocol's names."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ModelVersion:
    """A version, known from before its load.

    It is loaded once, from its `origin`: a replacement is another object, which may take over its
    counters. Instances may be added and removed while it serves.

    Invariant: `_running` is set exactly while the state is READY or UNLOADING.
    """

    def __init__(
        self, model: str, number: int, statistics: VersionStatistics | None = None
    ) -> None:
        self.model = model
        self.number = number
        self.name = str(number)
        self.state = State.LOADING  # as in the index
        self.reason = ""
        self.added = False  # added while other versions served
        self.report = VersionReport(statistics or VersionStatistics())
        self.chain = VersionChain(model, self.name, self.report.statistics, self.not_ready)
        self._running: RunningVersion | None = None
        self._leaves = False  # `unload` was called

    @property
    def ready(self) -> bool:
        """True if it takes requests."""
        return self.state is State.READY

    @property
    def config(self) -> ModelConfig:
        """The completed configuration; raises `ModelNotReady`."""
        if self._running is None:
            raise self.not_ready()
        return self._running.loaded.config

    @property
    def lease(self) -> Lease | None:
        """The lease on the directory of the version, as long as it is loaded."""
        return None if self._running is None else self._running.loaded.lease

    @property
    def serving(self) -> LoadedVersion | None:
        """The loaded version, if it is healthy and all its backends are loaded; otherwise None."""
        running = self._running
        if running is None or not (self.ready and running.healthy):
            return None
        complete = running.fail_over is None or not running.fail_over.incomplete
        return running.loaded if complete else None

    def not_ready(self) -> ModelNotReady:
        """The error for a request that names this version while it is not ready."""
        return ModelNotReady(
            f"Request for unknown model: '{self.model}' version {self.name} is not at ready state"
            f" (it is {self.state})",
            retry_after=int(self.state is State.LOADING),
        )

    # --- life

    def serve(
        self,
        loaded: LoadedVersion,
        loop: asyncio.AbstractEventLoop,
        host: EngineServices,
        regions: Regions,
    ) -> None:
        """Start serving. `host` is the model's interface to the server, `regions` is the shared
        memory of clients.
        """
        self._running = RunningVersion(
            self.model, self.name, loaded, loop, host, regions, self.report.statistics,
            self.chain.compose,
        )  # fmt: skip
        self._enter(State.READY)

    def search(self, load: Callable[[], Awaitable[str]]) -> None:
        """Search for absent backends, and call `load` once one is available."""
        if self._running is not None and self._running.fail_over is not None:
            self.reason = self._running.fail_over.reason
            self._running.fail_over.search(load)

    def change(self, change: Change) -> None:
        """Swap in a new configuration and instance set, as `RunningVersion.change`.

        Only while it is ready.
        """
        assert self._running is not None, "a change of what does not serve. This is a bug."
        self._running.change(change)
        self.report.forget_memory(change.removed)
        self.reason = ""

    async def settled(self) -> None:
        """Wait until instances that were removed without requests are finalized and gone."""
        if self._running is not None:
            await self._running.settled()

    def fail(self, reason: str) -> None:
        """Note that the load failed."""
        self._enter(State.UNAVAILABLE, reason)

    def leave(self) -> None:
        """Refuse requests from now on; `unload` frees the model."""
        self._enter(State.UNLOADING)
        if self._running is not None and self._running.fail_over is not None:
            self._running.fail_over.stop_search()

    async def unload(self, grace: float = ABANDONED_SECS, reason: str = "unloaded") -> None:
        """Finish accepted requests, and free the model.

        Abandoned executions are ended after `grace` seconds, if possible. `reason` is reported
        afterwards.
        """
        if (running := self._running) is None:
            return
        running.leave(grace)
        if self._leaves:
            return
        self._leaves = True
        self._enter(State.UNLOADING)
        await running.finish()
        self.chain.follow(None, False)  # what is submitted from now on would never run
        await running.close()
        self._running = None
        self._enter(State.UNAVAILABLE, reason)

    def _enter(self, state: State, reason: str = "") -> None:
        """Take a state, which the chain and the report follow."""
        self.state, self.reason = state, reason
        self.report.running = self._running
        self.chain.follow(self._running, self.ready)
