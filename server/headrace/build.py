"""Composition of an engine from settings, without any state of the process.

Every host of an engine begins here: `headrace serve`, programs with a `headrace.Engine`, and tests:

    engine = build_engine(settings)
    sources, warnings = sources_at_start(settings, engine)
    engine.open(watches(settings, engine, sources))
    await engine.load_all(sources)
    engine.start()
    ...
    engine.stop()
    await engine.unload_all()
    await engine.close()

Optional parts of an engine are named here, and imported when it is built or first uses them; the
engine itself knows their types alone. Signals, limits of the process, logging, printing and the
exit belong to the host.
"""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from headrace import __version__
from headrace.core.cache_options import CacheOptions
from headrace.core.errors import LoadFailed
from headrace.core.limits import ResidencyOptions
from headrace.core.plugins import OptionalPart
from headrace.engine.admission import Admission
from headrace.engine.caching import ResponseCache
from headrace.engine.chain import load_stages
from headrace.engine.control import ControlMode, ControlOptions, LoadOverrides
from headrace.engine.engine import Engine, EngineWatch
from headrace.engine.exposition import Exposition
from headrace.engine.lifecycle import Lifecycle, Loads
from headrace.engine.limiting import RateLimiter
from headrace.engine.model import Model, Traffic
from headrace.engine.opening import LoadOptions
from headrace.engine.sampling import GpuWatch, MemoryWatch
from headrace.engine.shared_memory import Open, Regions
from headrace.engine.tracing import MakeTraceSink, Tracing
from headrace.observability.audit import Audit, AuditOptions
from headrace.observability.capture import Capture, CaptureOptions
from headrace.observability.logs import LogControl
from headrace.observability.machine import Machine
from headrace.observability.statistics import Sourced, VersionStatistics
from headrace.observability.trace_settings import TraceConfig, TraceMode
from headrace.placement.backend import BackendContext, load_backends
from headrace.placement.confinement import WorkerUser
from headrace.placement.cores import core_limit
from headrace.placement.local.gpus import CudaDriver, GpuReader, Gpus
from headrace.repository.catalogue import NO_SUCH, Catalogue, at_start, open_store
from headrace.repository.layout import ModelSource
from headrace.settings import Settings

log = logging.getLogger(__name__)

Loop = asyncio.AbstractEventLoop
Sources = Sequence[ModelSource]  # the models at start

AUDIT: OptionalPart[Callable[[AuditOptions], Audit]] = OptionalPart("audit")
CAPTURE: OptionalPart[Callable[[CaptureOptions], Capture]] = OptionalPart("capture")
CACHE: OptionalPart[Callable[[CacheOptions], ResponseCache]] = OptionalPart("cache")
CUDA_MEMORY: OptionalPart[Callable[[Callable[[], CudaDriver | None]], Open]]
CUDA_MEMORY = OptionalPart("cuda_memory")
NVML: OptionalPart[Callable[[], GpuReader]] = OptionalPart("nvml")
ON_REQUEST: OptionalPart[Callable[[ResidencyOptions, Mapping[str, Model], Lifecycle], Loads]]
ON_REQUEST = OptionalPart("on_request")
POLL: OptionalPart[Callable[[Engine, Catalogue, Sources, float, Loop], EngineWatch]]
POLL = OptionalPart("poll")
RATE_LIMITER: OptionalPart[Callable[[Sequence[str]], RateLimiter]] = OptionalPart("rate_limiter")
RELOAD: OptionalPart[Callable[[Engine, Sources, Loop], EngineWatch]] = OptionalPart("reload")
SIGNATURES: OptionalPart[Callable[[str], Callable[[Path], None]]] = OptionalPart("signatures")
TRACES: OptionalPart[MakeTraceSink] = OptionalPart("traces")
TRAFFIC: OptionalPart[type[Traffic]] = OptionalPart("traffic")


def make_tracing(config: TraceConfig) -> Tracing:
    """Create tracing from its configuration; raises `LoadFailed` for a missing dependency."""
    if config.file or config.mode is not TraceMode.TRITON:
        return Tracing(config, TRACES.load()(config))
    if not config.settings.off:
        log.warning("nothing is traced: --trace-config triton,file=PATH says where to")
    return Tracing(config)


def _report_isolation(settings: Settings) -> None:
    """Log what confines Python models, and what is missing; raises `LoadFailed`."""
    try:
        told, missing = settings.isolation_report()
    except ValueError as error:
        raise LoadFailed(f"isolation of models: {error}") from None
    if told:
        log.info("Python models are isolated by: %s", ", ".join(told))
    for line in missing:
        log.warning("isolation of models: %s", line)


def make_capture(options: CaptureOptions | None) -> Capture | None:
    """Open the capture, if there is to be one; raises `LoadFailed` if it cannot be written."""
    if options is None:
        return None
    try:
        return CAPTURE.load()(options)
    except OSError as error:
        raise LoadFailed(f"cannot write the capture {options.file}: {error.strerror}") from None


def make_audit(options: AuditOptions | None) -> Audit | None:
    """Open the audit log, if there is to be one; raises `LoadFailed` if it cannot be written."""
    if options is None:
        return None
    try:
        return AUDIT.load()(options)
    except OSError as error:
        raise LoadFailed(f"cannot write the audit log {options.file}: {error.strerror}") from None


