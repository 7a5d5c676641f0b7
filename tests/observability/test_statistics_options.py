"""The option `--metrics-config`."""

import pytest

from headrace.observability.statistics import QUANTILES, LatencyBounds, MetricsOptions


def test_default_series() -> None:
    assert MetricsOptions.of([]) == MetricsOptions(True, False, False, QUANTILES)


def test_valid_options() -> None:
    texts = [
        "counter_latencies=false", "histogram_latencies=1", "summary_latencies=TRUE",
        "summary_quantiles=0.5:0.05,0.9,1:0", "histogram_buckets=0.0005,1,2.5",
        "native_histograms=true",
    ]  # fmt: skip
    bounds = LatencyBounds((500_000, 1_000_000_000, 2_500_000_000), True)
    assert MetricsOptions.of(texts) == MetricsOptions(False, True, True, (0.5, 0.9, 1.0), bounds)


@pytest.mark.parametrize(("text", "told"), [
    ("latencies=true", "expected NAME=VALUE with one of counter_latencies"),
    ("counter_latencies", "expected NAME=VALUE with one of counter_latencies"),
    ("counter_latencies=maybe", "counter_latencies must be true or false, got 'maybe'"),
    ("summary_quantiles=0.5;0.9", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=1.5", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=nan", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=0.5:x", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=", "summary_quantiles must be numbers from 0 to 1"),
    ("native_histograms=8", "native_histograms must be true or false, got '8'"),
    ("histogram_buckets=", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=1,x", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=0,1", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=2,1", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=1,inf", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=1e-9", "histogram_buckets must be rising seconds"),
    ("histogram_buckets=" + ",".join(map(str, range(1, 300))), "at most 200, got 299"),
])  # fmt: skip
def test_invalid_options(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MetricsOptions.of([text])
