"""Prometheus series, made from the counters when they are scraped.

The `nv_*` names and labels are Triton's, because dashboards, autoscalers and load generators read
them; the `headrace_*` ones are histograms and gauges that Triton does not have.

This module and what makes metric families are alone with prometheus_client, which brings an HTTP
server and 4 MB along: it is imported for the first scrape.
"""

import asyncio
import re
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from headrace.observability.answers import Sample
from headrace.observability.backends import backend_families
from headrace.observability.endpoints import endpoint_families
from headrace.observability.gpus import GpuSeries, gpu_families
from headrace.observability.latencies import first_response_family, summary_families
from headrace.observability.machine import Machine
from headrace.observability.metrics_options import MetricsOptions
from headrace.observability.model_metrics import ModelMetrics
from headrace.observability.series import ServerSeries, VersionSeries
from headrace.observability.statistics import LATENCY_BOUNDS, Histogram, VersionStatistics
from headrace.observability.traffic import TrafficSeries, traffic_families
from headrace.observability.workers import worker_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# prometheus_client ends every counter's name with _total in the header lines, also where the
# samples do not.
_SUFFIX = re.compile(rb"^(# (?:HELP|TYPE) )([\w:]+)_total ", re.MULTILINE)
_HEADER = re.compile(rb"^# (?:HELP|TYPE) .*\n", re.MULTILINE)
_VERSIONS_A_PART = 5
_SAMPLES_A_TURN = 200  # written in a millisecond or two
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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
        self._gpus = gpus
        self._options = options or MetricsOptions()
        self._server = server
        self._versions = versions
        self._machine = machine
        self._model_metrics = model_metrics
        self._traffic = traffic

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
        labelled = [(_labels(series), series.statistics) for series in versions]
        yield from _counters(versions, self._options.counters)
        yield from _gauges(versions)
        yield from _histograms(versions)
        if self._options.histograms:
            yield first_response_family(labelled)
        if self._options.summaries:
            yield from summary_families(labelled, self._options.quantiles)
        yield from worker_families(
            [(_labels(series), series.workers) for series in versions if series.workers]
        )
        yield from endpoint_families([(_labels(series), series.endpoints) for series in versions])
        yield from backend_families([(_labels(series), series.backends) for series in versions])

    def _of_server(self) -> Iterator[Metric]:
        """The other families."""
        yield from traffic_families(self._traffic())
        yield from _server(self._server())
        if self._machine is not None:
            yield from _machine(self._machine)
        yield from gpu_families(self._gpus())
        yield from self._model_metrics.collect()


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


_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    ("nv_inference_request_success", "Successful requests", lambda s: s.success_count),
    ("nv_inference_count", "Inferences: rows of successful requests", lambda s: s.inference_count),
    (
        "nv_inference_exec_count",
        "Model executions: successful batches",
        lambda s: s.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "Microseconds from accepting a request to its answer",
        lambda s: s.success_ns // 1_000,
    ),
    ("nv_inference_queue_duration_us", "Microseconds in the queue", lambda s: s.queue_ns // 1_000),
    (
        "nv_inference_compute_input_duration_us",
        "Microseconds of gathering inputs",
        lambda s: s.compute_input_ns // 1_000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Microseconds of running the model",
        lambda s: s.compute_infer_ns // 1_000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Microseconds of giving outputs out",
        lambda s: s.compute_output_ns // 1_000,
    ),
)


def _counters(versions: list[VersionSeries], latencies: bool) -> Iterator[Metric]:
    for name, documentation, value in _COUNTERS:
        if name.endswith("_us") and not latencies:
            continue
        family = Metric(name, documentation, "counter")
        for series in versions:
            family.add_sample(name, _labels(series), value(series.statistics))
        yield family
    name = "nv_inference_request_failure"
    family = Metric(name, "Failed requests by reason", "counter")
    for series in versions:
        for reason, count in series.statistics.failures.items():
            family.add_sample(name, {**_labels(series), "reason": reason}, count)
    yield family
    family = Metric("headrace_batch_closed", "Batches by why they closed", "counter")
    for series in versions:
        closed = series.statistics.batches_closed
        if any(closed.values()):  # what nobody asks for takes no room
            for reason, count in closed.items():
                labels = {**_labels(series), "reason": reason.value}
                family.add_sample("headrace_batch_closed_total", labels, count)
    yield family


