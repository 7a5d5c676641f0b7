"""Summaries and histograms of latencies under Triton's names."""

import math
from time import monotonic_ns

import pytest
from prometheus_client.core import Metric

from headrace.observability.latencies import (
    SummarisedStatistics,
    Window,
    first_response_family,
    summary_families,
)
from headrace.observability.responses import FirstResponses
from headrace.observability.statistics import VersionStatistics

LABELS = {"model": "m", "version": "1"}
MINUTE = 60 * 10**9


def samples(family: Metric) -> dict[tuple[str, str], float]:
    """Values by the end of the sample's name, and its quantile or bound."""
    return {
        (s.name.removeprefix(family.name), s.labels.get("quantile") or s.labels.get("le", "")): (
            s.value
        )
        for s in family.samples
    }


def test_quantiles_are_those_of_durations_that_were_there() -> None:
    window = Window()
    for n in range(1, 101):
        window.add(0, n, 2 * n, 3, 4, 5)
    found = window.quantiles([0.5, 0.99, 1.0], MINUTE - 1)
    assert found[0] == [50, 99, 100]
    assert found[1] == [100, 198, 200]
    assert found[2:] == [[3] * 3, [4] * 3, [5] * 3]


def test_what_is_old_is_left_out() -> None:
    window = Window()
    window.add(0, 1, 1, 1, 1, 1)
    window.add(9, 7, 7, 7, 7, 7)
    assert window.quantiles([0.0], MINUTE)[0] == [7]
    assert all(
        math.isnan(value) for values in window.quantiles([0.5], 2 * MINUTE) for value in values
    )
    assert math.isnan(Window().quantiles([0.5], 0)[0][0])


def test_as_many_are_kept_as_there_is_room_for() -> None:
    window = Window()
    for n in range(10_000):
        window.add(n, n, 0, 0, 0, 0)
    low, high = window.quantiles([0.0, 1.0], 10_000)[0]
    assert (low, high) == (10_000 - 4096, 9_999)


def test_summaries_of_a_version() -> None:
    now = monotonic_ns()
    statistics = SummarisedStatistics()
    statistics.batch_succeeded(
        [now - 9_000_000, now - 8_000_000], 2, 2,
        now - 7_000_000, now - 6_000_000, now - 2_000_000, now,
    )  # fmt: skip
    statistics.request_completed(now - 4_000_000, 1, now - 3_000_000, now)
    assert statistics.success_count == 3
    families = {f.name: f for f in summary_families([(LABELS, statistics)], [0.5, 1.0])}
    request = samples(families["nv_inference_request_summary_us"])
    assert request == {
        ("", "0.5"): 8_000,
        ("", "1"): 9_000,
        ("_count", ""): 3,
        ("_sum", ""): 21_000,
    }
    queue = samples(families["nv_inference_queue_summary_us"])
    assert (queue["", "0.5"], queue["_sum", ""]) == (1_000, 4_000)
    infer = samples(families["nv_inference_compute_infer_summary_us"])
    assert (infer["", "1"], infer["_sum", ""]) == (4_000, 11_000)
    assert {f.type for f in families.values()} == {"summary"}
    assert len(families) == 5


def test_versions_that_keep_nothing_have_none() -> None:
    families = list(summary_families([(LABELS, VersionStatistics())], [0.5]))
    assert len(families) == 5
    assert not any(family.samples for family in families)


def test_first_responses() -> None:
    plain, many = VersionStatistics(), VersionStatistics()
    many.responses.first = first = FirstResponses((100.0, 500.0))
    for ms in (50, 100, 101, 9_000):
        first.observe(ms * 1_000_000)
    found = samples(first_response_family([(LABELS, plain), (LABELS, many)]))
    assert found == {
        ("_bucket", "100"): 2, ("_bucket", "500"): 3, ("_bucket", "+Inf"): 4,
        ("_count", ""): 4, ("_sum", ""): pytest.approx(9_251.0),
    }  # fmt: skip
