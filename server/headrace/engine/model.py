"""Models by name, their versions, and the stages in front of each version's queue.

Owned by the event-loop thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from sys import maxsize

from headrace.core.call import Call, Submit
from headrace.core.errors import InvalidRequest, ModelNotReady, NotFound, ServerError, Unavailable
from headrace.core.limits import ABANDONED_SECS, ModelLoad
from headrace.core.signature import Signature
from headrace.engine.admission import Admission, ModelAccount
from headrace.engine.chain import check, classify, count_responses, divide, tell_servers
from headrace.engine.doors import Direct, Router
from headrace.engine.fail_over import FailOver
from headrace.engine.loading import Change, GpuMemory, LoadedInstance, LoadedVersion
from headrace.engine.model_services import EngineServices
from headrace.engine.shared_memory import Regions, share
from headrace.observability.statistics import (
    BackendSeries,
    EndpointSeries,
    Sourced,
    VersionStatistics,
    WorkerSeries,
)
from headrace.placement.placement import PlacedInstance, Placement, Scheduler, Surroundings
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.protocol.pb.traffic_pb2 import ModelTrafficResponse
from headrace.protocol.plain_json import PlainJson
from headrace.protocol.v2_protobuf import PlainWriter
from headrace.repository.layout import ModelSource
from headrace.repository.reading import first_response_bounds
from headrace.repository.store import Lease
from headrace.scheduling.batcher import Batcher, LoopClock
from headrace.scheduling.quarantine import Quarantine
from headrace.scheduling.sequences import SequenceQueue

log = logging.getLogger(__name__)

NO_TRAFFIC = "this server has no rules for the traffic between versions"
_LONGEST_VERSION = len(str(2**63))


def make_batcher(
    loaded: LoadedVersion,
    version: str,
    loop: asyncio.AbstractEventLoop,
    statistics: VersionStatistics,
    report: Callable[[Sequence[Call], Exception], None],
    load: ModelLoad,
) -> Batcher:
    """A scheduler without instances; `report` receives failed requests.

    `load` counts the requests of all versions of the model.
    """
    traits = [instance.model.traits for instance in loaded.instances]
    alike = next((t.alike for t in traits if t.alike is not None), None)
    deaths = next((t.quarantine_deaths for t in traits if t.quarantine_deaths is not None), None)
    quarantine = None if deaths is None else Quarantine(loaded.signature.model, deaths)
    return Batcher(
        loaded.signature, version, loaded.scheduling, LoopClock(loop), statistics, report,
        quarantine, load, alike,
    )  # fmt: skip


class State(StrEnum):
    """The state of a version, under the protocol's names."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class _Service:
    """State of a version that is READY or UNLOADING, `plain` codecs only if calls can be plain.

    `fail_over` is for several backends, `sequences` is before the scheduler. `surroundings` are
    those of placements, by the rank of their backends.
    """

    loaded: LoadedVersion
    batcher: Batcher
    host: EngineServices
    regions: Regions
    account: ModelAccount
    surroundings: Sequence[Surroundings]
    fail_over: FailOver | None
    plain: tuple[PlainJson, PlainWriter] | None
    sequences: SequenceQueue | None = None


