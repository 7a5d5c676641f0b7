"""The engine: the interface for the doors.

It owns the models by name, their versions and states, and admission. All methods run on the
event-loop thread; how models are loaded and replaced is in `headrace.engine.lifecycle`.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from headrace.core.errors import InvalidRequest, NotFound, Unavailable
from headrace.core.identity import Access
from headrace.core.limits import ABANDONED_SECS
from headrace.core.model_spec import Used
from headrace.engine import documents
from headrace.engine.admission import Admission
from headrace.engine.control import Control, ControlMode, ControlOptions
from headrace.engine.entrance import Readiness, Router
from headrace.engine.host import HostFacts
from headrace.engine.lifecycle import Lifecycle, Loads
from headrace.engine.model import Model, Traffic, parse_version
from headrace.engine.model_services import EngineServices
from headrace.engine.opening import LoadOptions, open_model
from headrace.engine.pieces import Pieces
from headrace.engine.sampling import GpuWatch
from headrace.engine.shared_memory import Regions
from headrace.engine.tracing import Tracing
from headrace.engine.version import ModelVersion, State
from headrace.observability.audit import Audit
from headrace.observability.capture import Capture
from headrace.observability.logs import LogControl, LogSettings
from headrace.observability.model_metrics import ModelMetrics
from headrace.observability.statistics import GpuSeries, VersionStatistics
from headrace.observability.trace_settings import TraceConfig
from headrace.placement.backend import Backend, close_backends, stop_backends
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.repository.catalogue import ambiguous, namespaced
from headrace.repository.layout import ModelSource

log = logging.getLogger(__name__)

HeaderWatcher = Callable[[Mapping[str, Mapping[str, Any]]], object]
MakeTraffic = Callable[[Mapping[str, Model], Admission, Callable[[], None]], Traffic]
MakeLoads = Callable[[Mapping[str, Model], Lifecycle], Loads]

_EMPTY = "there is no model in the model repository; the server's log has more"
_NAMED = 5  # models named in a reason
_NOTHING: tuple[tuple[str, ...], frozenset[Used]] = (), frozenset()
_MAX_FOUND = 1024  # cached results of `find`: a version has many spellings: 1, 01, 001


class ServerReadiness(Readiness):
    """Readiness of the server; if it is `strict`, only while all its models are loaded.

    The server is ready once a load of every model expected at start was attempted, while a door is
    open and shutdown has not begun. If it `needs_models`, it is not ready without any: they were
    not copied or mounted yet, or to another place. What happens to a loaded model (crashed workers,
    unreachable upstreams) affects only that model's readiness: otherwise one model would take a pod
    out of service with all others.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        admission: Admission,
        strict: bool,
        needs_models: bool = False,
    ) -> None:
        super().__init__(lambda: not self.reason)
        self.initialised = False  # true once all models are known
        self._models = models
        self._admission = admission
        self._strict = strict
        self._needs_models = needs_models
        self._started = False
        self._shutting_down = False
        self._reachable = True
        admission.watch_close(self.may_have_changed)

    @property
    def reason(self) -> str:
        """The reason why the server is not ready; "" if it is."""
        if self._shutting_down or self._admission.exiting:
            return "the server is shutting down"
        if not self._reachable:
            return "no front end is open"
        models = self._models.values()
        if not self._started:
            loading = [model.name for model in models if model.loading is not None]
            return f"models are being loaded: {_list(loading)}" if loading else "it is starting"
        if self._needs_models and all(model.coming for model in models):
            coming = [model.name for model in models]
            return f"models are being loaded: {_list(coming)}" if coming else _EMPTY
        if self._strict and (missing := [model.name for model in models if not model.loaded]):
            return f"models are not loaded (--strict-readiness): {_list(missing)}"
        return ""

    def start(self) -> None:
        """Note that a load of every model expected at start was attempted."""
        self._started = True
        self.may_have_changed()

    def begin_shutdown(self) -> None:
        """Report not ready from now on."""
        self._shutting_down = True
        self.may_have_changed()

    def set_reachable(self, reachable: bool) -> None:
        """Set whether any door can be reached."""
        self._reachable = reachable
        self.may_have_changed()


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class WantedHeaders:
    """Headers that front ends must pass on with requests, by purpose and model.

    `routed` requests are divided by traffic rules, `traced` ones may carry a trace context,
    `forwarded` headers go to upstreams, and a sample of requests is `captured` by one. Requests to
    a model that runs others have to carry what these want, too.
    """

    def __init__(self) -> None:
        self._found: dict[str, Mapping[str, Any]] = {}
        self._watchers: list[HeaderWatcher] = []
        # By model: headers that go to its upstreams, and the models that it runs.
        self._own: dict[str, tuple[tuple[str, ...], frozenset[Used]]] = {}

    def watch(self, watcher: HeaderWatcher) -> None:
        """Call `watcher` now, and whenever they change."""
        self._watchers.append(watcher)
        watcher(dict(self._found))

    def put(self, purpose: str, by_model: Mapping[str, Any]) -> None:
        """Set the headers of one purpose."""
        if by_model != self._found.get(purpose, {}):
            self._found[purpose] = by_model
            for watcher in self._watchers:
                watcher(dict(self._found))
            if purpose == "routed":
                self._put_forwarded()

    def of(self, model: str) -> Sequence[str]:
        """The headers of requests to a model that its upstreams, or models that it runs, get."""
        return tuple(self._found.get("forwarded", {}).get(model, ()))

    def forward(self, model: Model) -> None:
        """Update the forwarded headers of a model whose ready versions may have changed.

        Those of a model without a ready version stay: a request may trigger its load, and must
        carry the headers.
        """
        if versions := model.ready_versions():
            names = tuple(sorted({name for v in versions for name in v.chain.forwarded_headers}))
            uses = frozenset(used for v in versions for used in v.chain.uses)
            if self._own.get(model.name, _NOTHING) != (names, uses):
                self._own[model.name] = names, uses
                self._put_forwarded()

    def _put_forwarded(self) -> None:
        found = {name: self._wanted(name, set()) for name in self._own}
        self.put("forwarded", {n: tuple(sorted(each)) for n, each in found.items() if each})

    def _wanted(self, name: str, seen: set[str]) -> set[str]:
        """The headers wanted by a model, and by those not yet `seen` that it runs."""
        seen.add(name)
        names, uses = self._own.get(name, _NOTHING)
        found, routed = set(names), self._found.get("routed", {})
        for used, version in uses:
            if not version and used in routed:
                found.add(routed[used])
            if used not in seen:
                found |= self._wanted(used, seen)
        return found


