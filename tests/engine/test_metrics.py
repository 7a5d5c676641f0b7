"""Prometheus series of the counters, read by Prometheus' own parser."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.limits import Shares
from headrace.engine.admission import Admission
from headrace.engine.exposition import TEXT
from headrace.engine.metrics import (
    WORKER_FAMILIES,
    ServerCollector,
    collected,
    process_registry,
)
from headrace.engine.metrics import scrape as scrape_in_turns
from headrace.engine.pieces import Pieces
from headrace.observability.machine import Machine, resident_bytes
from headrace.observability.statistics import (
    LATENCY_BOUNDS,
    Closed,
    EndKind,
    GpuReading,
    GpuSeries,
    RecycleReason,
    VersionStatistics,
    WorkerCounters,
    WorkerSeries,
)
from tests.engine.fakes import FakeEngine, FakeVersion, collector

COUNTERS = {
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count",
    "nv_inference_exec_count", "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us",
}  # fmt: skip
GAUGES = {
    "headrace_model_instances", "headrace_stalled_instances", "headrace_model_memory_bytes",
    "headrace_model_overloaded",
    "nv_inference_pending_request_count", "nv_model_load_duration_secs", "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes", "headrace_ready",
    "headrace_admitted_requests", "headrace_admitted_bytes", "headrace_admitted_bytes_peak",
    "headrace_admitted_requests_limit", "headrace_admitted_bytes_limit",
    "headrace_incoming_requests", "headrace_unread_answer_bytes", "headrace_connections",
    "headrace_connections_limit", "headrace_workers", "headrace_workers_running",
    "headrace_worker_resident_bytes",
}  # fmt: skip
HISTOGRAMS = {
    "headrace_queue_duration_seconds", "headrace_batch_wait_duration_seconds",
    "headrace_transfer_duration_seconds", "headrace_compute_duration_seconds",
    "headrace_request_duration_seconds", "headrace_batch_rows",
}  # fmt: skip
ONE = {"model": "m", "version": "1"}


def worked() -> VersionStatistics:
    """Two batches, and one failure for each of two reasons."""
    counted = VersionStatistics()
    counted.batch_succeeded([0, 1_000], 3, 3, 100_900, 101_900, 151_900, 152_900)
    late = 20_000_000_000
    counted.batch_succeeded([0], 2_000, 2_000, late, late, late, late)
    counted.request_failed("CANCELED", 5)
    counted.request_failed("BACKEND", 5)
    return counted


def scrape(*versions: FakeVersion, engine: FakeEngine | None = None) -> str:
    return text(collector(engine or FakeEngine(versions), Machine()))


def text(server: ServerCollector) -> str:
    return asyncio.run(scrape_in_turns(server, process_registry())).decode()


def series(statistics: VersionStatistics, tags: Mapping[str, str] | None = None) -> FakeVersion:
    return FakeVersion("m", "1", statistics, 5, 0.25, tags or {})


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str, labels: dict[str, str] | None = None) -> dict[str, float]:
    """Samples with exactly these labels, by name.

    The parser ends the names of counters with _total, whatever the text has.
    """
    return {
        sample.name.removesuffix("_total") if family.name in COUNTERS else sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == (labels or {})
    }


def test_counters_under_the_names_that_dashboards_read() -> None:
    found = values(scrape(series(worked())), ONE)
    assert {name: value for name, value in found.items() if name in COUNTERS} == {
        "nv_inference_request_success": 3,
        "nv_inference_count": 2_003,
        "nv_inference_exec_count": 2,
        "nv_inference_request_duration_us": (152_900 + 151_900 + 20_000_000_000) // 1_000,
        "nv_inference_queue_duration_us": (100_900 + 99_900 + 20_000_000_000) // 1_000,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 100,
        "nv_inference_compute_output_duration_us": 2,
    }
    assert found["nv_inference_pending_request_count"] == 5
    assert found["nv_model_load_duration_secs"] == 0.25


def test_batch_close_reasons_appear_with_the_first_batch() -> None:
    counted = VersionStatistics()
    assert "headrace_batch_closed_total{" not in scrape(series(counted))
    counted.batches_closed[Closed.SHAPE] += 2
    text = scrape(series(counted))
    found = {
        reason: values(text, {**ONE, "reason": reason})["headrace_batch_closed_total"]
        for reason in Closed
    }
    assert found == dict.fromkeys(Closed, 0) | {Closed.SHAPE: 2}


def test_hung_executions_are_reported() -> None:
    counted = worked()
    counted.ended_runs["limit"] += 2
    found = scrape(FakeVersion("m", "1", counted, stalled=[1, 2, 3]))
    assert values(found, ONE)["headrace_stalled_instances"] == 3
    assert values(found, {"reason": "limit", **ONE})["headrace_ended_runs_total"] == 2


def test_an_overloaded_model_and_its_refusals_are_reported() -> None:
    counted = worked()
    counted.overloaded, counted.overload_refusals = True, 7
    found = values(scrape(series(counted)), ONE)
    assert found["headrace_model_overloaded"] == 1
    assert found["headrace_overload_refusals_total"] == 7


def test_every_sample_follows_the_header_of_its_family() -> None:
    lines = scrape(series(worked())).splitlines()
    named = [line.split("{")[0].split() for line in lines if "nv_" in line]
    assert not [words for words in named if any(word.endswith("_total") for word in words)]
    name = ""
    for line in scrape(series(worked())).splitlines():
        if line.startswith("# TYPE"):
            name = line.split()[2]
        elif not line.startswith("#"):
            assert line.startswith(name)
    assert TEXT.content_type.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("versions", [(), (series(VersionStatistics()),)])
def test_every_family_is_announced_once_with_its_type(versions: tuple[FakeVersion, ...]) -> None:
    text = scrape(*versions)
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len({name for name, _ in types})
    ours = {name: kind for name, kind in types if name.startswith(("nv_", "headrace_"))}
    assert ours == {
        **dict.fromkeys(COUNTERS, "counter"),
        **dict.fromkeys(GAUGES, "gauge"),
        **dict.fromkeys(HISTOGRAMS, "histogram"),
        "headrace_batch_closed_total": "counter",
        "headrace_overload_refusals_total": "counter",
        "headrace_overloaded_total": "counter",
        "headrace_server_info": "gauge",
        "headrace_requests_total": "counter",
        "headrace_refused_connections_total": "counter",
        "headrace_streams": "gauge",
        "headrace_streams_limit": "gauge",
        "headrace_refused_streams_total": "counter",
        "headrace_quota_refused_total": "counter",
        "headrace_failed_accepts_total": "counter",
        "headrace_given_up_total": "counter",
        "headrace_certificate_expiry_timestamp_seconds": "gauge",
        "headrace_log_lines_dropped_total": "counter",
        "headrace_audit_entries_lost_total": "counter",
        "headrace_model_loads_total": "counter",
        "headrace_worker_ends_total": "counter",
        "headrace_worker_recycles_total": "counter",
        "headrace_ended_runs_total": "counter",
        "headrace_step_requests_total": "counter",
        "headrace_step_failures_total": "counter",
        "headrace_step_duration_us_total": "counter",
        "headrace_quarantined_requests_total": "counter",
        "headrace_endpoint_requests_total": "counter",
        "headrace_endpoint_failures_total": "counter",
        "headrace_endpoint_ejections_total": "counter",
        "headrace_endpoint_outstanding": "gauge",
        "headrace_endpoint_healthy": "gauge",
        "headrace_endpoint_sequences": "gauge",
        "headrace_endpoint_differences": "gauge",
        "headrace_backend_active": "gauge",
        "headrace_backend_batches_total": "counter",
        "headrace_backend_requests_total": "counter",
        "headrace_backend_switches_total": "counter",
        "headrace_traffic_weight": "gauge",
        "headrace_traffic_requests_total": "counter",
        "headrace_traffic_rollbacks_total": "counter",
        "headrace_shadow_requests_total": "counter",
        "headrace_shadow_duration_seconds": "histogram",
    }
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")} >= set(ours)


@pytest.mark.parametrize(
    ("statistics", "counts"),
    [
        (VersionStatistics(), {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}),
        (worked(), {"REJECTED": 0, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}),
    ],
)
def test_every_failure_reason_is_exported_from_the_start(
    statistics: VersionStatistics, counts: dict[str, int]
) -> None:
    family = families(scrape(series(statistics)))["nv_inference_request_failure"]
    assert [sample.labels for sample in family.samples] == [{**ONE, "reason": r} for r in counts]
    assert [sample.value for sample in family.samples] == list(counts.values())


def test_metric_tags_become_labels_and_text_in_them_is_escaped() -> None:
    text = scrape(series(worked(), tags={"team": "vision", "tier": "1"}))
    labels = {**ONE, "_team": "vision", "_tier": "1"}
    assert values(text, labels)["nv_inference_request_success"] == 3
    assert ONE not in [s.labels for f in text_string_to_metric_families(text) for s in f.samples]
    odd = 'a "b"\\\nc'
    text = scrape(FakeVersion(odd, "1", VersionStatistics(), 0, 0.0))
    assert values(text, {"model": odd, "version": "1"})["nv_inference_count"] == 0


def test_versions_stand_side_by_side() -> None:
    text = scrape(
        FakeVersion("a", "1", worked(), 0, 0.0),
        FakeVersion("a", "2", VersionStatistics(), 0, 0.0),
        FakeVersion("b", "1", VersionStatistics(), 0, 0.0),
    )
    family = families(text)["nv_inference_request_success"]
    assert [(s.labels["model"], s.labels["version"], s.value) for s in family.samples] == [
        ("a", "1", 3), ("a", "2", 0), ("b", "1", 0),
    ]  # fmt: skip


def buckets(text: str, name: str) -> list[tuple[float, float]]:
    return [
        (float(sample.labels["le"]), sample.value)
        for sample in families(text)[name].samples
        if sample.name == f"{name}_bucket"
    ]


def test_latency_histograms_are_cumulative() -> None:
    text = scrape(series(worked()))
    found = buckets(text, "headrace_request_duration_seconds")
    assert [bound for bound, _ in found[:-1]] == [bound / 1e9 for bound in LATENCY_BOUNDS]
    assert found[-1] == (float("inf"), 3.0)
    assert dict(found)[0.00025] == 2
    assert dict(found)[10.0] == 2  # the third took 20 s
    whole = values(text, ONE)
    assert whole["headrace_request_duration_seconds_count"] == 3
    assert whole["headrace_request_duration_seconds_sum"] == pytest.approx(20.0003048)
    # Batch sizes are counted by execution.
    text = scrape(series(worked()))
    rows = dict(buckets(text, "headrace_batch_rows"))
    assert (rows[2.0], rows[4.0], rows[1024.0], rows[float("inf")]) == (0, 1, 1, 2)
    assert values(text, ONE)["headrace_batch_rows_sum"] == 2_003
    assert values(text, ONE)["headrace_batch_rows_count"] == 2


def test_the_servers_load_and_limits() -> None:
    engine = FakeEngine(admission=Admission(100, 10**9))
    admission = engine.admission
    admission.requests, admission.bytes, admission.refused = 3, 4_096, 7
    found = values(scrape(engine=engine))
    assert found["headrace_ready"] == 1
    assert found["headrace_admitted_requests"] == 3
    assert found["headrace_admitted_bytes"] == 4_096
    assert found["headrace_admitted_requests_limit"] == 100
    assert found["headrace_admitted_bytes_limit"] == 10**9
    assert found["headrace_overloaded_total"] == 7
    assert values(scrape(engine=FakeEngine(ready=False)))["headrace_ready"] == 0


def test_connections() -> None:
    shares = Shares(connections=6)
    engine = FakeEngine(admission=Admission(0, 0, shares))
    admission = engine.admission
    admission.messages, admission.unread, admission.peak_bytes = 2, 3, 10
    admission.refused_connections, admission.failed_accepts = 7, 10
    admission.connections.update({"http": 4, "grpc": 5})
    admission.aborted.update({"unsent": 8, "unread": 9})
    text = scrape(engine=engine)
    found = values(text)
    assert found["headrace_incoming_requests"] == 2
    assert found["headrace_unread_answer_bytes"] == 3
    assert found["headrace_admitted_bytes_peak"] == 10
    assert found["headrace_connections_limit"] == 6
    assert found["headrace_refused_connections_total"] == 7
    assert found["headrace_failed_accepts_total"] == 10
    for door, count in (("http", 4), ("grpc", 5)):
        assert values(text, {"door": door})["headrace_connections"] == count
    for reason, count in (("unsent", 8), ("unread", 9)):
        assert values(text, {"reason": reason})["headrace_given_up_total"] == count


def test_loads_are_counted_by_model_and_outcome() -> None:
    text = scrape(engine=FakeEngine(known=[("m", 2, 1)]))
    for outcome, count in (("success", 2), ("failure", 1)):
        labels = {"model": "m", "outcome": outcome}
        assert values(text, labels) == {"headrace_model_loads_total": count}


def test_machine_and_process_metrics(tmp_path: Path) -> None:
    found = values(scrape())
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert 0 < found["nv_cpu_memory_used_bytes"] <= found["nv_cpu_memory_total_bytes"]
    assert found["process_resident_memory_bytes"] > 0
    assert "nv_cpu" not in text(collector(FakeEngine(), Machine(tmp_path)))


def test_a_scrape_reads_the_current_counters() -> None:
    statistics = VersionStatistics()
    found = collector(FakeEngine([series(statistics)]), Machine())
    before = text(found)
    statistics.request_failed("OTHER", 1)
    after = text(found)
    labels = {**ONE, "reason": "OTHER"}
    assert values(before, labels) == {"nv_inference_request_failure": 0}
    assert values(after, labels) == {"nv_inference_request_failure": 1}


def test_a_scrape_of_many_versions_yields_to_the_event_loop() -> None:
    looked = list[int]()

    class Version(FakeVersion):
        @property
        def config(self) -> SimpleNamespace:
            looked.append(turns)
            return super().config

    versions = [Version(f"m{n}", "1", VersionStatistics(), n) for n in range(223)]
    loads = [(f"m{n}", n, 0) for n in range(2_000)]
    engine = FakeEngine(versions, loads, pieces=Pieces(0.0))  # a part is a piece on any machine
    server = collector(engine, Machine())
    turns = 0

    async def main() -> str:
        done = False

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        found = await scrape_in_turns(server, process_registry())
        done = True
        await beside
        return found.decode()

    found = asyncio.run(main())
    assert turns >= len(found.splitlines()) // 1_000
    assert len(set(looked)) > 40  # nor is everything read at once
    assert found.count("\nheadrace_model_loads_total{") == 4_000
    heads = [line for line in found.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads))
    pending = families(found)["nv_inference_pending_request_count"].samples
    assert [(sample.labels["model"], sample.value) for sample in pending] == [
        (f"m{n}", n) for n in range(223)
    ]


def gpu_families(gpus: GpuSeries) -> Iterator[Metric]:
    """GPU families in a scrape of a server without models."""
    names = ("nv_gpu", "nv_energy", "nv_pinned")
    return (
        part for part in collector(FakeEngine(), gpus=gpus).parts() if part.name.startswith(names)
    )


def test_gpu_metrics() -> None:
    readings = (
        GpuReading("GPU-a", 1000, 100, 0.25, 70.5, 300.0, 12.5),
        GpuReading("MIG-b", 2000, 200),
    )
    found = {
        (sample.name, sample.labels.get("gpu_uuid")): sample.value
        for family in gpu_families(GpuSeries(readings, (1024, 512)))
        for sample in family.samples
    }
    assert found == {
        ("nv_gpu_memory_total_bytes", "GPU-a"): 1000, ("nv_gpu_memory_total_bytes", "MIG-b"): 2000,
        ("nv_gpu_memory_used_bytes", "GPU-a"): 100, ("nv_gpu_memory_used_bytes", "MIG-b"): 200,
        ("nv_gpu_utilization", "GPU-a"): 0.25, ("nv_gpu_power_usage", "GPU-a"): 70.5,
        ("nv_gpu_power_limit", "GPU-a"): 300.0, ("nv_energy_consumption", "GPU-a"): 12.5,
        ("nv_pinned_memory_pool_total_bytes", None): 1024,
        ("nv_pinned_memory_pool_used_bytes", None): 512,
    }  # fmt: skip
    assert list(gpu_families(GpuSeries())) == []


def samples(families: list[Metric]) -> dict[str, dict[str, float]]:
    """Values of the samples of each family by the label beside those of the version."""
    found: dict[str, dict[str, float]] = {}
    for family in families:
        found[family.name] = {}
        for sample in family.samples:
            [more] = [v for k, v in sample.labels.items() if k not in ONE] or [""]
            found[family.name][more] = sample.value
    return found


def test_worker_metrics() -> None:
    counters = WorkerCounters()
    counters.ends[EndKind.HANG] += 2
    counters.recycled[RecycleReason.MAX_RSS] += 1
    series = WorkerSeries(3, {"m_0": 1000, "m_2": 2000}, counters, 4)
    assert samples(list(collected(WORKER_FAMILIES, [(ONE, series)]))) == {
        "headrace_workers": {"": 3},
        "headrace_workers_running": {"": 2},
        "headrace_worker_resident_bytes": {"m_0": 1000, "m_2": 2000},
        "headrace_worker_ends": {
            "exit": 0, "signal": 0, "hang": 2, "limit": 0, "nonsense": 0, "abandoned": 0,
        },
        "headrace_worker_recycles": {"max_rss": 1, "max_requests": 0},
        "headrace_quarantined_requests": {"": 4},
    }  # fmt: skip


def test_memory_of_a_process() -> None:
    assert resident_bytes(1) > 4096
    assert resident_bytes(2**30) == 0