class ModelVersion:
    """A version, known from before its load. Owned by the event-loop thread.

    It is loaded once, from its `origin`: a replacement is another object, which may take over its
    counters. Instances may be added and removed while it serves.

    Invariant: `_service` is set exactly while the state is READY or UNLOADING.
    """

    def __init__(
        self, model: str, number: int, statistics: VersionStatistics | None = None
    ) -> None:
        self.model = model
        self.number = number
        self.name = str(number)
        self.direct: Direct | None = None
        self._given_up = False  # no instance is expected back soon
        self.reason = ""
        self.statistics = statistics or VersionStatistics()
        self.added = False  # added while other versions served
        self.decoupled = False
        self._split = False
        self._service: _Service | None = None
        self._placements: dict[int, Placement] = {}  # by rank of backend
        self.forwarded_headers: Sequence[str] | None = None  # client headers for upstreams
        self._measured: dict[str, int] = {}  # bytes of instances, where measured after the load
        self._leaves = False  # `unload` was called
        self.submit: Submit  # checks and queues a call; raises `ServerError`
        self._queue: Submit  # queues a checked call
        self.state = State.LOADING

    @property
    def state(self) -> State:
        """The state in the index; `ready` tells if the version takes requests."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self.ready = state is State.READY
        self.compose()

    @property
    def healthy(self) -> bool:
        """True if accepted requests are executed: not while all its workers are down, all its
        instances are stalled, or no upstream can be reached.
        """
        return self.ready and any(instances.healthy for instances in self._each)

    @property
    def obstacle(self) -> str:
        """The reason why requests are not executed although it is READY; "" if they are."""
        if not self.ready or self.healthy:
            return ""
        if self._given_up:
            return str(self._waiting_error())
        return "; ".join(dict.fromkeys(instances.obstacle for instances in self._each))

    @property
    def detour(self) -> str:
        """The backend in use instead of a preferred one; "" if there is none."""
        return "" if self._fail_over is None else self._fail_over.detour

    @property
    def lease(self) -> Lease | None:
        """The lease on the directory of the version, as long as it is loaded."""
        return None if self._service is None else self._service.loaded.lease

    @property
    def _fail_over(self) -> FailOver | None:
        return None if self._service is None else self._service.fail_over

    @property
    def instances(self) -> list[PlacedInstance]:
        """The instances, wherever they run; a model's upstreams count as one."""
        return [instance for instances in self._each for instance in instances]

    @property
    def workers(self) -> WorkerSeries | None:
        """The workers, for a scrape; None if there are none."""
        return next((one.workers for one in self._each if one.workers is not None), None)

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """The upstreams, for a scrape, if there are any."""
        return [endpoint for instances in self._each for endpoint in instances.endpoints]

    @property
    def backends(self) -> Sequence[BackendSeries]:
        """The backends, for a scrape, if there are several."""
        return () if self._fail_over is None else self._fail_over.series()

    @property
    def stalled(self) -> list[PlacedInstance]:
        """The instances whose batch makes no progress."""
        return [instance for instances in self._each for instance in instances.stalled]

    @property
    def memory_bytes(self) -> int:
        """Memory of the instances at the last measurement; 0 if unknown.

        See `headrace.observability.machine` for its accuracy.
        """
        pids = self._pids
        return sum(
            self._measured.get(item.name, item.memory)
            for item in self._items
            if pids.get(item.name) != 0
        )

    @property
    def gpu_memory(self) -> list[GpuMemory]:
        """GPU memory taken by the instances when they were loaded, by GPU."""
        found: dict[int, GpuMemory] = {}
        for item in (item.gpu for item in self._items if item.gpu is not None):
            before = found[item.device].nbytes if item.device in found else 0
            found[item.device] = GpuMemory(item.device, item.uuid, before + item.nbytes)
        return [found[device] for device in sorted(found) if found[device].nbytes]

    @property
    def load_seconds(self) -> float:
        """The duration of the load; 0 before it."""
        return 0.0 if self._service is None else self._service.loaded.seconds

    @property
    def _items(self) -> Sequence[LoadedInstance]:
        return () if self._service is None else self._service.loaded.instances

    def worker_pids(self) -> dict[str, int]:
        """The process ids of instances with a running worker."""
        return {name: pid for name, pid in self._pids.items() if pid}

    @property
    def _pids(self) -> dict[str, int]:
        return {name: pid for one in self._each for name, pid in one.pids.items()}

    def note_memory(self, found: Mapping[str, int]) -> None:
        """Store the measured bytes of instances."""
        self._measured |= found

    def waits_for(self, version: object) -> bool:
        """True if a request may have to wait for `version` to finish: if it is this one, with a
        single instance, which runs one batch at a time.
        """
        if version is not self:
            return False
        instances = self.instances
        return len(instances) == 1 and instances[0].concurrency == 0

    @property
    def config(self) -> ModelConfig:
        """The completed configuration; raises `ModelNotReady`."""
        return self._loaded.config

    @property
    def signature(self) -> Signature:
        """The declared inputs and outputs; raises `ModelNotReady`."""
        return self._loaded.signature

    @property
    def _loaded(self) -> LoadedVersion:
        if self._service is None:
            raise self.not_ready()
        return self._service.loaded

    @property
    def busy(self) -> bool:
        """True if requests are unfinished."""
        return self._service is not None and self._service.batcher.busy

    @property
    def pending(self) -> int:
        """Accepted requests that no instance has started."""
        if (service := self._service) is None:
            return 0
        before = 0 if service.sequences is None else service.sequences.waiting
        return service.batcher.waiting + before

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
        account = regions.admission.model(self.model)
        batcher = make_batcher(loaded, self.name, loop, self.statistics, self._report, account)
        schedulers: Sequence[Scheduler] = [batcher]
        fail_over = None
        if loaded.backends is not None:
            counts = self.statistics.backends
            fail_over = FailOver(self.model, loaded.backends, batcher, loop, counts)
            schedulers = list(fail_over.tiers)
        surroundings = [
            Surroundings(
                loaded.signature, one, host, loop, self._on_instances, self.statistics.endpoints,
                loaded.limits, self.statistics.ended_runs, host,
            )
            for one in schedulers
        ]  # fmt: skip
        self.decoupled = loaded.config.model_transaction_policy.decoupled
        told = loaded.signature, self.model, self.name
        plain = None if self.decoupled else (PlainJson(*told), PlainWriter(*told))
        service = _Service(loaded, batcher, host, regions, account, surroundings, fail_over, plain)
        self._add(service, loaded.instances)
        headers = (item.model.traits.forward_headers for item in loaded.instances)
        self.forwarded_headers = next((each for each in headers if each is not None), None)
        given = batcher.expect, self.statistics.request_failed
        stages = (placement.in_sequence(*given) for placement in self._each)
        service.sequences = next(filter(None, stages), None)
        self._service = service
        self.state = State.READY

    @property
    def serving(self) -> LoadedVersion | None:
        """The loaded version, if it is healthy and all its backends are loaded; otherwise None."""
        if self._fail_over is not None and self._fail_over.incomplete:
            return None
        return self._loaded if self.healthy else None

    def change(self, change: Change) -> None:
        """Swap in a new configuration and instance set without draining the queue.

        Only while it is ready. Removed instances finish their batch.
        """
        service = self._service
        assert service is not None, "a change of what does not serve. This is a bug."
        kept = [item for item in self._items if item.name not in change.removed]
        service.loaded = replace(
            service.loaded, origin=change.origin, config=change.config,
            instances=[*kept, *change.instances],
        )  # fmt: skip
        self.reason = ""
        self._add(service, change.instances)
        for name in change.removed:
            self._measured.pop(name, None)
            for instances in self._each:
                instances.remove(name)

    async def settled(self) -> None:
        """Wait until instances that were removed without requests are finalized and gone."""
        await asyncio.gather(*(instances.settled() for instances in self._each))

    def _add(self, service: _Service, loaded: Iterable[LoadedInstance]) -> None:
        """Add loaded instances to the scheduler."""
        for item in loaded:
            if item.rank not in self._placements:
                surroundings = service.surroundings[item.rank]
                self._placements[item.rank] = item.model.placement(item.name, surroundings)
            self._placements[item.rank].add(item.name, item.model, item.kind, item.place)

    def leave(self) -> None:
        """Refuse requests from now on; `unload` frees the model."""
        self.state = State.UNLOADING
        self.reason = ""
        if self._fail_over is not None:
            self._fail_over.stop_search()

    def fail(self, reason: str) -> None:
        """Note that the load failed."""
        self.state = State.UNAVAILABLE
        self.reason = reason

    async def unload(self, grace: float = ABANDONED_SECS) -> None:
        """Finish accepted requests, and free the model.

        Abandoned executions are ended after `grace` seconds, if possible.
        """
        for instances in self._each:
            instances.leave(grace)
        if (service := self._service) is None or self._leaves:
            return
        self._leaves = True
        self.state = State.UNLOADING
        drained = asyncio.Event()
        service.batcher.when_drained(drained.set)
        await drained.wait()
        for instances in self._each:
            instances.close()
        if service.fail_over is not None:
            service.fail_over.close()
        service.batcher.close()
        service.account.leave()
        await asyncio.gather(*(instances.closed() for instances in self._each))
        self._placements = {}
        service.host.close()
        self._service = None
        self.state = State.UNAVAILABLE
        self.reason = "unloaded"

    @property
    def _each(self) -> Iterable[Placement]:
        return self._placements.values()

    def _on_instances(self) -> None:
        """Recompose the chain: instances were lost or recovered, or none is expected back."""
        self._given_up = all(instances.given_up for instances in self._each)
        self.compose()

    def compose(self) -> None:
        """Compose the stages that a call passes before the queue, the last one first.

        `submit` takes calls as decoded, `_queue` those that have been checked. A plain version only
        has the check stage, and doors that have checked a call submit to its batcher: `direct`.
        """
        self.direct = None
        self.submit = self._queue = self._refuse
        if (service := self._service) is None or self._given_up:
            return
        batcher, loaded = service.batcher, service.loaded
        signature, bench = loaded.signature, service.regions.admission.workbench
        queue: Submit = batcher.submit
        if service.fail_over is not None:
            queue = service.fail_over.submit
        if self.decoupled:
            bounds = first_response_bounds(loaded.config)
            queue = count_responses(self.statistics.responses, queue, bounds)
        if service.sequences is not None:
            queue = service.sequences.before(queue)
        if self.forwarded_headers is not None:
            queue = tell_servers(self.forwarded_headers, queue)
        direct = queue
        if signature.max_batch_size:
            check_answer = service.regions.admission.check_answer
            queue = divide(signature.max_batch_size, queue, batcher.expect, bench, check_answer)
        for stage in loaded.stages:
            direct = queue = stage(queue)
        self._queue = queue
        special = classify(loaded.labels, signature.batches, bench, self._queue_checked)
        special = share(service.regions, batcher.expect, special)
        submit = self.submit = check(signature, queue, special)
        if service.host.tracing is not None:
            self.submit = service.host.tracing.traced(self.model, self.name, submit)
        if self.ready and service.plain is not None and self.submit is submit:
            most = signature.max_batch_size or maxsize
            self.direct = Direct(*service.plain, {}, most, direct, self._memory)

    def _memory(self, nbytes: int, begin: int) -> memoryview | None:
        """Implements `Direct.memory`."""
        if len(self._placements) != 1:  # the backend is chosen when the request is complete
            return None
        return next(iter(self._each)).memory(nbytes, begin)

    def _queue_checked(self, call: Call) -> None:
        """Queue a call that was checked earlier; raises `ServerError`."""
        self._queue(call)

    def _refuse(self, call: Call) -> None:
        raise self.not_ready() if self._service is None else self._waiting_error()

    def _waiting_error(self) -> ServerError:
        """The error of a request while no instance can run it."""
        source = self._placements[0] if self._fail_over is None else self._fail_over
        return source.waiting_error()

    def search(self, load: Callable[[], Awaitable[str]]) -> None:
        """Search for absent backends, and call `load` once one is available."""
        if self._fail_over is not None:
            self.reason = self._fail_over.reason
            self._fail_over.search(load)

    def not_ready(self) -> ModelNotReady:
        """The error for a request that names this version while it is not ready."""
        return ModelNotReady(
            f"Request for unknown model: '{self.model}' version {self.name} is not at ready state"
            f" (it is {self.state})",
            retry_after=int(self.state is State.LOADING),
        )

    def _report(self, calls: Sequence[Call], error: Exception) -> None:
        fields = {"model": self.model, "version": self.name}
        if len(calls) == 1 and isinstance(error, ServerError):
            log.error("%s", error, extra=fields | {"request_id": calls[0].id})
        elif len(calls) == 1:
            log.error(
                "model %(model)s version %(version)s failed to execute a request", fields,
                exc_info=error, extra=fields | {"request_id": calls[0].id},
            )  # fmt: skip
        elif not self._split:
            # Once: such a model answers, but it runs every request several times.
            self._split = True
            log.warning(
                "model %s version %s failed to execute a batch of %d requests, which are run again"
                " in halves: %s", self.model, self.name, len(calls), error, extra=fields,
            )  # fmt: skip


