"""The parts of a version from the end of its load until its model is freed.

A scheduler, the placements of the instances by backend, and what stands before them: sequences and
fail-over. The version decides when they begin and end, its chain is composed from them, its report
reads them. Owned by the event-loop thread.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headrace.core.call import Call
from headrace.core.errors import ServerError
from headrace.core.limits import ModelLoad
from headrace.engine.caching import CachedParts
from headrace.engine.fail_over import FailOver
from headrace.engine.loading import Change, LoadedInstance, LoadedVersion
from headrace.engine.model_services import EngineServices
from headrace.engine.padding import PaddingParts
from headrace.engine.sequencing import SequenceScheduler, SequenceStage
from headrace.engine.shared_memory import Regions
from headrace.observability.statistics import CacheCounts, PaddingCounts, VersionStatistics
from headrace.placement.placement import PlacedInstance, Placement, Surroundings
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.clock import Clock, LoopClock
from headrace.scheduling.gates import DELAY, delay_in
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.scheduler import InstanceScheduler, Scheduler

log = logging.getLogger(__name__)


class RunningVersion:
    """The parts of one version. Instances may be added and removed while it serves.

    `host` is the model's interface to the server, `regions` the shared memory of clients;
    `placements` are by the rank of their backends. `fail_over` is for several backends, `sequences`
    the last stage of a model whose requests have a state, `own_sequences` the same if that is not
    on upstreams.
    """

    def __init__(
        self,
        model: str,
        version: str,
        loaded: LoadedVersion,
        loop: asyncio.AbstractEventLoop,
        host: EngineServices,
        regions: Regions,
        statistics: VersionStatistics,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when instances were lost or recovered, or are given up."""
        self.loaded = loaded
        self.host = host
        self.regions = regions
        self.decoupled = loaded.config.model_transaction_policy.decoupled
        self.placements: dict[int, Placement] = {}
        self._names = {"model": model, "version": version}
        self._split = False  # a batch has failed, which was logged
        self._account = regions.admission.model(model)
        self._clock, self._statistics = LoopClock(loop), statistics
        if loaded.cache is not None and statistics.cache is None:
            statistics.cache = CacheCounts(statistics.window is not None)
        if loaded.padding is not None and statistics.padding is None:
            statistics.padding = PaddingCounts()
        batcher = self._batcher(version, self._clock, statistics)
        self.scheduler: Scheduler = batcher
        self.own_sequences: SequenceScheduler | None = None
        limiter = loaded.limiter
        self._gate = None if limiter is None else limiter.gate(loaded.config, batcher.wake)
        if self._gate is not None:
            batcher.limit(self._gate)
        delay = delay_in(DELAY)
        if delay and loaded.config.WhichOneof("scheduling_choice") == "dynamic_batching":
            batcher.delay(lambda instance: batcher.waiting_for(instance) >= delay)
        self.fail_over: FailOver | None = None
        schedulers: Sequence[InstanceScheduler] = [batcher]
        if loaded.backends is not None:
            counts = statistics.backends
            self.fail_over = FailOver(model, loaded.backends, batcher, loop, counts)
            self.scheduler, schedulers = self.fail_over.tiers, list(self.fail_over.tiers)
        elif loaded.sequences is not None:
            self.own_sequences = loaded.sequences.start(
                batcher, self._clock, self._account, statistics.request_failed
            )
            regions.admission.watch_close(self.own_sequences.drain)
            schedulers = [self.own_sequences]
        self._surroundings = [
            Surroundings(
                loaded.given, one, host, loop, changed, statistics.endpoints, loaded.limits,
                statistics.ended_runs, host,
            )
            for one in schedulers
        ]  # fmt: skip
        if self.own_sequences is not None:
            lost = self.own_sequences.lose
            self._surroundings = [replace(one, lost=lost) for one in self._surroundings]
        self._add(loaded.instances)
        for placement in self.placements.values():
            self.scheduler = placement.in_place_of(
                self.scheduler, version, statistics, self._account
            )
        headers = (item.model.traits.forward_headers for item in loaded.instances)
        # Client headers for upstreams; None if no instance is on one.
        self.forwarded_headers = next((each for each in headers if each is not None), None)
        stages = (
            placement.in_sequence(self.scheduler, statistics.request_failed)
            for placement in self.placements.values()
        )
        remote = next(filter(None, stages), None)
        self.sequences: SequenceStage | None = self.own_sequences or remote

    @property
    def instances(self) -> list[PlacedInstance]:
        """The instances, wherever they run; a model's upstreams count as one."""
        return [instance for placement in self.placements.values() for instance in placement]

    @property
    def healthy(self) -> bool:
        """True if accepted requests are executed: not while all its workers are down, all its
        instances are stalled, or no upstream can be reached.
        """
        return any(placement.healthy for placement in self.placements.values())

    @property
    def given_up(self) -> bool:
        """True if no instance is expected back soon."""
        return all(placement.given_up for placement in self.placements.values())

    @property
    def obstacle(self) -> str:
        """The reason why requests are not executed; "" if they are."""
        if self.healthy:
            return ""
        if self.given_up:
            return str(self.waiting_error())
        return "; ".join(dict.fromkeys(each.obstacle for each in self.placements.values()))

    def waiting_error(self) -> ServerError:
        """The error of a request while no instance can run it."""
        source = self.placements[0] if self.fail_over is None else self.fail_over
        return source.waiting_error()

    @property
    def pending(self) -> int:
        """Accepted requests that no instance has started."""
        before = 0 if self.sequences is None else self.sequences.waiting
        return self.scheduler.pending + before

    def memory(self, nbytes: int, begin: int) -> memoryview | None:
        """Implements `Direct.memory`."""
        if len(self.placements) != 1:  # the backend is chosen when the request is complete
            return None
        return next(iter(self.placements.values())).memory(nbytes, begin)

    @property
    def cached_parts(self) -> CachedParts:
        """The parts that its response cache uses."""
        return CachedParts(
            self._clock, self.scheduler.expect, self._account, self.regions.admission.workbench,
            self._statistics, self.forwarded_headers or (),
        )  # fmt: skip

    @property
    def padding_parts(self) -> PaddingParts:
        """The parts that its padding uses."""
        admission, counts = self.regions.admission, self._statistics.padding
        assert counts is not None
        return PaddingParts(self.scheduler.expect, admission, admission.workbench, counts)

    # --- life

    def change(self, change: Change) -> None:
        """Swap in a new configuration and instance set without draining the queue.

        Removed instances finish their batch.
        """
        kept = [item for item in self.loaded.instances if item.name not in change.removed]
        self.loaded = replace(
            self.loaded, origin=change.origin, config=change.config,
            instances=[*kept, *change.instances],
        )  # fmt: skip
        if self._gate is not None:
            self._gate.follow(change.config)
        self._add(change.instances)
        for name in change.removed:
            for placement in self.placements.values():
                placement.remove(name)

    async def settled(self) -> None:
        """Wait until instances that were removed without requests are finalized and gone."""
        await asyncio.gather(*(placement.settled() for placement in self.placements.values()))

    def leave(self, grace: float) -> None:
        """Start draining: abandoned executions are ended after `grace` seconds, if possible."""
        for placement in self.placements.values():
            placement.leave(grace)
        if self.own_sequences is not None:
            self.own_sequences.drain()

    async def finish(self) -> None:
        """Wait until no accepted request is left; until then others are accepted."""
        while True:
            drained = asyncio.Event()
            self.scheduler.when_drained(drained.set)
            await drained.wait()
            if not self.scheduler.busy:  # as since then, unless a request has come
                return

    async def close(self) -> None:
        """Free the model, which has finished its requests and gets no others."""
        for placement in self.placements.values():
            placement.close()
        if self.fail_over is not None:
            self.fail_over.stop_search()
        if self.own_sequences is not None:
            self.regions.admission.unwatch_close(self.own_sequences.drain)
            self.own_sequences.close()
        self.scheduler.close()
        if self._gate is not None:
            self._gate.close()
        self._account.leave()
        if self.loaded.cache is not None:
            self.loaded.cache.close()
        await asyncio.gather(*(placement.closed() for placement in self.placements.values()))
        self.host.close()
        # The scheduler refers to this object, which so outlives the version: not its files.
        self.loaded = replace(self.loaded, instances=(), lease=None)

    def _batcher(self, version: str, clock: Clock, statistics: VersionStatistics) -> Batcher:
        loaded = self.loaded
        traits = [instance.model.traits for instance in loaded.instances]
        alike = next((t.alike for t in traits if t.alike is not None), None)
        deaths = (t.quarantine_deaths for t in traits if t.quarantine_deaths is not None)
        most = next(deaths, None)
        quarantine = None if most is None else Quarantine(loaded.given.model, most)
        # Requests of sequences are counted where they wait: those that the batcher has, too.
        load = self._account if loaded.sequences is None else ModelLoad()
        return Batcher(
            loaded.given, version, loaded.scheduling, clock, statistics, self._log_failure,
            quarantine, load, alike,
        )  # fmt: skip

    def _add(self, loaded: Iterable[LoadedInstance]) -> None:
        """Add loaded instances to the scheduler."""
        for item in loaded:
            if item.rank not in self.placements:
                surroundings = self._surroundings[item.rank]
                self.placements[item.rank] = item.model.placement(item.name, surroundings)
            self.placements[item.rank].add(item.name, item.model, item.kind, item.place)

    def _log_failure(self, calls: Sequence[Call], error: Exception) -> None:
        names = self._names
        if len(calls) == 1 and isinstance(error, ServerError):
            log.error("%s", error, extra=names | {"request_id": calls[0].id})
        elif len(calls) == 1:
            log.error(
                "model %(model)s version %(version)s failed to execute a request", names,
                exc_info=error, extra=names | {"request_id": calls[0].id},
            )  # fmt: skip
        elif not self._split:
            # Once: such a model answers, but it runs every request several times.
            self._split = True
            log.warning(
                "model %s version %s failed to execute a batch of %d requests, which are run again"
                " in halves: %s", names["model"], names["version"], len(calls), error, extra=names,
            )  # fmt: skip
