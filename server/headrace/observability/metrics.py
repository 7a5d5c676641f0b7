"""Prometheus series, made from the counters when they are scraped.

The `nv_*` names and labels are Triton's, because dashboards, autoscalers and load generators read
them; the `headrace_*` ones are histograms and gauges that Triton does not have. Each family stands
once in a table: name, help text, labels, and what its samples are read from. A family that counts
something new is one more line there.

This module is alone with prometheus_client, which brings an HTTP server and 4 MB along: it is
imported for the first scrape.
"""

import asyncio
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic_ns
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric

from headrace.observability.endpoints import EndpointSeries
from headrace.observability.machine import Machine
from headrace.observability.model_metrics import ModelMetrics
from headrace.observability.nvml import GpuReading
from headrace.observability.series import (
    BackendSeries,
    Buckets,
    Family,
    GpuSeries,
    MemoryCounts,
    MetricsOptions,
    Quantiles,
    Reading,
    ServerSeries,
    TrafficSeries,
    VersionSeries,
    WorkerSeries,
)
from headrace.observability.statistics import (
    FIRST_RESPONSE,
    LATENCY_KINDS,
    Histogram,
    SummarisedStatistics,
    VersionStatistics,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# prometheus_client ends every counter's name with _total in the header lines, also where the
# samples do not.
_SUFFIX = re.compile(rb"^(# (?:HELP|TYPE) )([\w:]+)_total ", re.MULTILINE)
_HEADER = re.compile(rb"^# (?:HELP|TYPE) .*\n", re.MULTILINE)
_VERSIONS_A_PART = 5
_SAMPLES_A_TURN = 200  # written in a millisecond or two
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

S = TypeVar("S")


class ServerCollector:
    """Turns the state of the server into metric families; called on the event-loop thread."""

    def __init__(
        self,
        server: Callable[[], ServerSeries],
        versions: Callable[[], Iterable[VersionSeries]],
        machine: Machine | None,
        model_metrics: ModelMetrics,
        options: MetricsOptions | None = None,
        traffic: Callable[[], Iterable[TrafficSeries]] = tuple,
        gpus: Callable[[], GpuSeries] = GpuSeries,
    ) -> None:
        """Without a `machine`, nothing is told of it."""
        self._server = server
        self._versions = versions
        self._machine = machine
        self._model_metrics = model_metrics
        self._traffic = traffic
        self._gpus = gpus
        self._version_families = version_families(options or MetricsOptions())

    def parts(self) -> Iterator[Metric]:
        """All families, also those without a sample yet, in parts of a bounded size.

        Those of one family have the same name; what they tell is looked up when they are asked for.
        """
        versions = iter(self._versions())
        group = list(islice(versions, _VERSIONS_A_PART))
        yield from self._of_versions(group)
        while group := list(islice(versions, _VERSIONS_A_PART)):
            yield from self._of_versions(group)
        for family in self._of_server():
            for first in range(0, max(len(family.samples), 1), _SAMPLES_A_TURN):
                part = Metric(family.name, family.documentation, family.type)
                part.samples = family.samples[first : first + _SAMPLES_A_TURN]
                yield part

    def _of_versions(self, versions: list[VersionSeries]) -> Iterator[Metric]:
        """The families with samples of these versions."""
        labelled = [(_labels(version), version) for version in versions]
        yield from collected(self._version_families, labelled)
        yield from collected(
            GPU_MEMORY_FAMILIES,
            [
                ({**own, "gpu_uuid": n}, size)
                for own, v in labelled
                for n, size in v.gpu_memory.items()
            ],
            optional=True,
        )
        yield from collected(WORKER_FAMILIES, [(o, v.workers) for o, v in labelled if v.workers])
        yield from collected(
            ENDPOINT_FAMILIES,
            [({**own, "endpoint": each.name}, each) for own, v in labelled for each in v.endpoints],
        )
        yield from collected(
            BACKEND_FAMILIES,
            [({**own, "backend": each.name}, each) for own, v in labelled for each in v.backends],
        )

    def _of_server(self) -> Iterator[Metric]:
        """The other families."""
        traffic = [({"model": series.model}, series) for series in self._traffic()]
        yield from collected(TRAFFIC_FAMILIES, traffic)
        server, gpus = self._server(), self._gpus()
        yield from collected(SERVER_FAMILIES, [({}, server)])
        if server.memory is not None:
            yield from collected(MEMORY_FAMILIES, [({}, server.memory)])
        if self._machine is not None:
            yield from collected(MACHINE_FAMILIES, [({}, self._machine)], optional=True)
        readings = [({"gpu_uuid": reading.uuid}, reading) for reading in gpus.readings]
        yield from collected(GPU_FAMILIES, readings, optional=True)
        if gpus.pinned is not None:
            yield from collected(PINNED_FAMILIES, [({}, gpus.pinned)])
        for family, found in self._model_metrics.collect():
            yield from collected([family], found)


def collected(
    families: Iterable[Family[S]],
    sources: Sequence[tuple[Mapping[str, str], S]],
    optional: bool = False,
) -> Iterator[Metric]:
    """The families, with a sample for each reading of each source under the source's labels.

    Families without any are left out if they are `optional`.
    """
    for family in families:
        counts = family.kind == "counter"  # the library ends their names with _total in headers
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
    """Add the samples of one reading: none of None, several of a distribution."""
    if reading is None:
        return
    if isinstance(reading, Buckets):
        count = 0
        for bound, more in zip([*reading.bounds, "+Inf"], reading.counts, strict=True):
            count += more
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
    elif isinstance(reading, Quantiles):
        count = reading.observed
        for quantile, value in reading.values.items():
            metric.add_sample(name, {**labels, "quantile": quantile}, value)
    else:
        metric.add_sample(name, labels, float(reading))
        return
    metric.add_sample(f"{name}_count", labels, count)
    metric.add_sample(f"{name}_sum", labels, reading.total)


class _Families:
    """Families as a registry has them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def process_registry() -> CollectorRegistry:
    """What the library tells of this process.

    A registry of its own: nothing that is registered globally gets into the answer.
    """
    result = CollectorRegistry()
    ProcessCollector(registry=result)
    PlatformCollector(registry=result)
    GCCollector(registry=result)
    return result


async def scrape(
    collector: ServerCollector, process: CollectorRegistry, plain: Container[str] = ()
) -> bytes:
    """The answer to a scrape, in Prometheus' text format.

    A thousand models have tens of thousands of samples, which take the better part of a second to
    write: the event loop gets its turn after every few of them. `plain` as of `render`.
    """
    texts: dict[str, list[bytes]] = {}
    written = 0
    for part in collector.parts():
        text = render(_Families([part]), plain)
        of_family = texts.setdefault(part.name, [])
        of_family.append(_HEADER.sub(b"", text) if of_family else text)
        written += len(part.samples)
        if written >= _SAMPLES_A_TURN:
            written = 0
            await asyncio.sleep(0)
    pieces = [piece for of_family in texts.values() for piece in of_family]
    return b"".join([*pieces, render(process)])


def render(source: "CollectorRegistry | _Families", plain: Container[str] = ()) -> bytes:
    """Families in Prometheus' text format.

    `plain` are counters whose samples have no _total, beside those under Triton's names.
    """

    def header(found: re.Match[bytes]) -> bytes:
        name = found[2].decode()
        return found[1] + found[2] + b" " if name.startswith("nv_") or name in plain else found[0]

    return _SUFFIX.sub(header, generate_latest(source))


# --- of versions


def version_families(options: MetricsOptions) -> list[Family[VersionSeries]]:
    """The families with samples of each version; which of Triton's latencies, `options` say."""
    families = [f for f in _VERSION_FAMILIES if options.counters or f not in _LATENCY_COUNTERS]
    if options.histograms:
        families.append(_FIRST_RESPONSES)
    if options.summaries:
        families += [_summary(kind, options.quantiles) for kind in LATENCY_KINDS]
    return families


def _labels(series: VersionSeries) -> dict[str, str]:
    tags = {f"_{key}": value for key, value in series.tags.items()}
    return {"model": series.model, "version": series.version, **tags}


def _latency(
    name: str, help_text: str, read: Callable[[VersionStatistics], int]
) -> Family[VersionSeries]:
    """A counter of nanoseconds, told in microseconds."""
    return Family(name, help_text, "counter", lambda v: read(v.statistics) // 1_000)


def _seconds(histogram: Histogram) -> Buckets:
    """A histogram of nanoseconds, told in seconds."""
    bounds = [str(bound / 1e9) for bound in histogram.bounds]
    return Buckets(bounds, histogram.counts, histogram.total_ns / 1e9)


def _first_responses(version: VersionSeries) -> Buckets | None:
    first = version.statistics.responses.first
    if first is None:
        return None
    bounds = [f"{bound / 1e6:g}" for bound in first.bounds]
    return Buckets(bounds, first.counts, first.total_ns / 1e6)


def _summary(kind: str, quantiles: Sequence[float]) -> Family[VersionSeries]:
    def read(version: VersionSeries) -> Quantiles | None:
        statistics = version.statistics
        if not isinstance(statistics, SummarisedStatistics):
            return None
        values = statistics.window.quantiles(kind, quantiles, monotonic_ns())
        found = {f"{q:g}": value / 1_000 for q, value in zip(quantiles, values, strict=True)}
        total = statistics.success_ns if kind == "request" else getattr(statistics, f"{kind}_ns")
        return Quantiles(found, statistics.success_count, total // 1_000)

    text = f"Microseconds of {kind.replace('_', ' ')}, of requests in the last minute"
    return Family(f"nv_inference_{kind}_summary_us", text, "summary", read)


def _batch_rows(version: VersionSeries) -> Buckets:
    counts = [0] * (len(_BATCH_BOUNDS) + 1)
    total = 0
    for rows, batch in version.statistics.batches.items():
        counts[bisect_left(_BATCH_BOUNDS, rows)] += batch.count
        total += rows * batch.count
    return Buckets([f"{bound}.0" for bound in _BATCH_BOUNDS], counts, total)


_FIRST_RESPONSES: Family[VersionSeries] = Family(
    FIRST_RESPONSE, "Milliseconds from accepting a request to its first response", "histogram",
    _first_responses,
)  # fmt: skip
_LATENCY_COUNTERS: tuple[Family[VersionSeries], ...] = (
    _latency("nv_inference_request_duration_us",
             "Microseconds from accepting a request to its answer", lambda s: s.success_ns),
    _latency("nv_inference_queue_duration_us", "Microseconds in the queue", lambda s: s.queue_ns),
    _latency("nv_inference_compute_input_duration_us", "Microseconds of gathering inputs",
             lambda s: s.compute_input_ns),
    _latency("nv_inference_compute_infer_duration_us", "Microseconds of running the model",
             lambda s: s.compute_infer_ns),
    _latency("nv_inference_compute_output_duration_us", "Microseconds of giving outputs out",
             lambda s: s.compute_output_ns),
)  # fmt: skip
_VERSION_FAMILIES: tuple[Family[VersionSeries], ...] = (
    Family("nv_inference_request_success", "Successful requests", "counter",
           lambda v: v.statistics.success_count),
    Family("nv_inference_count", "Inferences: rows of successful requests", "counter",
           lambda v: v.statistics.inference_count),
    Family("nv_inference_exec_count", "Model executions: successful batches", "counter",
           lambda v: v.statistics.execution_count),
    *_LATENCY_COUNTERS,
    Family("nv_inference_request_failure", "Failed requests by reason", "counter",
           lambda v: v.statistics.failures, ("reason",)),
    Family("headrace_batch_closed_total", "Batches by why they closed", "counter",
           # Of a version for which nothing was counted, no reason takes room.
           lambda v: v.statistics.batches_closed if any(v.statistics.batches_closed.values())
           else None, ("reason",)),
    Family("nv_inference_pending_request_count", "Accepted requests not yet started", "gauge",
           lambda v: v.pending),
    Family("nv_model_load_duration_secs", "Seconds that loading took", "gauge",
           lambda v: v.load_seconds),
    Family("headrace_model_memory_bytes", "Memory that a version's instances take", "gauge",
           lambda v: v.memory_bytes or None),
    Family("headrace_model_instances", "Instances that run a version", "gauge",
           lambda v: v.instances, ("kind",)),
    Family("headrace_stalled_instances", "Instances whose batch makes no progress", "gauge",
           lambda v: v.stalled),
    Family("headrace_ended_runs_total",
           "Runs in the server's process that were ended, by why", "counter",
           lambda v: v.statistics.ended_runs, ("reason",)),
    Family("headrace_queue_duration_seconds", "Seconds in the queue", "histogram",
           lambda v: _seconds(v.statistics.queue_histogram)),
    Family("headrace_compute_duration_seconds", "Seconds of execution, of the whole batch",
           "histogram", lambda v: _seconds(v.statistics.compute_histogram)),
    Family("headrace_request_duration_seconds",
           "Seconds from accepting a request to its answer", "histogram",
           lambda v: _seconds(v.statistics.request_histogram)),
    Family("headrace_batch_rows", "Rows of a batch", "histogram", _batch_rows),
)  # fmt: skip
GPU_MEMORY_FAMILIES: tuple[Family[int], ...] = (
    Family("headrace_model_gpu_memory_bytes",
           "Memory of a GPU that a version's instances had taken when they were loaded", "gauge",
           lambda nbytes: nbytes),
)  # fmt: skip
WORKER_FAMILIES: tuple[Family[WorkerSeries], ...] = (
    Family("headrace_workers", "Worker processes that there should be", "gauge",
           lambda w: w.instances),
    Family("headrace_workers_running", "Worker processes that run", "gauge",
           lambda w: len(w.resident)),
    Family("headrace_worker_resident_bytes", "Memory of a worker process in use", "gauge",
           lambda w: w.resident, ("instance",)),
    Family("headrace_worker_ends_total", "Worker processes that ended unasked, by how they did",
           "counter", lambda w: w.counters.ends, ("reason",)),
    Family("headrace_worker_recycles_total", "Worker processes replaced while they were well",
           "counter", lambda w: w.counters.recycled, ("reason",)),
    Family("headrace_quarantined_requests_total",
           "Requests refused because workers died of their input", "counter",
           lambda w: w.quarantined),
)  # fmt: skip
ENDPOINT_FAMILIES: tuple[Family[EndpointSeries], ...] = (
    Family("headrace_endpoint_requests_total", "Calls to a server of a model", "counter",
           lambda e: e.counts.requests),
    Family("headrace_endpoint_failures_total",
           "Calls that a server of a model has not answered well", "counter",
           lambda e: e.counts.failures),
    Family("headrace_endpoint_ejections_total", "Times that a server was left out for its failures",
           "counter", lambda e: e.counts.ejections),
    Family("headrace_endpoint_outstanding", "Calls under way", "gauge", lambda e: e.outstanding),
    Family("headrace_endpoint_healthy", "Whether a server is sent calls", "gauge",
           lambda e: e.serves),
    Family("headrace_endpoint_sequences", "Sequences whose state a server has", "gauge",
           lambda e: e.sequences),
    Family("headrace_endpoint_differences",
           "Ways in which a server has a model otherwise than asked", "gauge",
           lambda e: e.differences),
    # Dashboards may have these names: they count calls of a kind that is not made any more.
    Family("headrace_endpoint_hedges_total", "Always 0", "counter", lambda _: 0),
    Family("headrace_endpoint_hedge_wins_total", "Always 0", "counter", lambda _: 0),
)  # fmt: skip
BACKEND_FAMILIES: tuple[Family[BackendSeries], ...] = (
    Family("headrace_backend_requests_total", "Requests that a backend of a model has answered",
           "counter", lambda b: b.counts.requests),
    Family("headrace_backend_batches_total", "Batches that a backend of a model has run",
           "counter", lambda b: b.counts.batches),
    Family("headrace_backend_switches_total",
           "Times that requests went over to a backend of a model", "counter",
           lambda b: b.counts.switches),
    Family("headrace_backend_active", "Whether a backend is the one that gets requests", "gauge",
           lambda b: b.active),
)  # fmt: skip

# --- of the traffic between versions, and of the server

TRAFFIC_FAMILIES: tuple[Family[TrafficSeries], ...] = (
    Family("headrace_traffic_weight",
           "Share of the requests without a version that a version gets by the rules, 0 to 1",
           "gauge", lambda t: t.shares, ("version",)),
    Family("headrace_traffic_requests_total",
           "Requests that the rules have sent to a version", "counter",
           lambda t: {n: ledger.routed for n, ledger in t.ledgers.items()}, ("version",)),
    Family("headrace_traffic_rollbacks_total",
           "How often a version has lost its traffic", "counter",
           lambda t: {n: ledger.rollbacks for n, ledger in t.ledgers.items()}, ("version",)),
    Family("headrace_shadow_requests_total",
           "Copies for a shadow version by what became of them", "counter",
           lambda t: {
               (n, outcome): count for n, shadow in t.shadows.items() for outcome, count in (
                   ("success", shadow.success), ("failure", shadow.failure),
                   ("dropped", shadow.dropped),
               )
           }, ("version", "outcome")),
    Family("headrace_shadow_duration_seconds",
           "Seconds from submitting a copy to its answer", "histogram",
           lambda t: {n: _seconds(shadow.durations) for n, shadow in t.shadows.items()},
           ("version",)),
)  # fmt: skip
SERVER_FAMILIES: tuple[Family[ServerSeries], ...] = (
    Family("headrace_server_info", "Which process this is, as /v2 says it", "gauge",
           lambda s: {s.instance_id: 1}, ("id",)),
    Family("headrace_ready", "Whether the server is ready, 1 or 0", "gauge", lambda s: s.ready),
    Family("headrace_admitted_requests", "Requests under way", "gauge",
           lambda s: s.admitted_requests),
    Family("headrace_admitted_bytes", "Bytes of the requests under way", "gauge",
           lambda s: s.admitted_bytes),
    Family("headrace_admitted_bytes_peak", "The most that this has been", "gauge",
           lambda s: s.peak_bytes),
    Family("headrace_admitted_requests_limit", "Most requests under way", "gauge",
           lambda s: s.max_requests),
    Family("headrace_admitted_bytes_limit", "Most bytes of requests under way", "gauge",
           lambda s: s.max_bytes),
    Family("headrace_overloaded_total", "Requests refused at the server's limits", "counter",
           lambda s: s.overloaded),
    Family("headrace_incoming_requests",
           "Requests of which the first part has come; their bytes are admitted, they are not",
           "gauge", lambda s: s.incoming),
    Family("headrace_unread_answer_bytes",
           "Bytes of answers that wait for clients to read them; admitted bytes, too", "gauge",
           lambda s: s.unread_bytes),
    Family("headrace_requests_total", "Requests answered, or given up by clients", "counter",
           lambda s: {(door, operation, status): count
                      for door, operation, status, count in s.answers},
           ("door", "operation", "status")),
    Family("headrace_connections", "Open connections of clients", "gauge",
           lambda s: {door: s.connections.get(door, 0) for door in ("http", "grpc")}, ("door",)),
    Family("headrace_connections_limit", "Most connections in each process", "gauge",
           lambda s: s.max_connections),
    Family("headrace_refused_connections_total",
           "Connections closed at once: there were too many", "counter",
           lambda s: s.refused_connections),
    Family("headrace_failed_accepts_total",
           "Connections that could not be accepted, as without a free descriptor", "counter",
           lambda s: s.failed_accepts),
    Family("headrace_given_up_total",
           "Requests and connections given up: their clients did not send, or read, the rest in"
           " time", "counter",
           lambda s: {why: s.given_up.get(why, 0) for why in ("unsent", "unread")}, ("reason",)),
    Family("headrace_log_lines_dropped_total", "Lines of the log that could not be written",
           "counter", lambda s: s.dropped_lines),
    Family("headrace_model_loads_total", "Loads and reloads by outcome", "counter",
           lambda s: {
               (load.model, outcome): count for load in s.loads
               for outcome, count in (("success", load.succeeded), ("failure", load.failed))
           }, ("model", "outcome")),
)  # fmt: skip
MEMORY_FAMILIES: tuple[Family[MemoryCounts], ...] = (
    Family("headrace_models_in_memory", "Models that are loaded", "gauge", lambda m: m.models),
    Family("headrace_model_memory_budget_bytes", "Bytes that models may take", "gauge",
           lambda m: m.budget),
    Family("headrace_model_evictions_total", "Models unloaded for others, or without requests",
           "counter", lambda m: m.evictions),
)  # fmt: skip
MACHINE_FAMILIES: tuple[Family[Machine], ...] = (
    Family("nv_cpu_utilization", "Share of the machine's CPU in use, 0 to 1", "gauge",
           lambda machine: machine.cpu_share()),
    Family("nv_cpu_memory_total_bytes", "Memory of the machine", "gauge",
           lambda machine: memory[0] if (memory := machine.memory()) else None),
    Family("nv_cpu_memory_used_bytes", "Memory in use on the machine", "gauge",
           lambda machine: memory[1] if (memory := machine.memory()) else None),
)  # fmt: skip
GPU_FAMILIES: tuple[Family[GpuReading], ...] = (
    Family("nv_gpu_memory_total_bytes", "Memory of a GPU", "gauge", lambda r: r.memory_total),
    Family("nv_gpu_memory_used_bytes", "Memory of a GPU in use", "gauge", lambda r: r.memory_used),
    Family("nv_gpu_utilization", "Share of time that a GPU computes, 0 to 1", "gauge",
           lambda r: r.utilization),
    Family("nv_gpu_power_usage", "Watts that a GPU takes", "gauge", lambda r: r.power_usage),
    Family("nv_gpu_power_limit", "Watts that a GPU may take", "gauge", lambda r: r.power_limit),
    Family("nv_energy_consumption", "Joules that a GPU has taken since its driver was loaded",
           "counter", lambda r: r.energy),
)  # fmt: skip
PINNED_FAMILIES: tuple[Family[tuple[int, int]], ...] = (
    Family("nv_pinned_memory_pool_total_bytes", "Page-locked memory for copies to GPUs", "gauge",
           lambda pinned: pinned[0]),
    Family("nv_pinned_memory_pool_used_bytes", "Page-locked memory in use", "gauge",
           lambda pinned: pinned[1]),
)  # fmt: skip