def _gauges(versions: list[VersionSeries]) -> Iterator[Metric]:
    pending = Metric(
        "nv_inference_pending_request_count", "Accepted requests not yet started", "gauge"
    )
    load = Metric("nv_model_load_duration_secs", "Seconds that loading took", "gauge")
    memory = Metric(
        "headrace_model_memory_bytes", "Memory that a version's instances take", "gauge"
    )
    instances = Metric("headrace_model_instances", "Instances that run a version", "gauge")
    on_gpu = Metric(
        "headrace_model_gpu_memory_bytes",
        "Memory of a GPU that a version's instances had taken when they were loaded",
        "gauge",
    )
    stalled = Metric(
        "headrace_stalled_instances", "Instances whose batch makes no progress", "gauge"
    )
    ended = Metric(
        "headrace_ended_runs", "Runs in the server's process that were ended, by why", "counter"
    )
    for series in versions:
        pending.add_sample(pending.name, _labels(series), series.pending)
        load.add_sample(load.name, _labels(series), series.load_seconds)
        if series.memory_bytes:
            memory.add_sample(memory.name, _labels(series), series.memory_bytes)
        for kind, count in series.instances.items():
            instances.add_sample(instances.name, {**_labels(series), "kind": kind}, count)
        stalled.add_sample(stalled.name, _labels(series), series.stalled)
        for why, count in series.statistics.ended_runs.items():
            ended.add_sample(f"{ended.name}_total", {**_labels(series), "reason": why}, count)
        for uuid, nbytes in series.gpu_memory.items():
            on_gpu.add_sample(on_gpu.name, {**_labels(series), "gpu_uuid": uuid}, nbytes)
    yield from (pending, load, memory, instances, stalled, ended)
    if on_gpu.samples:
        yield on_gpu


def _histograms(versions: list[VersionSeries]) -> Iterator[Metric]:
    kinds: tuple[tuple[str, str, Callable[[VersionStatistics], Histogram]], ...] = (
        ("queue", "Seconds in the queue", lambda s: s.queue_histogram),
        ("compute", "Seconds of execution, of the whole batch", lambda s: s.compute_histogram),
        (
            "request",
            "Seconds from accepting a request to its answer",
            lambda s: s.request_histogram,
        ),
    )
    for kind, documentation, pick in kinds:
        family = HistogramMetricFamily(
            f"headrace_{kind}_duration_seconds", documentation, labels=()
        )
        for series in versions:
            histogram = pick(series.statistics)
            bounds = [str(bound / 1e9) for bound in LATENCY_BOUNDS]
            _add(family, _labels(series), bounds, histogram.counts, histogram.total_ns / 1e9)
        yield family
    family = HistogramMetricFamily("headrace_batch_rows", "Rows of a batch", labels=())
    for series in versions:
        counts = [0] * (len(_BATCH_BOUNDS) + 1)
        total = 0
        for rows, batch in series.statistics.batches.items():
            index = next((i for i, bound in enumerate(_BATCH_BOUNDS) if rows <= bound), -1)
            counts[index] += batch.count
            total += rows * batch.count
        _add(family, _labels(series), [f"{bound}.0" for bound in _BATCH_BOUNDS], counts, total)
    yield family


def _add(
    family: Metric, labels: dict[str, str], bounds: list[str], counts: list[int], total: float
) -> None:
    running = 0
    for bound, count in zip([*bounds, "+Inf"], counts, strict=True):
        running += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, running)
    family.add_sample(f"{family.name}_count", labels, running)
    family.add_sample(f"{family.name}_sum", labels, total)


