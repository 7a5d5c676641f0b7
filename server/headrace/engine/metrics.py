"""Prometheus series, computed from the counters on each scrape.

The `nv_*` names and labels are Triton's, which dashboards, autoscalers and load generators read;
the `headrace_*` ones are histograms and gauges that Triton does not have. Each family is declared
once in a table: name, help text, labels, and the source of its samples.

Only this module imports prometheus_client, which brings an HTTP server and 4 MB along; it is
imported on the first scrape.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from time import monotonic_ns
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import BucketSpan, Exemplar, Metric, NativeHistogram

from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.exposition import TEXT, Exposition
from headrace.engine.pieces import Pieces
from headrace.engine.report import VersionReport
from headrace.engine.version import ModelVersion
from headrace.observability.machine import Machine
from headrace.observability.statistics import (
    FIRST_RESPONSE,
    LATENCY_KINDS,
    BackendSeries,
    Buckets,
    CacheCounts,
    Closed,
    Duration,
    EndpointSeries,
    Family,
    GpuReading,
    GpuSeries,
    Histogram,
    LatencyBounds,
    MemoryCounts,
    MetricsOptions,
    NativeBuckets,
    PaddingCounts,
    Quantiles,
    Reading,
    SequenceSeries,
    Sourced,
    VersionStatistics,
    Window,
    WorkerSeries,
    in_seconds,
)

_VERSIONS_A_PART = 5
_SAMPLES_A_PART = 200  # formatted in a millisecond or two
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

S = TypeVar("S")


class ServerCollector:
    """Converts the state of the server to metric families; called on the event-loop thread."""

    def __init__(
        self,
        engine: Engine,
        machine: Machine | None,
        options: MetricsOptions | None = None,
        gpus: Callable[[], GpuSeries] = GpuSeries,
        namespacing: bool = False,
        of_doors: Callable[[], Iterable[Sourced]] = tuple,
    ) -> None:
        """Without a `machine`, there are no machine metrics; `of_doors` are families of doors.

        With `namespacing`, series of models have their repository as `namespace`, as in Triton.
        """
        self._namespacing = namespacing
        self._of_doors = of_doors
        self._engine = engine
        self._machine = machine
        self._gpus = gpus
        options = options or MetricsOptions()
        self._version_families = version_families(options)
        self._cache_families = cache_families(options)

    @property
    def pieces(self) -> Pieces:
        """The queue of the engine for long documents: a scrape is several pieces."""
        return self._engine.pieces

    def parts(self) -> Iterator[Metric]:
        """All families, including empty ones, in parts of a bounded size.

        Parts of one family have the same name; samples are computed when a part is consumed.
        """
        versions = (version for version in list(self._engine.versions()) if version.ready)
        group = list(islice(versions, _VERSIONS_A_PART))
        yield from self._of_versions(group)
        while group := list(islice(versions, _VERSIONS_A_PART)):
            yield from self._of_versions(group)
        for family in self._of_server():
            for first in range(0, max(len(family.samples), 1), _SAMPLES_A_PART):
                part = Metric(family.name, family.documentation, family.type)
                part.samples = family.samples[first : first + _SAMPLES_A_PART]
                yield part

    def _of_versions(self, versions: list[ModelVersion]) -> Iterator[Metric]:
        """The families with samples of these versions."""
        labelled = [(self._labels(version), version.report) for version in versions]
        yield from collected(self._version_families, labelled)
        cached = [(own, c) for own, r in labelled if (c := r.statistics.cache) is not None]
        yield from collected(self._cache_families, cached, optional=True)
        padded = [(own, p) for own, r in labelled if (p := r.statistics.padding) is not None]
        yield from collected(PADDING_FAMILIES, padded, optional=True)
        gpu_memory = [
            ({**own, "gpu_uuid": each.uuid}, each.nbytes)
            for own, report in labelled
            for each in report.gpu_memory
        ]
        yield from collected(GPU_MEMORY_FAMILIES, gpu_memory, optional=True)
        workers = [(own, found) for own, report in labelled if (found := report.workers)]
        yield from collected(WORKER_FAMILIES, workers)
        sequences = [(own, series) for own, report in labelled if (series := report.sequences)]
        yield from collected(SEQUENCE_FAMILIES, sequences)
        yield from collected(
            ENDPOINT_FAMILIES,
            [({**own, "endpoint": each.name}, each) for own, r in labelled for each in r.endpoints],
        )
        yield from collected(
            BACKEND_FAMILIES,
            [({**own, "backend": each.name}, each) for own, r in labelled for each in r.backends],
        )

    def _labels(self, version: ModelVersion) -> dict[str, str]:
        tags = {f"_{key}": value for key, value in version.config.metric_tags.items()}
        labels = {"model": version.model, "version": version.name, **tags}
        if self._namespacing and (space := self._engine.repository_of(version.model)):
            labels["namespace"] = space
        return labels

    def _of_server(self) -> Iterator[Metric]:
        """The other families."""
        engine, gpus = self._engine, self._gpus()
        yield from collected(SERVER_FAMILIES, [({}, engine)])
        yield from collected(ADMISSION_FAMILIES, [({}, engine.admission)])
        if (memory := engine.loads.counts()) is not None:
            yield from collected(MEMORY_FAMILIES, [({}, memory)])
        if self._machine is not None:
            yield from collected(MACHINE_FAMILIES, [({}, self._machine)], optional=True)
        readings = [({"gpu_uuid": reading.uuid}, reading) for reading in gpus.readings]
        yield from collected(GPU_FAMILIES, readings, optional=True)
        if gpus.pinned is not None:
            yield from collected(PINNED_FAMILIES, [({}, gpus.pinned)])
        traffic = list(engine.traffic.metrics())
        parts = (engine.options.cache, engine.options.limiter)
        of_parts = [each for part in parts if part is not None for each in part.families()]
        models, stores = engine.model_metrics.collect(), engine.control.catalogue.metrics()
        for family, sources in chain(traffic, models, self._of_doors(), stores, of_parts):
            yield from collected([family], sources)


def collected(
    families: Iterable[Family[S]],
    sources: Sequence[tuple[Mapping[str, str], S]],
    optional: bool = False,
) -> Iterator[Metric]:
    """Families with a sample for each reading of each source, under the source's labels.

    Empty families are left out if they are `optional`.
    """
    for family in families:
        counts = family.kind == "counter"  # the library appends _total to their names in headers
        base = family.name.removesuffix("_total") if counts else family.name
        metric = Metric(base, family.help, family.kind)
        for labels, source in sources:
            found = family.read(source)
            if isinstance(found, Mapping):
                for key, reading in found.items():
                    names = key if isinstance(key, tuple) else (key,)
                    own = dict(zip(family.labels, names, strict=True))
                    _add(metric, family.name, {**labels, **own}, reading)
            else:
                _add(metric, family.name, dict(labels), found)
        if metric.samples or not optional:
            yield metric


def _add(metric: Metric, name: str, labels: dict[str, str], reading: Reading) -> None:
    """Add the samples of one reading: none for None, several for a distribution."""
    if reading is None:
        return
    if isinstance(reading, Buckets):
        count = 0
        for bound, more in zip([*reading.bounds, "+Inf"], reading.counts, strict=True):
            count += more
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
        first = len(metric.samples) - len(reading.counts)
        for place, found in reading.exemplars.items():
            exemplar = Exemplar({"trace_id": found.trace_id}, found.value, found.time)
            sample = metric.samples[first + place]
            metric.samples[first + place] = sample._replace(exemplar=exemplar)
        if reading.native is not None:
            native = _native(reading.native, count, reading.total)
            metric.add_sample(name, labels, count, native_histogram=native)
    elif isinstance(reading, Quantiles):
        count = reading.observed
        for quantile, value in reading.values.items():
            metric.add_sample(name, {**labels, "quantile": quantile}, value)
    else:
        metric.add_sample(name, labels, float(reading))
        return
    metric.add_sample(f"{name}_count", labels, count)
    metric.add_sample(f"{name}_sum", labels, reading.total)


def _native(buckets: NativeBuckets, count: int, total: float) -> NativeHistogram:
    """A native histogram: spans of buckets that are not empty, and differences of their counts."""
    spans: list[BucketSpan] = []
    deltas: list[int] = []
    end, before = 0, 0
    for index, more in enumerate(buckets.counts, buckets.first):
        if not more:
            continue
        if spans and index == end:
            spans[-1] = BucketSpan(spans[-1].offset, spans[-1].length + 1)
        else:
            spans.append(BucketSpan(index - end, 1))
        end = index + 1
        deltas.append(more - before)
        before = more
    return NativeHistogram(
        count, total, buckets.schema, buckets.threshold, buckets.zeros, spans, None, deltas
    )


def process_registry() -> CollectorRegistry:
    """The library's own series about this process.

    A separate registry, so that globally registered series are not included.
    """
    result = CollectorRegistry()
    ProcessCollector(registry=result)
    PlatformCollector(registry=result)
    GCCollector(registry=result)
    return result


async def scrape(
    collector: ServerCollector,
    process: CollectorRegistry,
    plain: Container[str] = (),
    format: Exposition = TEXT,
) -> bytes:
    """The response to a scrape in a format.

    A thousand models have tens of thousands of samples, whose formatting takes most of a second: it
    is done in turns of the event loop. `plain` are further counters, beside Triton's, whose samples
    have no _total.
    """
    texts: dict[str, list[bytes]] = {}
    pieces = collector.pieces
    await pieces.begin()
    for part in collector.parts():
        texts.setdefault(part.name, []).append(format.write(part, plain))
        if pieces.over:
            await pieces.begin()
    own = [[format.write(metric, plain)] for metric in process.collect()]
    joined = await pieces.each([*texts.values(), *own], format.join)
    return b"".join([*joined, format.end])


# --- of versions


def version_families(options: MetricsOptions) -> list[Family[VersionReport]]:
    """The families per version; `options` select Triton's latencies."""
    families = [f for f in _VERSION_FAMILIES if options.counters or f not in _LATENCY_COUNTERS]
    families += _latency_histograms(options.bounds)
    if options.histograms:
        families.append(_FIRST_RESPONSES)
    if options.summaries:
        families += [_summary(kind, options.quantiles) for kind in LATENCY_KINDS]
    return families