def build_engine(
    settings: Settings,
    logs: LogControl | None = None,
    tracing: Tracing | None = None,
    cores: int | None = None,
    audit: Audit | None = None,
    capture: Capture | None = None,
) -> Engine:
    """An engine with nothing loaded, started or written, for `cores`, by default all.

    `logs` changes the settings of the log, `tracing` writes traces, `audit` records changes, and
    `capture` payloads; by default none of these happens. Raises `LoadFailed` for settings that need
    a part which the server is without.
    """
    _report_isolation(settings)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    admission = Admission(
        settings.max_admitted_requests,
        settings.max_admitted_bytes,
        settings.shares(files),
        settings.max_response_bytes,
        settings.max_object_bytes,
        settings.max_request_bytes,
        settings.metrics.bounds,
    )
    gpus = Gpus(settings.pinned_memory_pool_byte_size, management=lambda: NVML.load()())
    resources = settings.rate_limit_resource
    limited = settings.rate_limit == "execution_count"
    options = LoadOptions(
        cores or core_limit(),
        not settings.disable_auto_complete_config,
        settings.default_max_batch_size,
        settings.environments,
        settings.allow_in_process_python,
        settings.isolation,
        settings.model_load_thread_count,
        settings.model_load_retry_count,
        settings.model_load_timeout_secs,
        gpus=gpus,
        limits=settings.execution_limits,
        overload_delay_ms=settings.overload_delay_ms,
        fair_share=settings.fair_share,
        stages=load_stages(),
        cache=None if (cache := settings.cache) is None else CACHE.load()(cache),
        limiter=RATE_LIMITER.load()(resources) if limited else None,
        signed=SIGNATURES.load()(key) if (key := settings.require_signature) else None,
    )
    control = _control(settings)
    allowed = settings.allow_traffic_control or control.mode is ControlMode.EXPLICIT
    context = BackendContext(
        gpus, settings.trust_model_code, settings.max_request_bytes, settings.tritons
    )
    regions = Regions(
        admission, settings.max_request_bytes, settings.allow_client_shm,
        settings.client_shm_prefix, lambda: CUDA_MEMORY.load()(gpus.cuda),
    )  # fmt: skip
    residency = settings.residency
    on_request = None if residency is None else partial(ON_REQUEST.load(), residency)
    traffic = TRAFFIC.load() if TRAFFIC.target else Traffic
    return Engine(
        settings.id,
        __version__,
        load_backends(context),
        options,
        admission,
        settings.strict_readiness,
        logs,
        control,
        partial(VersionStatistics, settings.metrics.summaries, settings.metrics.bounds),
        tracing,
        regions,
        on_request,
        partial(traffic, allowed=allowed),
        audit,
        capture,
    )


def sources_at_start(settings: Settings, engine: Engine) -> tuple[list[ModelSource], list[str]]:
    """The models to load at start, and warnings; raises as `Catalogue.sources` does."""
    sources, warnings = engine.control.catalogue.sources()
    if settings.residency is not None:
        named = at_start(sources, [*settings.pin_model, *settings.load_model])
        sources += [source for source in named if source.problem == NO_SUCH]
    elif ControlMode(settings.model_control_mode) is ControlMode.EXPLICIT:
        sources = at_start(sources, settings.load_model)
    return sources, warnings


def watches(
    settings: Settings, engine: Engine, sources: Sequence[ModelSource]
) -> list[EngineWatch]:
    """Watches of files, memory and devices for an engine with these models.

    Made on the event loop, before the models are loaded: changes meanwhile are not missed. Raises
    `LoadFailed` as `build_engine` does.
    """
    loop, mode = asyncio.get_running_loop(), ControlMode(settings.model_control_mode)
    interval = settings.metrics_interval_ms / 1000
    found: list[EngineWatch] = [MemoryWatch(engine.versions, interval)]
    if settings.allow_metrics and settings.allow_gpu_metrics:
        engine.gpus = GpuWatch(engine.options.gpus, interval)
        found.append(engine.gpus)
    if settings.reload and RELOAD.target and mode is not ControlMode.EXPLICIT:
        found.append(RELOAD.load()(engine, sources, loop))
    if mode is ControlMode.POLL:
        given = engine, engine.control.catalogue, sources
        found.append(POLL.load()(*given, settings.repository_poll_secs, loop))
    return found


def scraper(
    settings: Settings, engine: Engine, of_doors: Callable[[], Iterable[Sourced]] = tuple
) -> Callable[[Exposition], Awaitable[bytes]]:
    """A function that writes the metrics of an engine, and doors, in a format.

    Imports prometheus_client, which takes 20 ms and 4 MB.
    """
    from headrace.engine.metrics import ServerCollector, process_registry, scrape

    interval = settings.metrics_interval_ms / 1000
    machine = Machine(interval_secs=interval) if settings.allow_cpu_metrics else None
    collector = ServerCollector(
        engine, machine, settings.metrics, lambda: engine.gpu_series, settings.model_namespacing,
        of_doors,
    )  # fmt: skip
    process = process_registry()
    return lambda format: scrape(collector, process, engine.model_metrics.plain_counters, format)


def _control(settings: Settings) -> ControlOptions:
    """Options of model control: who decides which models are served, and from where."""
    return ControlOptions(
        ControlMode(settings.model_control_mode),
        _catalogue(settings),
        LoadOverrides[settings.load_overrides.upper()],
        settings.max_override_bytes,
        readers=next((WorkerUser.of(user).gid for user in settings.worker_user), None),
    )


def _catalogue(settings: Settings) -> Catalogue:
    return Catalogue(
        tuple(
            open_store(address, settings.model_name, settings.stores)
            for address in settings.model_repository
        ),
        tuple(map(Path, settings.model_file)),
        settings.model_config_name,
        settings.model_namespacing,
        settings.model_name,
    )