def _server(server: ServerSeries) -> Iterator[Metric]:
    identity = GaugeMetricFamily(
        "headrace_server_info", "Which process this is, as /v2 says it", labels=["id"]
    )
    identity.add_metric([server.instance_id], 1)
    yield identity
    yield _gauge("headrace_ready", "Whether the server is ready, 1 or 0", server.ready)
    yield _gauge("headrace_admitted_requests", "Requests under way", server.admitted_requests)
    yield _gauge(
        "headrace_admitted_bytes", "Bytes of the requests under way", server.admitted_bytes
    )
    yield _gauge("headrace_admitted_bytes_peak", "The most that this has been", server.peak_bytes)
    yield _gauge("headrace_admitted_requests_limit", "Most requests under way", server.max_requests)
    yield _gauge(
        "headrace_admitted_bytes_limit", "Most bytes of requests under way", server.max_bytes
    )
    refused = Metric("headrace_overloaded", "Requests refused at the server's limits", "counter")
    refused.add_sample("headrace_overloaded_total", {}, server.overloaded)
    yield refused
    yield _gauge(
        "headrace_incoming_requests",
        "Requests of which the first part has come; their bytes are admitted, they are not",
        server.incoming,
    )
    yield _gauge(
        "headrace_unread_answer_bytes",
        "Bytes of answers that wait for clients to read them; admitted bytes, too",
        server.unread_bytes,
    )
    yield _answers(server.answers)
    yield from _connections(server)
    dropped = Metric(
        "headrace_log_lines_dropped", "Lines of the log that could not be written", "counter"
    )
    dropped.add_sample("headrace_log_lines_dropped_total", {}, server.dropped_lines)
    yield dropped
    loads = Metric("headrace_model_loads", "Loads and reloads by outcome", "counter")
    for model, succeeded, failed in server.loads:
        for outcome, count in (("success", succeeded), ("failure", failed)):
            labels = {"model": model, "outcome": outcome}
            loads.add_sample("headrace_model_loads_total", labels, count)
    yield loads
    if (memory := server.memory) is not None:
        yield _gauge("headrace_models_in_memory", "Models that are loaded", memory.models)
        yield _gauge(
            "headrace_model_memory_budget_bytes", "Bytes that models may take", memory.budget
        )
        evictions = Metric(
            "headrace_model_evictions", "Models unloaded for others, or without requests", "counter"
        )
        evictions.add_sample("headrace_model_evictions_total", {}, memory.evictions)
        yield evictions


def _connections(server: ServerSeries) -> Iterator[Metric]:
    there = GaugeMetricFamily(
        "headrace_connections", "Open connections of clients", labels=["door"]
    )
    for door in ("http", "grpc"):
        there.add_metric([door], server.connections.get(door, 0))
    yield there
    yield _gauge(
        "headrace_connections_limit", "Most connections in each process", server.max_connections
    )
    refused = Metric(
        "headrace_refused_connections", "Connections closed at once: there were too many", "counter"
    )
    refused.add_sample("headrace_refused_connections_total", {}, server.refused_connections)
    yield refused
    failed = Metric(
        "headrace_failed_accepts",
        "Connections that could not be accepted, as without a free descriptor",
        "counter",
    )
    failed.add_sample("headrace_failed_accepts_total", {}, server.failed_accepts)
    yield failed
    given_up = Metric(
        "headrace_given_up",
        "Requests and connections given up: their clients did not send, or read, the rest in time",
        "counter",
    )
    for reason in ("unsent", "unread"):
        count = server.given_up.get(reason, 0)
        given_up.add_sample("headrace_given_up_total", {"reason": reason}, count)
    yield given_up


def _machine(machine: Machine) -> Iterator[Metric]:
    share = machine.cpu_share()
    if share is not None:
        yield _gauge("nv_cpu_utilization", "Share of the machine's CPU in use, 0 to 1", share)
    memory = machine.memory()
    if memory is not None:
        yield _gauge("nv_cpu_memory_total_bytes", "Memory of the machine", memory[0])
        yield _gauge("nv_cpu_memory_used_bytes", "Memory in use on the machine", memory[1])


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))


def _labels(series: VersionSeries) -> dict[str, str]:
    tags = {f"_{key}": value for key, value in series.tags.items()}
    return {"model": series.model, "version": series.version, **tags}


def _answers(samples: Iterable[Sample]) -> Metric:
    """The counter of all answers."""
    family = Metric("headrace_requests", "Requests answered, or given up by clients", "counter")
    for door, operation, status, count in samples:
        labels = {"door": door, "operation": operation, "status": status}
        family.add_sample("headrace_requests_total", labels, count)
    return family
