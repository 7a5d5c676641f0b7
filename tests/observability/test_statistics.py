"""Statistics of one model version, as the protocol counts them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observability.statistics import (
    FAILURE_REASONS,
    LATENCY_BOUNDS,
    Answers,
    Histogram,
    LatencyBounds,
    VersionStatistics,
)


def test_a_batch_counts_for_each_request_and_once_by_its_size() -> None:
    counted = VersionStatistics()
    counted.batch_succeeded([100, 150], 3, 3, 200, 210, 260, 265)
    counted.batch_succeeded([300], 3, 3, 300, 301, 303, 306)
    assert counted.success_count == 3
    assert counted.inference_count == 6
    assert counted.execution_count == 2
    assert counted.queue_ns == 100 + 50 + 0
    assert counted.success_ns == 165 + 115 + 6
    assert (
        counted.compute_input_ns == 2 * 10 + 1
    )  # the whole batch's time, for each of its requests
    assert counted.compute_infer_ns == 2 * 50 + 2
    assert counted.compute_output_ns == 2 * 5 + 3
    (batch,) = counted.batches.values()
    assert counted.batches.keys() == {3}
    assert batch.count == 2
    times = (batch.compute_input_ns, batch.compute_infer_ns, batch.compute_output_ns)
    assert times == (11, 52, 8)
    assert counted.last_inference_ms > 0


def test_a_batch_without_clients_counts_as_an_execution_only() -> None:
    counted = VersionStatistics()
    counted.batch_succeeded([], 0, 4, 200, 210, 260, 265)
    assert (counted.success_count, counted.inference_count, counted.execution_count) == (0, 0, 1)
    assert (counted.queue_ns, counted.success_ns, counted.compute_infer_ns) == (0, 0, 0)
    assert counted.batches[4].compute_infer_ns == 50
    assert sum(counted.compute_histogram.counts) == 0


def test_failures_count_by_reason() -> None:
    assert FAILURE_REASONS == ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    for reason in FAILURE_REASONS:
        counted = VersionStatistics()
        assert counted.failures == dict.fromkeys(FAILURE_REASONS, 0)
        counted.request_failed(reason, 7)
        counted.request_failed(reason, 8)
        assert counted.failures == {r: 2 * (r == reason) for r in FAILURE_REASONS}
        assert (counted.fail_count, counted.fail_ns, counted.success_count) == (2, 15, 0)
        assert counted.last_inference_ms == 0
    with pytest.raises(KeyError):
        VersionStatistics().request_failed("BAD LUCK", 7)


def test_bounds_ascend_in_whole_nanoseconds() -> None:
    assert LATENCY_BOUNDS[0] == 50_000
    assert LATENCY_BOUNDS[-1] == 600_000_000_000
    assert all(low < high for low, high in pairwise(LATENCY_BOUNDS))


@pytest.mark.parametrize(("duration", "index"), [
    (0, 0), (LATENCY_BOUNDS[0], 0),  # a bound is part of its bucket
    (LATENCY_BOUNDS[0] + 1, 1), (LATENCY_BOUNDS[3], 3),
    (LATENCY_BOUNDS[-1], len(LATENCY_BOUNDS) - 1), (LATENCY_BOUNDS[-1] + 1, len(LATENCY_BOUNDS)),
])  # fmt: skip
def test_a_histogram_counts_by_upper_bounds(duration: int, index: int) -> None:
    histogram = Histogram()
    histogram.observe(duration)
    histogram.observe(duration, 2)
    assert histogram.counts[index] == 3
    assert sum(histogram.counts) == 3
    assert histogram.total_ns == 3 * duration


def test_a_batch_waits_while_an_instance_is_idle() -> None:
    counted = VersionStatistics()
    # An instance is idle from 60 microseconds on: one request waited for it, too.
    counted.batch_succeeded([0, 70_000], 2, 2, 100_000, 103_000, 400_000, 402_000, 60_000)
    assert counted.batch_wait_histogram.total_ns == 40_000 + 30_000
    assert counted.queue_histogram.total_ns == 100_000 + 30_000
    assert counted.transfer_histogram.total_ns == 2 * 5_000
    histograms = counted.batch_wait_histogram, counted.transfer_histogram
    assert [sum(histogram.counts) for histogram in histograms] == [2, 2]


def test_histograms_with_other_buckets_count_for_the_usual_ones_too() -> None:
    bounds = LatencyBounds((70_000, 3_000_000), native=True)
    histogram = Histogram(bounds.counted)
    durations = (1, 50_000, 60_000, 70_000, 70_001, 2_999_999, 3_000_001, 10**12)
    for duration in durations:
        histogram.observe(duration)
    assert histogram.within(bounds.buckets) == [4, 2, 2]
    usual = Histogram()
    for duration in durations:
        usual.observe(duration)
    assert histogram.within(LATENCY_BOUNDS) == usual.counts


def test_answers_are_counted_by_class_and_reported_to_another_process() -> None:
    front, engine = Answers(), Answers()
    front.of("http", "infer").answered(200, 80_000)
    front.of("http", "infer", identity="key").answered(200, 90_000)
    front.of("http", "infer").of_class("key").answered(404, 1)
    front.of("grpc", "infer", identity="token").answered(0, 5)
    for _ in range(2):  # the second report is empty
        engine.add(json.loads(json.dumps(front.take())))
    assert list(engine.samples()) == [
        ("grpc", "infer", "OK", 1), ("http", "infer", "200", 2), ("http", "infer", "404", 1),
    ]  # fmt: skip
    found = [(*key, timed.total_ns, sum(timed.counts)) for *key, timed in engine.durations()]
    assert found == [
        ("grpc", "infer", "token", "OK", 5, 1),
        ("http", "infer", "anonymous", "200", 80_000, 1),
        ("http", "infer", "key", "200", 90_000, 1),
        ("http", "infer", "key", "404", 1, 1),
    ]


@pytest.mark.parametrize("grown", [
    [1], [["http", "infer", "key", "200", 1, 1, []]], [["http", "infer", "key", 999, 1, 1, []]],
    [["http", "infer", "key", 200, 1, 1, [[999, 1]]]], [["http", "infer", "key", 200, 1, 1, [1]]],
])  # fmt: skip
def test_malformed_reports_of_answers(grown: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        Answers().add(grown)


def test_histograms_hold_every_successful_request() -> None:
    counted = VersionStatistics()
    counted.batch_succeeded([0, 40_000], 2, 2, 100_000, 100_000, 400_000, 400_000)
    assert counted.queue_histogram.total_ns == 100_000 + 60_000
    assert counted.compute_histogram.total_ns == 2 * 300_000
    assert counted.request_histogram.total_ns == 400_000 + 360_000
    histograms = counted.queue_histogram, counted.compute_histogram, counted.request_histogram
    assert [sum(histogram.counts) for histogram in histograms] == [2, 2, 2]


@given(
    st.lists(st.integers(0, 4_000_000), min_size=1, max_size=70),
    st.integers(0, 3_000_000), st.integers(0, 4_000_000), st.booleans(),
)  # fmt: skip
def test_large_batches_are_counted_as_single_requests(
    ages: list[int], computed: int, free: int, native: bool
) -> None:
    bounds = LatencyBounds(native=native)
    started = 5_000_000
    ended = started + computed
    arrived = [started - age for age in ages]
    counted = VersionStatistics(bounds=bounds)
    counted.batch_succeeded(arrived, len(ages), len(ages), started, started, ended, ended, free)
    queue, formed, request = (Histogram(bounds.counted) for _ in range(3))
    for moment in arrived:
        queue.observe(started - moment)
        formed.observe(started - max(moment, free))
        request.observe(ended - moment)
    for found, expected in (
        (counted.queue_histogram, queue), (counted.batch_wait_histogram, formed),
        (counted.request_histogram, request),
    ):  # fmt: skip
        assert (found.counts, found.total_ns) == (expected.counts, expected.total_ns)