class Model:
    """All versions of one model, by number; `reason` is set if there are none.

    `source` is the source of the versions. `loading` is set during a load, `wanted` is the source
    of the next load. `unloaded` is true if the last command was an unload, `unreadable` if the last
    load failed before any version was examined, `added` if the model was added to a running server.
    `loads` and `failed_loads` count.
    """

    def __init__(
        self,
        source: ModelSource,
        statistics: Callable[[], VersionStatistics] = VersionStatistics,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        """`statistics` makes the counters of a version; `announce` is called when `loaded` may
        have changed.
        """
        self.name = source.name
        self.source = source
        self._statistics = statistics
        self.versions: dict[int, ModelVersion] = {}
        self.reason = ""
        self.wanted: ModelSource | None = None
        self.loading: asyncio.Task[str] | None = None
        self.unloaded = False
        self.unreadable = False
        self.added = False
        self.loads = 0
        self.failed_loads = 0
        self._descending: list[ModelVersion] = []
        self._announce = announce
        announce()

    @property
    def loaded(self) -> bool:
        """True if everything that should serve was loaded; an added model counts from its first
        success.
        """
        if self.unloaded or (self.added and not self.loads):
            return True  # even while unloaded versions drain
        versions = [v for v in self.versions.values() if v.ready or not v.added]
        return bool(versions) and all(version.ready for version in versions)

    @property
    def coming(self) -> bool:
        """True during the first load of a model that was added to a running server."""
        return self.added and self.loading is not None and not (self.loads or self.failed_loads)

    def want(self, source: ModelSource) -> None:
        """Set the source of the next load."""
        self.wanted = source
        self.unloaded = False
        self._announce()

    def expect(self, numbers: Iterable[int]) -> None:
        """Add versions that are being loaded, unless others serve under their numbers."""
        serves = self.newest() is not None
        for number in numbers:
            known = self.versions.get(number)
            if known is None or not known.ready:
                statistics = known.statistics if known else self._statistics()
                version = ModelVersion(self.name, number, statistics)
                version.added = known.added if known is not None else serves
                self.put(version)

    def put(self, version: ModelVersion) -> None:
        """Store a version under its number, replacing any other."""
        self.versions[version.number] = version
        self._descending = [self.versions[n] for n in sorted(self.versions, reverse=True)]
        self._announce()

    def remove(self, number: int) -> ModelVersion:
        """Remove a version and return it."""
        version = self.versions.pop(number)
        self._descending.remove(version)
        self._announce()
        return version

    def refuse(self, number: int, reason: str) -> None:
        """Note that a version failed to load: the one that serves stays, with the reason."""
        version = self.versions[number]
        if version.ready:
            version.reason = f"a change could not be loaded: {reason}"
        else:
            version.fail(reason)
        self._announce()

    def find(self, version: str) -> ModelVersion:
        """The version of that number, if it takes requests; "" for the highest one that does.

        Raises `NotFound`, `ModelNotReady` while it is being loaded, or `InvalidRequest` for an
        invalid number.
        """
        if not version:
            newest = self.newest()
            if newest is None:
                self._refuse_while_loading()
                raise NotFound(
                    f"Request for unknown model: '{self.name}' has no available versions"
                    f"{self.states}"
                )
            return newest
        found = self.versions.get(parse_version(version))
        if found is None:
            if not self.versions:  # the set of versions is not known yet
                self._refuse_while_loading()
            raise NotFound(
                f"Request for unknown model: '{self.name}' version {version} is not found"
            )
        if not found.ready:
            raise found.not_ready()
        return found

    @property
    def awaited(self) -> bool:
        """True if versions of it are being loaded."""
        return self.loading is not None and not self.unloaded

    def _refuse_while_loading(self) -> None:
        """Raise `ModelNotReady` while versions are being loaded."""
        if self.awaited:
            raise ModelNotReady(
                f"model '{self.name}' is not ready: it is being loaded{self.states}", retry_after=1
            )

    def newest(self) -> ModelVersion | None:
        """The highest version that takes requests."""
        for version in self._descending:
            if version.ready:
                return version
        return None

    def ready_versions(self) -> list[ModelVersion]:
        """Versions that take requests, ascending."""
        return [self.versions[n] for n in sorted(self.versions) if self.versions[n].ready]

    def why(self, version: str) -> str:
        """The reason why a version, or for "" any, is not loaded, for the index; "" if unknown."""
        reasons = {v.reason for v in self.versions.values() if v.name == version or not version}
        return "; ".join(sorted(filter(None, reasons))) or self.reason

    @property
    def states(self) -> str:
        """The state of each version, in brackets; "" without versions."""
        states = ", ".join(f"version {v.name} is {v.state}" for v in self.versions.values())
        return f" ({states})" if states else ""


def parse_version(text: str) -> int:
    """A version as a number; raises `InvalidRequest`."""
    # Length first: Python refuses to convert thousands of digits, with an error of its own.
    digits = text.isascii() and text.isdigit() and len(text) <= _LONGEST_VERSION
    if not digits or int(text) >= 2**63:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:40]}',"
            " version should be an integral value > 0"
        )
    return int(text)


