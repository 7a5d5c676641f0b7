"""Figures of a cell."""

import pytest

from benchmarks.summary import Repetition, figures, percentile, ratio, spread


@pytest.mark.parametrize(("values", "share", "expected"), [
    ([], 0.5, 0.0), ([7.0], 0.5, 7.0), ([7.0], 0.99, 7.0), ([1.0, 2.0, 3.0, 4.0], 0.0, 1.0),
    ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([1.0, 2.0, 3.0, 4.0], 0.51, 3.0),
    ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0), ([float(n) for n in range(1, 101)], 0.99, 99.0),
    ([float(n) for n in range(1, 102)], 0.99, 100.0),
])  # fmt: skip
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_spread_is_relative_to_the_median() -> None:
    assert spread([90.0, 100.0, 115.0]) == 0.25
    assert spread([0.0, 0.0]) == 0.0


def test_ratio_pairs_neighbouring_measurements() -> None:
    assert ratio([10.0, 20.0, 90.0], [5.0, 10.0, 30.0]) == 2.0
    assert ratio([1.0, 6.0], [0.0, 3.0]) == 2.0
    assert ratio([1.0], [0.0]) is None


def test_figures_are_medians_and_errors_a_sum() -> None:
    runs = [
        Repetition(2.0, 200, 0.001, 0.004, {"a": 1}, 0.5, 1.0, 3_000_000, 2.0),
        Repetition(2.0, 400, 0.002, 0.005, {}, 0.6, 2.0, 5_000_000, 4.0),
        Repetition(2.0, 300, 0.003, 0.009, {"b": 2}, 0.7, 1.8, 4_000_000, 3.0),
    ]
    found = figures(runs)
    assert (found.throughput, found.p50, found.p99) == (150.0, 0.002, 0.005)
    assert found.errors == 3
    assert found.spread == pytest.approx(100 / 150)
    assert (found.server_cpu, found.client_cpu) == pytest.approx((0.9, 0.3))
    assert found.cpu_per_1000 == pytest.approx(5.0)
    assert (found.rss, found.mean_batch) == (4_000_000, 3.0)


def test_figures_of_an_unreachable_or_unobservable_server() -> None:
    found = figures([Repetition(0.0, 0, 0.0, 0.0, {"no connection": 1}, 0.0)])
    assert (found.throughput, found.errors, found.client_cpu) == (0.0, 1, 0.0)
    assert (found.server_cpu, found.cpu_per_1000, found.rss, found.mean_batch) == (None,) * 4
