"""Latency summaries and histograms under Triton's names."""

import math
from time import monotonic_ns

import pytest
from prometheus_client.core import Metric

from headrace.engine.metrics import collected, version_families
from headrace.engine.report import VersionReport
from headrace.observability.statistics import (
    FIRST_RESPONSE,
    LATENCY_KINDS,
    Histogram,
    MetricsOptions,
    VersionStatistics,
    Window,
)

LABELS = {"model": "m", "version": "1"}
MINUTE = 60 * 10**9


def samples(family: Metric) -> dict[tuple[str, str], float]:
    """Values by the end of the sample's name and its quantile or bucket."""
    return {
        (s.name.removeprefix(family.name), s.labels.get("quantile") or s.labels.get("le", "")): (
            s.value
        )
        for s in family.samples
    }


def test_quantiles_are_observed_durations() -> None:
    window = Window()
    for n in range(1, 101):
        window.add(0, n, 2 * n, 3, 4, 5)
    found = [window.quantiles(kind, [0.5, 0.99, 1.0], MINUTE - 1) for kind in LATENCY_KINDS]
    assert found[0] == [50, 99, 100]
    assert found[1] == [100, 198, 200]
    assert found[2:] == [[3] * 3, [4] * 3, [5] * 3]


def test_old_durations_are_left_out() -> None:
    window = Window()
    window.add(0, 1, 1, 1, 1, 1)
    window.add(9, 7, 7, 7, 7, 7)
    assert window.quantiles("request", [0.0], MINUTE) == [7]
    for kind in LATENCY_KINDS:
        assert all(math.isnan(value) for value in window.quantiles(kind, [0.5], 2 * MINUTE))
    assert math.isnan(Window().quantiles("request", [0.5], 0)[0])


def test_the_number_of_durations_is_bounded() -> None:
    window = Window()
    for n in range(10_000):
        window.add(n, n, 0, 0, 0, 0)
    low, high = window.quantiles("request", [0.0, 1.0], 10_000)
    assert (low, high) == (10_000 - 4096, 9_999)


def families(statistics: VersionStatistics, options: MetricsOptions) -> dict[str, Metric]:
    """Families of a version that only these options add, by name."""
    report = VersionReport(statistics)
    plain = {family.name for family in version_families(MetricsOptions())}
    asked = [family for family in version_families(options) if family.name not in plain]
    return {metric.name: metric for metric in collected(asked, [(LABELS, report)])}


def summaries(statistics: VersionStatistics, *quantiles: float) -> dict[str, Metric]:
    return families(statistics, MetricsOptions(summaries=True, quantiles=quantiles))


def test_summaries_of_a_version() -> None:
    now = monotonic_ns()
    statistics = VersionStatistics(summaries=True)
    statistics.batch_succeeded(
        [now - 9_000_000, now - 8_000_000], 2, 2,
        now - 7_000_000, now - 6_000_000, now - 2_000_000, now,
    )  # fmt: skip
    statistics.request_completed(now - 4_000_000, 1, now - 3_000_000, now)
    assert statistics.success_count == 3
    found = summaries(statistics, 0.5, 1.0)
    request = samples(found["nv_inference_request_summary_us"])
    assert request == {
        ("", "0.5"): 8_000, ("", "1"): 9_000, ("_count", ""): 3, ("_sum", ""): 21_000,
    }  # fmt: skip
    queue = samples(found["nv_inference_queue_summary_us"])
    assert (queue["", "0.5"], queue["_sum", ""]) == (1_000, 4_000)
    infer = samples(found["nv_inference_compute_infer_summary_us"])
    assert (infer["", "1"], infer["_sum", ""]) == (4_000, 11_000)
    assert {f.type for f in found.values()} == {"summary"}
    assert len(found) == 5


def test_versions_without_latencies_have_no_summaries() -> None:
    found = summaries(VersionStatistics(), 0.5)
    assert len(found) == 5
    assert not any(family.samples for family in found.values())


def test_first_responses() -> None:
    plain, many = VersionStatistics(), VersionStatistics()
    many.responses.first = first = Histogram((100e6, 500e6))
    for ms in (50, 100, 101, 9_000):
        first.observe(ms * 1_000_000)
    options = MetricsOptions(histograms=True)
    assert samples(families(many, options)[FIRST_RESPONSE]) == {
        ("_bucket", "100"): 2, ("_bucket", "500"): 3, ("_bucket", "+Inf"): 4,
        ("_count", ""): 4, ("_sum", ""): pytest.approx(9_251.0),
    }  # fmt: skip
    assert not families(plain, options)[FIRST_RESPONSE].samples
