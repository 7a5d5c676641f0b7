"""Scrapes of metrics, and the results of two of them: rates, quantiles, restarts."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from headrace.cli.commands.top_table import (
    Sample,
    Scrape,
    activity,
    grown_counts,
    parse,
    quantile,
)
from tests.protocol.strategies import PROPERTY

_BEFORE = """
nv_inference_request_success{model="m",version="1"} 10
nv_inference_request_failure{model="m",version="1",reason="OTHER"} 1
nv_inference_request_failure{model="m",version="1",reason="BACKEND"} 1
nv_inference_count{model="m",version="1"} 30
nv_inference_exec_count{model="m",version="1"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.001"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.01"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="+Inf"} 10
headrace_requests_total{door="http",operation="infer",status="200"} 5
headrace_requests_total{door="grpc",operation="infer",status="OK"} 7
headrace_overloaded_total 0
process_cpu_seconds_total 1
"""
_AFTER = """
nv_inference_request_success{model="m",version="1",_team="a"} 30
nv_inference_request_success{model="m",version="2"} 4
nv_inference_request_failure{model="m",version="1",reason="OTHER"} 2
nv_inference_request_failure{model="m",version="1",reason="BACKEND"} 2
nv_inference_count{model="m",version="1"} 110
nv_inference_exec_count{model="m",version="1"} 30
nv_inference_pending_request_count{model="m",version="1"} 5
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.001"} 20
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.01"} 30
headrace_request_duration_seconds_bucket{model="m",version="1",le="+Inf"} 30
headrace_model_memory_bytes{model="m",version="1"} 1048576
headrace_model_instances{model="m",version="1",kind="thread"} 2
headrace_requests_total{door="http",operation="infer",status="200"} 9
headrace_requests_total{door="http",operation="infer",status="400"} 6
headrace_requests_total{door="grpc",operation="infer",status="OK"} 7
headrace_requests_total{door="grpc",operation="infer",status="NOT_FOUND"} 2
headrace_overloaded_total 6
headrace_ready 1
headrace_admitted_requests 3
headrace_admitted_requests_limit 100
process_cpu_seconds_total 2
process_resident_memory_bytes 2097152
"""


def test_rates_between_two_scrapes() -> None:
    now = activity(Scrape(10.0, parse(_BEFORE)), Scrape(12.0, parse(_AFTER)))
    first, second = now.versions
    assert (first.model, first.version, second.version) == ("m", "1", "2")
    assert (first.requests_per_second, first.failures_per_second) == (10, 1)
    assert (first.rows_per_second, first.batches_per_second) == (40, 10)
    assert (first.rows_per_batch, first.waiting_requests, first.memory_bytes) == (4, 5, 1 << 20)
    assert (first.instances, second.instances) == ({"thread": 2}, {})
    assert first.latency_seconds == {
        "p50": 0.001, "p90": pytest.approx(0.0082), "p99": pytest.approx(0.00982),
    }  # fmt: skip
    assert first.queue_seconds == {"p50": None, "p90": None, "p99": None}
    assert second.requests_per_second == 2
    assert second.rows_per_batch is second.memory_bytes is None
    assert (now.seconds, now.requests_per_second) == (2, 12)
    assert (now.failures_per_second, now.refused_per_second) == (1, 3)
    assert [(e.door, e.status, e.per_second) for e in now.answers] == [
        ("http", "400", 3), ("http", "200", 2), ("grpc", "NOT_FOUND", 1),
    ]  # fmt: skip
    assert [e.status for e in now.errors] == ["400", "NOT_FOUND"]
    assert first.failures_per_second_by_reason == {"OTHER": 0.5, "BACKEND": 0.5}
    assert second.reason == ""
    assert (now.ready, now.admitted_requests, now.admitted_requests_limit) == (True, 3, 100)
    assert (now.cpu, now.resident_bytes) == (0.5, 2 << 20)


def test_a_restarted_server() -> None:
    now = activity(Scrape(10.0, parse(_AFTER)), Scrape(11.0, parse(_BEFORE)))
    [version] = now.versions
    assert (version.requests_per_second, version.rows_per_second) == (10, 30)
    assert version.failures_per_second == 2
    assert version.latency_seconds["p50"] == 0.0005
    assert (now.ready, now.resident_bytes, now.cpu) == (False, None, 1)


def test_an_empty_scrape() -> None:
    now = activity(Scrape(1.0, {}), Scrape(1.0, {}))
    assert (now.versions, now.requests_per_second, now.cpu) == ([], 0, None)


@pytest.mark.parametrize(("counts", "share", "value"), [
    ([], 0.5, None), ([(1, 0), (math.inf, 0)], 0.5, None), ([(1, 4), (math.inf, 4)], 0.5, 0.5),
    ([(1, 0), (2, 4), (math.inf, 4)], 0.25, 1.25),
    ([(1, 1), (2, 1), (math.inf, 2)], 0.99, 2),  # above all bounds
    ([(math.inf, 2)], 0.5, 0),
])  # fmt: skip
def test_quantiles(counts: list[tuple[float, float]], share: float, value: float | None) -> None:
    assert quantile(counts, share) == value


@PROPERTY
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.floats(0.01, 1))
def test_a_quantile_lies_in_its_bucket(steps: list[int], share: float) -> None:
    total, counts = 0, []
    for bound, step in enumerate(steps, 1):
        total += step
        counts.append((float(bound), float(total)))
    value = quantile(counts, share)
    if not total:
        assert value is None
        return
    assert value is not None
    holding = next(bound for bound, count in counts if count >= share * total)
    assert holding - 1 <= value <= holding


def test_counts_that_grow() -> None:
    assert grown_counts([(1, 2), (2, 3)], [(1, 3), (2, 5)]) == [(1, 1), (2, 2)]
    assert grown_counts([(1, 2), (2, 3)], [(1, 1), (2, 1)]) == [(1, 1), (2, 1)]


# --- Prometheus' text format, as prometheus_client writes it


_VALUES = st.text(st.characters(exclude_categories=["Cs"]))


@PROPERTY
@given(st.dictionaries(st.tuples(_VALUES, _VALUES), st.floats(allow_nan=False), max_size=5))
def test_written_metrics_are_read(values: dict[tuple[str, str], float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "Help\nwith lines", ["a", "b"], registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    samples = parse(generate_latest(registry).decode()).get("g", [])
    assert {(s.labels["a"], s.labels["b"]): s.value for s in samples} == values


def test_histograms() -> None:
    registry = CollectorRegistry()
    Histogram("h", "Help", buckets=(1, 2), registry=registry).observe(1.5)
    samples = parse(generate_latest(registry).decode())
    assert samples["h_bucket"] == [
        Sample({"le": "1.0"}, 0), Sample({"le": "2.0"}, 1), Sample({"le": "+Inf"}, 1)
    ]  # fmt: skip
    assert samples["h_sum"] == [Sample({}, 1.5)]


def test_timestamps_behind_values() -> None:
    assert parse('x{a="}",} 3 1700000000\n') == {"x": [Sample({"a": "}"}, 3)]}


@PROPERTY
@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(ValueError):
        parse(text)


def test_a_page_of_another_kind() -> None:
    with pytest.raises(ValueError, match="not a line of metrics: <html>"):
        parse("<html>")