def cache_families(options: MetricsOptions) -> list[Family[CacheCounts]]:
    """The families of versions with a response cache."""
    found = list(_CACHE_FAMILIES)
    if options.summaries:
        found += [
            _cache_summary("hit", lambda c: (c.hit_window, c.hits), options.quantiles),
            _cache_summary("miss", lambda c: (c.miss_window, c.misses), options.quantiles),
        ]
    return found


def _cache_summary(
    kind: str,
    read: Callable[[CacheCounts], tuple[Window | None, Duration]],
    quantiles: Sequence[float],
) -> Family[CacheCounts]:
    def of(cache: CacheCounts) -> Quantiles | None:
        window, counted = read(cache)
        if window is None:
            return None
        values = window.quantiles(LATENCY_KINDS[0], quantiles, monotonic_ns())
        found = {f"{q:g}": value / 1_000 for q, value in zip(quantiles, values, strict=True)}
        return Quantiles(found, counted.count, counted.ns // 1_000)

    text = f"Microseconds of a response cache {kind}, of those in the last minute"
    return Family(f"nv_cache_{kind}_summary_per_model", "summary", of, text)


def _latency(
    name: str, read: Callable[[VersionStatistics], int], what: str
) -> Family[VersionReport]:
    """A counter of nanoseconds, exported in microseconds."""
    return Family(
        f"nv_inference_{name}_us", "counter", lambda r: read(r.statistics) // 1_000,
        f"Microseconds {what}",
    )  # fmt: skip


def _latency_histograms(bounds: LatencyBounds) -> list[Family[VersionReport]]:
    """Histograms of nanoseconds, exported in seconds."""
    return [
        Family(
            f"headrace_{name}_duration_seconds", "histogram",
            partial(_durations, read, bounds, name == "request"), f"Seconds {what}",
        )
        for name, read, what in _DURATIONS
    ]  # fmt: skip


def _durations(
    read: Callable[[VersionStatistics], Histogram],
    bounds: LatencyBounds,
    traced: bool,
    report: VersionReport,
) -> Buckets:
    statistics = report.statistics
    return in_seconds(read(statistics), bounds, statistics.exemplars if traced else None)


def _first_responses(report: VersionReport) -> Buckets | None:
    first = report.statistics.responses.first
    if first is None:
        return None
    bounds = [f"{bound / 1e6:g}" for bound in first.bounds]
    return Buckets(bounds, first.counts, first.total_ns // 1_000_000)  # whole, as in Triton


def _summary(kind: str, quantiles: Sequence[float]) -> Family[VersionReport]:
    def read(report: VersionReport) -> Quantiles | None:
        statistics = report.statistics
        if statistics.window is None:
            return None
        values = statistics.window.quantiles(kind, quantiles, monotonic_ns())
        found = {f"{q:g}": value / 1_000 for q, value in zip(quantiles, values, strict=True)}
        total = statistics.success_ns if kind == "request" else getattr(statistics, f"{kind}_ns")
        return Quantiles(found, statistics.success_count, total // 1_000)

    text = f"Microseconds of {kind.replace('_', ' ')}, of requests in the last minute"
    return Family(f"nv_inference_{kind}_summary_us", "summary", read, text)


def _batch_rows(report: VersionReport) -> Buckets:
    counts = [0] * (len(_BATCH_BOUNDS) + 1)
    total = 0
    for rows, batch in report.statistics.batches.items():
        counts[bisect_left(_BATCH_BOUNDS, rows)] += batch.count
        total += rows * batch.count
    return Buckets([f"{bound}.0" for bound in _BATCH_BOUNDS], counts, total)


def _batches_closed(report: VersionReport) -> Mapping[Closed, int] | None:
    """Without any, no reason takes room."""
    closed = report.statistics.batches_closed
    return closed if any(closed.values()) else None


_DURATIONS: Sequence[tuple[str, Callable[[VersionStatistics], Histogram], str]] = (
    ("queue", lambda s: s.queue_histogram, "in the queue"),
    ("batch_wait", lambda s: s.batch_wait_histogram,
     "in the queue while an instance was idle: the batch was being formed"),
    ("transfer", lambda s: s.transfer_histogram,
     "of gathering inputs and giving outputs out, of the whole batch"),
    ("compute", lambda s: s.compute_histogram, "of execution, of the whole batch"),
    ("request", lambda s: s.request_histogram, "from accepting a request to its answer"),
)  # fmt: skip
_FIRST_RESPONSES = Family(
    FIRST_RESPONSE, "histogram", _first_responses,
    "Milliseconds from accepting a request to its first response",
)  # fmt: skip
_LATENCY_COUNTERS = (
    _latency("request_duration", lambda s: s.success_ns, "from accepting a request to its answer"),
    _latency("queue_duration", lambda s: s.queue_ns, "in the queue"),
    _latency("compute_input_duration", lambda s: s.compute_input_ns, "of gathering inputs"),
    _latency("compute_infer_duration", lambda s: s.compute_infer_ns, "of running the model"),
    _latency("compute_output_duration", lambda s: s.compute_output_ns, "of giving outputs out"),
)
_VERSION_FAMILIES: Sequence[Family[VersionReport]] = [
    Family("nv_inference_request_success", "counter", lambda r: r.statistics.success_count,
           "Successful requests"),
    Family("nv_inference_count", "counter", lambda r: r.statistics.inference_count,
           "Inferences: rows of successful requests"),
    Family("nv_inference_exec_count", "counter", lambda r: r.statistics.execution_count,
           "Model executions: successful batches"),
    *_LATENCY_COUNTERS,
    Family("nv_inference_request_failure", "counter", lambda r: r.statistics.failures,
           "Failed requests by reason", ("reason",)),
    Family("headrace_overload_refusals_total", "counter", lambda r: r.statistics.overload_refusals,
           "Requests refused for their delay in the queue of an overloaded model"),
    Family("headrace_model_overloaded", "gauge", lambda r: int(r.statistics.overloaded),
           "1 while requests are refused for their delay in the queue"),
    Family("headrace_batch_closed_total", "counter", _batches_closed,
           "Batches by why they closed", ("reason",)),
    Family("nv_inference_pending_request_count", "gauge", lambda r: r.pending,
           "Accepted requests not yet started"),
    Family("nv_model_load_duration_secs", "gauge", lambda r: r.load_seconds,
           "Seconds that loading took"),
    Family("headrace_model_memory_bytes", "gauge", lambda r: r.memory_bytes or None,
           "Memory that a version's instances take"),
    Family("headrace_model_instances", "gauge",
           lambda r: Counter(instance.kind.value for instance in r.instances),
           "Instances that run a version", ("kind",)),
    Family("headrace_stalled_instances", "gauge", lambda r: len(r.stalled),
           "Instances whose batch makes no progress"),
    Family("headrace_ended_runs_total", "counter", lambda r: r.statistics.ended_runs,
           "Runs in the server's process that were ended, by why", ("reason",)),
    Family("headrace_step_requests_total", "counter",
           lambda r: {name: step.requests for name, step in r.statistics.steps.items()},
           "Calls of an ensemble's step that have ended", ("step",)),
    Family("headrace_step_failures_total", "counter",
           lambda r: {name: step.failures for name, step in r.statistics.steps.items()},
           "Calls of an ensemble's step that have failed", ("step",)),
    Family("headrace_step_duration_us_total", "counter",
           lambda r: {name: step.ns // 1_000 for name, step in r.statistics.steps.items()},
           "Microseconds that calls of an ensemble's step took, their queue included", ("step",)),
    Family("headrace_batch_rows", "histogram", _batch_rows, "Rows of a batch"),
]  # fmt: skip
_CACHE_FAMILIES: tuple[Family[CacheCounts], ...] = (
    Family("nv_cache_num_hits_per_model", "counter", lambda c: c.hits.count,
           "Requests that the response cache has answered"),
    Family("nv_cache_num_misses_per_model", "counter", lambda c: c.misses.count,
           "Requests run for the response cache"),
    Family("nv_cache_hit_duration_per_model", "counter", lambda c: c.hits.ns // 1_000,
           "Microseconds from the search in the response cache to its answer"),
    Family("nv_cache_miss_duration_per_model", "counter", lambda c: c.misses.ns // 1_000,
           "Microseconds of searching in vain, and of keeping answers"),
)  # fmt: skip
GPU_MEMORY_FAMILIES: tuple[Family[int], ...] = (
    Family("headrace_model_gpu_memory_bytes", "gauge", lambda nbytes: nbytes,
           "Memory of a GPU that a version's instances had taken when they were loaded"),
)  # fmt: skip
WORKER_FAMILIES: tuple[Family[WorkerSeries], ...] = (
    Family("headrace_workers", "gauge", lambda w: w.instances,
           "Worker processes that there should be"),
    Family("headrace_workers_running", "gauge", lambda w: len(w.resident),
           "Worker processes that run"),
    Family("headrace_worker_resident_bytes", "gauge", lambda w: w.resident,
           "Memory of a worker process in use", ("instance",)),
    Family("headrace_worker_ends_total", "counter", lambda w: w.counters.ends,
           "Worker processes that ended unasked, by how they did", ("reason",)),
    Family("headrace_worker_recycles_total", "counter", lambda w: w.counters.recycled,
           "Worker processes replaced while they were well", ("reason",)),
    Family("headrace_quarantined_requests_total", "counter", lambda w: w.quarantined,
           "Requests refused because workers died of their input"),
)  # fmt: skip
SEQUENCE_FAMILIES: tuple[Family[SequenceSeries], ...] = (
    Family("headrace_sequences", "gauge", lambda s: s.seated,
           "Sequences with their state on an instance, or an upstream"),
    Family("headrace_sequences_backlog", "gauge", lambda s: s.backlog,
           "Sequences that wait for an instance with room for their state"),
    Family("headrace_sequences_restarted_total", "counter", lambda s: s.restarted,
           "Starts of sequences that had not ended"),
    Family("headrace_sequences_ended_total", "counter", lambda s: s.ended,
           "Sequences that have ended, by how they did", ("reason",)),
)  # fmt: skip
ENDPOINT_FAMILIES: tuple[Family[EndpointSeries], ...] = (
    Family("headrace_endpoint_requests_total", "counter", lambda e: e.counts.requests,
           "Calls to a server of a model"),
    Family("headrace_endpoint_failures_total", "counter", lambda e: e.counts.failures,
           "Calls that a server of a model has not answered well"),
    Family("headrace_endpoint_ejections_total", "counter", lambda e: e.counts.ejections,
           "Times that a server was left out for its failures"),
    Family("headrace_endpoint_outstanding", "gauge", lambda e: e.outstanding, "Calls under way"),
    Family("headrace_endpoint_healthy", "gauge", lambda e: e.serves,
           "Whether a server is sent calls"),
    Family("headrace_endpoint_sequences", "gauge", lambda e: e.sequences,
           "Sequences whose state a server has"),
    Family("headrace_endpoint_differences", "gauge", lambda e: e.differences,
           "Ways in which a server has a model otherwise than asked"),
)  # fmt: skip
PADDING_FAMILIES: tuple[Family[PaddingCounts], ...] = (
    Family("headrace_padded_requests_total", "counter", lambda c: c.requests,
           "Requests padded to a bucket of a dimension", ("dimension", "bucket")),
    Family("headrace_padding_positions_total", "counter", lambda c: c.positions,
           "Positions of padded dimensions, of requests themselves or added",
           ("dimension", "kind")),
)  # fmt: skip
BACKEND_FAMILIES: tuple[Family[BackendSeries], ...] = (
    Family("headrace_backend_requests_total", "counter", lambda b: b.counts.requests,
           "Requests that a backend of a model has answered"),
    Family("headrace_backend_batches_total", "counter", lambda b: b.counts.batches,
           "Batches that a backend of a model has run"),
    Family("headrace_backend_switches_total", "counter", lambda b: b.counts.switches,
           "Times that requests went over to a backend of a model"),
    Family("headrace_backend_active", "gauge", lambda b: b.active,
           "Whether a backend is the one that gets requests"),
)  # fmt: skip

# --- of the server

SERVER_FAMILIES: tuple[Family[Engine], ...] = (
    Family("headrace_server_info", "gauge", lambda e: {e.instance_id: 1},
           "Which process this is, as /v2 says it", ("id",)),
    Family("headrace_ready", "gauge", lambda e: e.ready, "Whether the server is ready, 1 or 0"),
    Family("headrace_certificate_expiry_timestamp_seconds", "gauge",
           lambda e: {(each.door, each.file): each.expires for each in e.host.certificates()},
           "When a certificate of a door expires, since 1970", ("door", "file")),
    Family("headrace_log_lines_dropped_total", "counter", lambda e: e.logs.dropped,
           "Lines of the log that could not be written"),
    Family("headrace_audit_entries_lost_total", "counter",
           lambda e: None if e.audit is None else e.audit.lost,
           "Entries of the audit log that were left out, by reason", ("reason",)),
    Family("headrace_captured_requests_total", "counter",
           lambda e: None if e.capture is None else e.capture.captured,
           "Requests whose payloads were captured"),
    Family("headrace_capture_lost_total", "counter",
           lambda e: None if e.capture is None else e.capture.lost,
           "Captured requests that could not be written, by reason", ("reason",)),
    Family("headrace_model_loads_total", "counter",
           lambda e: {
               (model.name, outcome): count for model in e.models()
               for outcome, count in (("success", model.loads), ("failure", model.failed_loads))
           },
           "Loads and reloads by outcome", ("model", "outcome")),
)  # fmt: skip
ADMISSION_FAMILIES: tuple[Family[Admission], ...] = (
    Family("headrace_admitted_requests", "gauge", lambda a: a.requests,
           "Requests under way"),
    Family("headrace_admitted_bytes", "gauge", lambda a: a.bytes,
           "Bytes of the requests under way"),
    Family("headrace_admitted_bytes_peak", "gauge", lambda a: a.peak_bytes,
           "The most that this has been"),
    Family("headrace_admitted_requests_limit", "gauge", lambda a: a.max_requests,
           "Most requests under way"),
    Family("headrace_admitted_bytes_limit", "gauge", lambda a: a.max_bytes,
           "Most bytes of requests under way"),
    Family("headrace_overloaded_total", "counter", lambda a: a.refused,
           "Requests refused at the server's limits"),
    Family("headrace_incoming_requests", "gauge", lambda a: a.messages,
           "Requests of which the first part has come; their bytes are admitted, they are not"),
    Family("headrace_unread_answer_bytes", "gauge", lambda a: a.unread,
           "Bytes of answers that wait for clients to read them; admitted bytes, too"),
    Family("headrace_requests_total", "counter",
           lambda a: {(door, operation, status): count
                      for door, operation, status, count in a.answers.samples()},
           "Requests answered, or given up by clients", ("door", "operation", "status")),
    Family("headrace_connections", "gauge",
           lambda a: {door: a.connections[door] for door in ("http", "grpc", *a.connections)},
           "Open connections of clients", ("door",)),
    Family("headrace_connections_limit", "gauge", lambda a: a.shares.connections,
           "Most connections in each process"),
    Family("headrace_streams", "gauge", lambda a: a.streams,
           "Open gRPC calls beyond the first 8 of each connection, counted by 32"),
    Family("headrace_streams_limit", "gauge", lambda a: a.shares.streams,
           "Most such calls in each process"),
    Family("headrace_refused_streams_total", "counter", lambda a: a.refused_streams,
           "Times that a connection had to refuse calls at this limit"),
    Family("headrace_refused_connections_total", "counter", lambda a: a.refused_connections,
           "Connections closed at once: there were too many"),
    Family("headrace_quota_refused_total", "counter", lambda a: dict(a.quota_refused),
           "Requests refused at a limit of their client's quota", ("quota", "limit")),
    Family("headrace_failed_accepts_total", "counter", lambda a: a.failed_accepts,
           "Connections that could not be accepted, as without a free descriptor"),
    Family("headrace_given_up_total", "counter",
           lambda a: {why: a.aborted.get(why, 0) for why in ("unsent", "unread")},
           "Requests and connections given up: their clients did not send, or read, the rest in"
           " time", ("reason",)),
)  # fmt: skip
MEMORY_FAMILIES: tuple[Family[MemoryCounts], ...] = (
    Family("headrace_models_in_memory", "gauge", lambda m: m.models, "Models that are loaded"),
    Family("headrace_model_memory_budget_bytes", "gauge", lambda m: m.budget,
           "Bytes that models may take"),
    Family("headrace_model_evictions_total", "counter", lambda m: m.evictions,
           "Models unloaded for others, or without requests"),
)  # fmt: skip
MACHINE_FAMILIES: tuple[Family[Machine], ...] = (
    Family("nv_cpu_utilization", "gauge", lambda machine: machine.cpu_share(),
           "Share of the machine's CPU in use, 0 to 1"),
    Family("nv_cpu_memory_total_bytes", "gauge",
           lambda machine: memory[0] if (memory := machine.memory()) else None,
           "Memory of the machine"),
    Family("nv_cpu_memory_used_bytes", "gauge",
           lambda machine: memory[1] if (memory := machine.memory()) else None,
           "Memory in use on the machine"),
)  # fmt: skip
GPU_FAMILIES: tuple[Family[GpuReading], ...] = (
    Family("nv_gpu_memory_total_bytes", "gauge", lambda r: r.memory_total, "Memory of a GPU"),
    Family("nv_gpu_memory_used_bytes", "gauge", lambda r: r.memory_used, "Memory of a GPU in use"),
    Family("nv_gpu_utilization", "gauge", lambda r: r.utilization,
           "Share of time that a GPU computes, 0 to 1"),
    Family("nv_gpu_power_usage", "gauge", lambda r: r.power_usage, "Watts that a GPU takes"),
    Family("nv_gpu_power_limit", "gauge", lambda r: r.power_limit, "Watts that a GPU may take"),
    Family("nv_energy_consumption", "counter", lambda r: r.energy,
           "Joules that a GPU has taken since its driver was loaded"),
)  # fmt: skip
PINNED_FAMILIES: tuple[Family[tuple[int, int]], ...] = (
    Family("nv_pinned_memory_pool_total_bytes", "gauge", lambda pinned: pinned[0],
           "Page-locked memory for copies to GPUs"),
    Family("nv_pinned_memory_pool_used_bytes", "gauge", lambda pinned: pinned[1],
           "Page-locked memory in use"),
)  # fmt: skip