class Traffic:
    """Rules for requests without a version: by default, the highest ready version serves.

    One for all models; see `headrace.plugins.traffic` for the plugin.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        changed: Callable[[], None],
        allowed: bool = False,
    ) -> None:
        """`changed` is called when requests for a model may be routed differently; `allowed` tells
        if clients may change the rules.
        """
        self.models = models
        self.admission = admission
        self.changed = changed
        self.allowed = allowed

    @property
    def headers(self) -> Mapping[str, str]:
        """The header that the rules evaluate, by model."""
        return {}

    def follow(self, model: Model) -> None:
        """Update to a model's current versions and configuration."""

    def router(self, model: Model) -> Router | None:
        """The target of requests without a version; None for the highest version."""
        return None

    def reason(self, name: str, version: int) -> str:
        """The reason why a version has lost its requests; "" if it has not."""
        return ""

    def metrics(self) -> Iterable[Sourced]:
        """Metric families of the traffic."""
        return ()

    def close(self) -> None:
        """Stop deciding."""

    # Client operations; these raise `Unavailable` without a plugin.

    def document(self, name: str) -> ModelTrafficResponse:
        """The rules of a model, and their effects; raises `NotFound`."""
        raise Unavailable(NO_TRAFFIC)

    def set(self, name: str, document: object) -> None:
        """Replace a model's rules from a JSON document; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def reset(self, name: str) -> None:
        """Restore the rules of a model's configuration; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def promote(self, name: str, version: str, reason: str = "") -> None:
        """Give a version all requests; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)

    def roll_back(self, name: str, version: str, reason: str = "") -> None:
        """Give a version's requests to the baseline; raises `ServerError`."""
        raise Unavailable(NO_TRAFFIC)
