"""The option `--metrics-config`."""

import pytest

from headrace.observability.statistics import QUANTILES, MetricsOptions


def test_default_series() -> None:
    assert MetricsOptions.of([]) == MetricsOptions(True, False, False, QUANTILES)


def test_valid_options() -> None:
    texts = [
        "counter_latencies=false", "histogram_latencies=1", "summary_latencies=TRUE",
        "summary_quantiles=0.5:0.05,0.9,1:0",
    ]  # fmt: skip
    assert MetricsOptions.of(texts) == MetricsOptions(False, True, True, (0.5, 0.9, 1.0))


@pytest.mark.parametrize(("text", "told"), [
    ("latencies=true", "expected NAME=VALUE with one of counter_latencies"),
    ("counter_latencies", "expected NAME=VALUE with one of counter_latencies"),
    ("counter_latencies=maybe", "counter_latencies must be true or false, got 'maybe'"),
    ("summary_quantiles=0.5;0.9", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=1.5", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=nan", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=0.5:x", "summary_quantiles must be numbers from 0 to 1"),
    ("summary_quantiles=", "summary_quantiles must be numbers from 0 to 1"),
])  # fmt: skip
def test_invalid_options(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MetricsOptions.of([text])