class EngineWatch(Protocol):
    """A look, again and again, at files, memory or devices, while the engine runs."""

    def start(self) -> None:
        """Begin, once the engine knows the models."""

    def stop(self) -> None:
        """Change nothing more."""

    async def stopped(self) -> None:
        """Wait for threads that must not exist when the process exits."""


class Engine:
    """The models of a host: lookup, health, documents, loading, and their life.

    `open`, `load_all`, `start`, `stop`, `unload_all` and `close` are called in this order.
    """

    def __init__(
        self,
        name: str,
        version: str,
        backends: Mapping[str, Backend],
        options: LoadOptions,
        admission: Admission,
        strict_readiness: bool = False,
        logs: LogControl | None = None,
        control: ControlOptions | None = None,
        statistics: Callable[[], VersionStatistics] = VersionStatistics,
        tracing: Tracing | None = None,
        regions: Regions | None = None,
        on_request: MakeLoads | None = None,
        traffic: MakeTraffic = Traffic,
        audit: Audit | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`statistics` makes the counters of a version; without `regions` no shared memory.

        `on_request` makes the loading of models on request, None for none. `traffic` makes the
        rules for requests without a version. Without `audit` and `capture`, nothing is recorded.
        """
        self.name = name
        self.version = version
        self.options = options
        self.gpus: GpuWatch | None = None
        self._backends = backends
        self._watches: Sequence[EngineWatch] = ()
        self.instance_id = secrets.token_hex(16)  # unique to this process
        # Scheme, address and port of the metrics, once open.
        self.metrics_at: tuple[str, str, int] | None = None
        self.admission = admission
        self.host = HostFacts()
        self.access: Access | None = None  # who identifies clients; None: nobody
        self.logs = logs or LogControl(LogSettings())
        self.audit = audit
        self.capture = capture
        self.tracing = tracing or Tracing(TraceConfig())
        self.tracing.known = self._is_known
        self.tracing.changed = self._on_tracing
        self.regions = regions or Regions(admission, 0)
        self._models: dict[str, Model] = {}
        # Models loaded on request do not count before they are requested.
        strict = strict_readiness and on_request is None
        # Clients who control models may start with none.
        needs = control is not None and control.mode is not ControlMode.EXPLICIT
        self.readiness = ServerReadiness(self._models, admission, strict, needs)
        # `Entrance.known`: cached results of `find`.
        self.known: dict[tuple[str, str], Router] = {}
        self.traffic = traffic(self._models, admission, self._on_traffic)
        self.wanted_headers = WantedHeaders()
        self.wanted_headers.put("traced", self.tracing.headers)
        if capture is not None and capture.headers:
            self.wanted_headers.put("captured", {"": capture.headers})
        self.model_metrics = ModelMetrics()
        # A newly loaded version may be higher than a cached one.
        self._lifecycle = Lifecycle(
            self._models, backends, options, self._on_change, self._host_for_version, self.regions,
            statistics, self.readiness.may_have_changed,
        )  # fmt: skip
        self.pieces = Pieces()
        self.loads: Loads = self._lifecycle
        if on_request is not None:
            self.loads = on_request(self._models, self._lifecycle)
        self.load, self.follow, self.unload = (
            self.loads.load, self.loads.follow, self.loads.unload
        )  # fmt: skip
        self.control = Control(
            self._models,
            self.loads,
            self.index,
            self.pieces,
            partial(open_model, backends=backends, options=options),
            control or ControlOptions(),
            self._lifecycle.composition,
        )
        self._lifecycle.composition.offers = self.loads.offers
        self._lifecycle.composition.fetch = self._fetch

    # --- inference

    def find(self, name: str, version: str = "") -> Router:
        """The target of a request: the named version, else the model's traffic rules, else the
        highest ready version, else an on-demand load of the model.

        Raises `NotFound`, `ModelNotReady`, or `InvalidRequest` for a version that is no number.
        """
        found = self.known.get((name, version))
        if found is None or not found.ready:
            if len(self.known) >= _MAX_FOUND:
                self.known.clear()
            try:
                found = self._find(name, version)
            except (NotFound, Unavailable):
                if (cold := self.loads.cold_start(self, name, version)) is None:
                    raise
                return cold
            self.known[name, version] = found
        return found

    def _on_tracing(self) -> None:
        """Recompose all chains: other calls are traced than before."""
        self.wanted_headers.put("traced", self.tracing.headers)
        for version in self.versions():
            version.chain.compose()

    def _on_traffic(self) -> None:
        """Drop cached lookups: requests may be routed differently."""
        self.wanted_headers.put("routed", self.traffic.headers)
        self._forget_answers()

    def _on_change(self, model: Model) -> None:
        """Drop cached lookups of a model whose versions have changed."""
        self.traffic.follow(model)
        self.wanted_headers.forward(model)
        self._forget_answers()
        self.readiness.may_have_changed()

    def _forget_answers(self) -> None:
        """Drop lookups, and answers of models whose steps may be answered otherwise now."""
        self.known.clear()
        if self.options.cache is not None:
            self.options.cache.renew(self.wanted_headers.of)

    async def bring(self, name: str, version: str = "") -> None:
        """Load a model on request; raises `ServerError`.

        It stays in memory at least until the caller awaits something else.
        """
        while True:
            try:
                self.find_version(name, version)
                return
            except (NotFound, Unavailable):
                if not self.loads.offers(name, version):
                    return  # the lookup reports the reason
                await self.loads.bring(name)

    async def _fetch(self, name: str, user: str) -> None:
        """Load a model that another one runs, which waits for it; raises `ServerError`."""
        if self.loads.offers(name):
            await self.loads.bring(name)
        elif self.control.by_clients:
            await self.control.load(name, waiter=user)

    def _find(self, name: str, version: str) -> Router:
        if not version and (model := self._models.get(name)) is not None:
            router = self.traffic.router(model)
            if router is not None:
                return router
        return self.find_version(name, version).chain

    def find_version(self, name: str, version: str = "") -> ModelVersion:
        """The version for a document: the one named, else the highest ready one.

        Raises as `find` does.
        """
        model = self._models.get(name)
        if model is None:
            if not self.readiness.initialised:
                raise Unavailable("Server not ready", retry_after=1)
            alike = namespaced(name, self._models)
            raise NotFound(
                ambiguous(name, alike)
                if alike
                else f"Request for unknown model: '{name}' is not found"
            )
        return model.find(version)

    # --- health

    @property
    def exiting(self) -> bool:
        """True if shutdown has begun."""
        return self.admission.exiting

    @property
    def ready(self) -> bool:
        """True if the server takes requests; see `headrace.engine.entrance`."""
        return self.readiness.ready

    def model_ready(self, name: str, version: str = "") -> bool:
        """True if requests for a model are executed; raises `InvalidRequest` for a bad version."""
        return not self.model_obstacle(name, version)

    def model_obstacle(self, name: str, version: str = "") -> str:
        """The reason why requests for a model are not executed, or ""; raises as `model_ready`."""
        if version:
            parse_version(version)
        try:
            return self.find(name, version).obstacle
        except (NotFound, Unavailable) as error:
            model = self._models.get(name)
            reason = "" if model is None else model.why(version)
            return f"{error}: {reason}" if reason else str(error)

    def _is_known(self, name: str) -> bool:
        """True if any version of a model takes requests, or could be loaded."""
        model = self._models.get(name)
        if model is not None and model.newest() is not None:
            return True
        return self.loads.offers(name)

    # --- documents

    def server_metadata(self) -> pb.ServerMetadataResponse:
        """Name and version of the server, and the supported extensions."""
        return pb.ServerMetadataResponse(
            name=self.name, version=self.version, extensions=documents.EXTENSIONS
        )

    def identity(self) -> dict[str, object]:
        """The id of this process, and the address of its metrics, None if they are off."""
        at = self.metrics_at
        metrics = None if at is None else dict(zip(("scheme", "address", "port"), at, strict=True))
        return {"id": self.instance_id, "metrics": metrics}

    def model_metadata(self, name: str, version: str = "") -> pb.ModelMetadataResponse:
        """The inputs and outputs of a model; raises as `find` does."""
        found = self.find_version(name, version)
        ready = self._models[name].ready_versions()
        names = [found.name] if version else [v.name for v in ready]
        return documents.model_metadata(found, names)

    def counted(self, name: str = "", version: str = "") -> list[ModelVersion]:
        """The versions whose statistics are asked for: one, all ready ones of a model, or of all.

        Raises `InvalidRequest` for a model or version that is not available.
        """
        if not name:
            return [v for n in sorted(self._models) for v in self._models[n].ready_versions()]
        model = self._models.get(name)
        ready = model.ready_versions() if model else []
        if not ready:
            raise InvalidRequest(f"requested model '{name}' is not available")
        if version:
            number = parse_version(version)
            ready = [v for v in ready if v.number == number]
            if not ready:
                raise InvalidRequest(
                    f"requested model version is not available for model '{name}': {number}"
                )
        return ready

    def index(
        self, model: Model, ready_only: bool = False
    ) -> list[pb.RepositoryIndexResponse.ModelIndex]:
        """Every version of a model with its state; one without any by its name."""
        return documents.index(model, self.traffic.reason, ready_only)

    def repository_of(self, name: str) -> str:
        """The repository of a model; "" for one that is outside of any."""
        model = self._models.get(name)
        return "" if model is None else model.source.repository

    def models(self) -> Collection[Model]:
        """All models."""
        return self._models.values()

    def versions(self) -> Iterator[ModelVersion]:
        """All versions of all models, by name and number."""
        for name in sorted(self._models):
            versions = self._models[name].versions
            yield from (versions[n] for n in sorted(versions))

    def unavailable(self) -> list[tuple[str, str]]:
        """Models, or versions as `name/number`, that could not be loaded, with the reason."""
        failed = [(m.source.name, m.reason) for m in self._models.values() if m.reason]
        failed += [
            (f"{v.model}/{v.name}", v.reason)
            for v in self.versions()
            if v.state is State.UNAVAILABLE and not self._models[v.model].unloaded
        ]
        return sorted(failed)

    @property
    def gpu_series(self) -> GpuSeries:
        """The last readings of the GPUs; none unless they are watched."""
        return GpuSeries() if self.gpus is None else self.gpus.series

    # --- life

    def open(self, watches: Sequence[EngineWatch] = ()) -> None:
        """Attach the backends to the running event loop; `watches` run from `start` to `stop`."""
        loop = asyncio.get_running_loop()
        for backend in self._backends.values():
            backend.attach(loop)
        self._watches = watches

    def start(self) -> None:
        """Start what watches the loaded models."""
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        """Watch and load nothing more; models answer until they are unloaded."""
        for watch in self._watches:
            watch.stop()
        self.stop_loading()
        stop_backends(self._backends)

    async def stopped(self) -> None:
        """Wait for the threads of watches."""
        for watch in self._watches:
            await watch.stopped()

    async def close(self) -> None:
        """End what backends have started, and remove uploaded files; no model is left by then."""
        await close_backends(self._backends)
        if self.options.cache is not None:
            await self.options.cache.close()
        self.control.close()

    # --- loading

    async def load_all(self, sources: Sequence[ModelSource], all_or_none: bool = False) -> None:
        """Load every model; a failed one is UNAVAILABLE with its reason.

        Afterwards the server is ready, with `all_or_none` only if nothing has failed. On
        cancellation, pending loads never start, and running ones are not awaited.
        """
        for source in sources:
            earlier = self._models.get(source.name)
            model = self._lifecycle.know(source)
            model.reason = source.problem
            if source.duplicate or earlier is not None:
                model.reason = "model appears in two or more repositories"
            if model.reason:
                both = [m.source for m in (earlier, model) if m is not None]
                places = [s.file or s.path for s in both if s.file or s.path.name]
                where = f" ({' and '.join(map(str, places))})" if places else ""
                log.error("failed to load %s: %s%s", source.name, model.reason, where)
        self.readiness.initialised = True
        wanted = [model.source for model in self._models.values() if not model.reason]
        self.loads.start()
        wanted = [source for source in wanted if self.loads.at_start(source.name)]
        try:
            await asyncio.gather(*map(self.load, wanted))
        except asyncio.CancelledError:
            self.stop_loading()
            raise
        if not (all_or_none and self.unavailable()):
            self.readiness.start()

    @property
    def loading(self) -> bool:
        """True if anything is being loaded."""
        return self._lifecycle.loading

    def stop_loading(self) -> None:
        """Start no more loads; running ones will never serve."""
        self.control.stop()
        self.loads.stop()
        self._lifecycle.stop()

    async def unload_all(self, grace: float = ABANDONED_SECS) -> None:
        """Finish accepted requests and free every model; `grace` as in `ModelVersion.unload`."""
        self.traffic.close()
        await self._lifecycle.unload_all(grace)

    def unloading(self) -> list[ModelVersion]:
        """The versions that still have requests to finish before they are freed."""
        standing = [v for v in self.versions() if v.state is State.UNLOADING]
        return list(dict.fromkeys([*standing, *self._lifecycle.leaving]))

    def _host_for_version(self, version: ModelVersion) -> EngineServices:
        return EngineServices(
            self, self.model_metrics, version.chain, self.tracing, self.audit, self.capture,
            self.admission,
        )  # fmt: skip
