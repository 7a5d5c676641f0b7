"""One version of one model: its state, and the scheduler that serves it."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidRequest, ModelNotReady, ServerError
from headrace.core.requests import InferRequest, InferResponse, Sink, Ticket
from headrace.core.signature import Signature
from headrace.engine.clock import LoopClock
from headrace.engine.future_sink import FutureSink
from headrace.engine.loading import LoadedInstance, LoadedVersion
from headrace.engine.model_host import ModelHost
from headrace.engine.regions import Regions
from headrace.engine.response_counting import ResponseCounting
from headrace.engine.special_requests import SpecialRequests, with_id
from headrace.engine.updating import Change, Serving
from headrace.execution.choice import InstanceKind
from headrace.execution.local import LocalInstance
from headrace.execution.process import WorkerInstance, waiting_error
from headrace.execution.python_backend import LoadedWorker
from headrace.execution.remote.backend import RemoteModel
from headrace.execution.supervision import WorkerSet
from headrace.observability.endpoints import EndpointSeries
from headrace.observability.statistics import VersionStatistics
from headrace.observability.workers import WorkerSeries
from headrace.repository.origin import Origin
from headrace.repository.reading import first_response_bounds
from headrace.repository.uploads import Upload
from headrace.scheduling.batch import Pending
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.quarantine import Quarantine
from headrace.wire.pb.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from headrace.execution.remote.pool import RemotePool

log = logging.getLogger(__name__)


class State(StrEnum):
    """Where a version is in its life, under the protocol's names."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ModelVersion:
    """A version from when it is known. Owned by the event-loop thread.

    It is loaded once, from its `origin`: one that replaces it is another object, which may go on
    with its counters. Instances may be added and removed meanwhile.

    Invariant: `batcher`, `config` and `signature` are there exactly while the state is READY or
    UNLOADING.
    """

    def __init__(
        self, model: str, number: int, statistics: VersionStatistics | None = None
    ) -> None:
        self.model = model
        self.number = number
        self.name = str(number)
        self.state = State.LOADING
        self.reason = ""
        self.statistics = statistics or VersionStatistics()
        self.load_seconds = 0.0
        self.origin: Origin | None = None
        self.added = False  # it came while other versions served
        self.decoupled = False
        self._split = False
        self._batcher: Batcher | None = None
        self._submit: Callable[[InferRequest, Sink, int], Ticket] | None = None
        self._config: ModelConfig | None = None
        self._signature: Signature | None = None
        self._host: ModelHost | None = None
        self._special: SpecialRequests
        self.upload: Upload | None = None  # its files, where a request has brought them
        self._local: list[LocalInstance] = []
        self._removed: list[LocalInstance] = []
        self._workers: WorkerSet | None = None
        self._remote: RemotePool | None = None  # the servers that run it, if others do
        self._memory: dict[str, int] = {}
        self._leaves = False  # `unload` was called
        self._given_up = False  # no worker comes back for now

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.state is State.READY

    @property
    def healthy(self) -> bool:
        """Whether requests that it takes are executed: not while all its workers are down, or
        none of its servers can be reached.
        """
        if not self.ready or (self._remote is not None and not self._remote.healthy):
            return False
        return not self._workers or any(w.willing for w in self._workers)

    @property
    def instances(self) -> "list[LocalInstance | WorkerInstance | RemotePool]":
        """Its instances, wherever they run; the servers of one that runs elsewhere are one."""
        remote = () if self._remote is None else (self._remote,)
        return [*self._local, *(self._workers or ()), *remote]

    @property
    def workers(self) -> WorkerSeries | None:
        """Its workers as a scrape sees them; None if it has none."""
        return self._workers.series() if self._workers else None

    @property
    def endpoints(self) -> Sequence[EndpointSeries]:
        """Its servers as a scrape sees them, if others run it."""
        return () if self._remote is None else self._remote.series()

    @property
    def memory_bytes(self) -> int:
        """Memory that its instances take, as it was last looked at; 0 if that is not known.

        See `headrace.observability.memory` for how far that is right.
        """
        down = {worker.name for worker in self._workers or () if not worker.running}
        return sum(size for name, size in self._memory.items() if name not in down)

    def worker_pids(self) -> dict[str, int]:
        """The process of each instance that has one which runs."""
        return {w.name: w.pid for w in self._workers or () if w.running}

    def note_memory(self, found: Mapping[str, int]) -> None:
        """Know the bytes of instances from now on, of those that are still there."""
        self._memory |= {name: size for name, size in found.items() if name in self._memory}

    def waits_for(self, version: object) -> bool:
        """Whether a request may have to wait until `version` has done what it does: if it is this
        one, with one instance, which runs one batch at a time.
        """
        if version is not self:
            return False
        instances = self.instances
        return len(instances) == 1 and getattr(instances[0], "concurrency", 0) == 0

    @property
    def config(self) -> ModelConfig:
        """The completed configuration; raises `ModelNotReady`."""
        if self._config is None:
            raise self.not_ready()
        return self._config

    @property
    def signature(self) -> Signature:
        """The declared inputs and outputs; raises `ModelNotReady`."""
        if self._signature is None:
            raise self.not_ready()
        return self._signature

    @property
    def busy(self) -> bool:
        """Whether it has requests to finish."""
        return self._batcher is not None and self._batcher.busy

    @property
    def pending(self) -> int:
        """Accepted requests that no instance has started."""
        return self._batcher.waiting if self._batcher else 0

    def submit(self, request: InferRequest, sink: Sink) -> Ticket:
        """Check and queue a request; raises `ServerError`."""
        if self._submit is None or self._signature is None:
            raise self.not_ready()
        if self._given_up:
            raise self._waiting_error(self._signature)
        if request.classes is not None:
            return self._special.submit(request, sink)
        try:
            rows = self._signature.check(request)
        except InvalidRequest as error:
            raise with_id(request, error) from None
        return self._submit(request, sink, rows)

    def _submit_checked(self, request: InferRequest, sink: Sink, rows: int) -> Ticket:
        """Queue a request that has been checked, perhaps a while ago; raises `ServerError`."""
        if self._submit is None or self._signature is None:
            raise self.not_ready()
        if self._given_up:
            raise self._waiting_error(self._signature)
        return self._submit(request, sink, rows)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Submit a request and wait for its response; cancelling the wait cancels the request."""
        sink = FutureSink(asyncio.get_running_loop().create_future())
        ticket = self.submit(request, sink)
        try:
            return await sink.future
        except asyncio.CancelledError:
            ticket.cancel()
            raise

    def serve(
        self,
        loaded: LoadedVersion,
        loop: asyncio.AbstractEventLoop,
        host: ModelHost,
        regions: Regions,
    ) -> None:
        """Take requests from now on. `host` is what the model reaches of the server.

        `regions` are where requests have tensors in shared memory.
        """
        self._host = host
        self.upload = loaded.upload
        batcher = Batcher(
            loaded.signature,
            self.name,
            loaded.scheduling,
            LoopClock(loop),
            self.statistics,
            self._report,
            _quarantine(loaded),
        )
        workers = WorkerSet(loaded.signature, batcher, host, loop, self._on_workers)
        self._add(loaded.instances, batcher, workers, loop)
        self._workers = workers
        self._batcher = batcher
        self._config = loaded.config
        self._special = SpecialRequests(
            loaded.signature, loaded.labels, regions, batcher, self._submit_checked
        )
        self._signature = loaded.signature
        self.decoupled = loaded.config.model_transaction_policy.decoupled
        self._submit = batcher.submit
        if self.decoupled:
            bounds = first_response_bounds(loaded.config)
            self._submit = ResponseCounting(batcher, self.statistics.responses, bounds).submit
        self.load_seconds = loaded.seconds
        self.origin = loaded.origin
        self.state = State.READY

    @property
    def serving(self) -> Serving | None:
        """What it is while it serves well; None if it does not."""
        if not self.healthy or self.origin is None or self._config is None:
            return None
        names = tuple(instance.name for instance in self.instances)
        inline = all(instance.kind is InstanceKind.INLINE for instance in self.instances)
        return Serving(self.origin, self._config, names, inline)

    def change(self, change: Change, loop: asyncio.AbstractEventLoop) -> None:
        """Be that from now on, with its instances; those that go finish what they have.

        Only while it is ready.
        """
        assert self._batcher is not None
        assert self._workers is not None
        self.origin, self._config, self.reason = change.origin, change.config, ""
        self._add(change.instances, self._batcher, self._workers, loop)
        self._removed = [instance for instance in self._removed if not instance.released]
        for name in change.removed:
            self._workers.remove(name)
            self._memory.pop(name, None)
            if instance := next((i for i in self._local if i.name == name), None):
                self._local.remove(instance)
                self._removed.append(instance)
                self._batcher.remove_instance(instance, instance.close)

    def _add(
        self,
        instances: Iterable[LoadedInstance],
        batcher: Batcher,
        workers: WorkerSet,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Put loaded instances behind the scheduler."""
        for item in instances:
            self._memory[item.name] = item.memory
            if isinstance(item.model, LoadedWorker):
                workers.add(item.name, item.model)
                continue
            if isinstance(item.model, RemoteModel):
                self._remote = item.model.pool(item.name, batcher, loop, self._on_remote)
                continue
            instance = LocalInstance(item.name, item.model, item.kind, loop)
            self._local.append(instance)
            batcher.add_instance(instance)

    def leave(self) -> None:
        """Be found no more from now on; `unload` does the rest."""
        self.state = State.UNLOADING
        self.reason = ""

    def fail(self, reason: str) -> None:
        """Loading did not work out."""
        self.state = State.UNAVAILABLE
        self.reason = reason

    async def unload(self) -> None:
        """Be UNLOADING, finish the requests that were accepted, and free the model."""
        if self._batcher is None or self._leaves:
            return
        self._leaves = True
        self.state = State.UNLOADING
        drained = asyncio.Event()
        self._batcher.when_drained(drained.set)
        await drained.wait()
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
        self._batcher.close()
        await asyncio.gather(*(i.closed() for i in (*self._local, *self._removed)))
        self._local.clear()
        self._removed.clear()
        if workers is not None:
            await workers.closed()
        if self._remote is not None:
            await self._remote.closed()
            self._remote = None
        self._memory.clear()
        if self._host is not None:
            self._host.close()
        self._batcher = self._submit = self._config = self._signature = self.upload = None
        self.state = State.UNAVAILABLE
        self.reason = "unloaded"

    def _on_workers(self) -> None:
        """A worker has ended, or runs again."""
        self._given_up = bool(self._workers) and all(w.given_up for w in self._workers or ())
        if self._given_up and self._batcher is not None and self._signature is not None:
            self._batcher.fail_waiting(waiting_error(self._signature))

    def _on_remote(self) -> None:
        """A server can be reached again, or nothing waits for one any more."""
        self._given_up = self._remote is not None and self._remote.given_up

    def _waiting_error(self, signature: Signature) -> ServerError:
        """What a request is told that nothing can run."""
        remote = self._remote
        return waiting_error(signature) if remote is None else remote.waiting_error()

    def not_ready(self) -> ModelNotReady:
        """The error for a request that names this version while it does not serve."""
        return ModelNotReady(
            f"Request for unknown model: '{self.model}' version {self.name} is not at ready state"
            f" (it is {self.state})"
        )

    def _report(self, pendings: Sequence[Pending], error: Exception) -> None:
        fields = {"model": self.model, "version": self.name}
        if len(pendings) == 1 and isinstance(error, ServerError):
            log.error("%s", error, extra=fields | {"request_id": pendings[0].request.id})
        elif len(pendings) == 1:
            log.error(
                "model %(model)s version %(version)s failed to execute a request", fields,
                exc_info=error, extra=fields | {"request_id": pendings[0].request.id},
            )  # fmt: skip
        elif not self._split:
            # Once: such a model answers, but it runs every request several times.
            self._split = True
            log.warning(
                "model %s version %s failed to execute a batch of %d requests, which are run again"
                " in halves: %s", self.model, self.name, len(pendings), error, extra=fields,
            )  # fmt: skip


def _quarantine(loaded: LoadedVersion) -> Quarantine | None:
    """The quarantine as a Python model's configuration has it."""
    for item in loaded.instances:
        if isinstance(item.model, LoadedWorker):
            return Quarantine(loaded.signature.model, item.model.options.quarantine_deaths)
    return None
