"""What the traffic between a model's versions comes to: counters, and the series of a scrape."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.observability.statistics import LATENCY_BOUNDS, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(slots=True)
class VersionLedger:
    """What the rules have sent to one version.

    `routed` requests that it took, `refused` those that it did not because nothing can execute
    them, which no other counter has. `rollbacks` is how often it has lost its traffic for being
    bad.
    """

    routed: int = 0
    refused: int = 0
    rollbacks: int = 0


@dataclass(slots=True)
class ShadowLedger:
    """What has become of the copies for one version; `durations` of those that succeeded."""

    success: int = 0
    failure: int = 0
    dropped: int = 0
    durations: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True)
class TrafficSeries:
    """The traffic of one model as a scrape sees it; everything is by version."""

    model: str
    shares: Mapping[str, float]
    ledgers: Mapping[str, VersionLedger]
    shadows: Mapping[str, ShadowLedger]


def traffic_families(found: Iterable[TrafficSeries]) -> "Iterator[Metric]":
    """The metric families."""
    from prometheus_client.core import (  # as late as that: see `metrics`
        HistogramMetricFamily,
        Metric,
    )

    weight = Metric(
        "headrace_traffic_weight",
        "Share of the requests without a version that a version gets by the rules, 0 to 1",
        "gauge",
    )
    routed = Metric(
        "headrace_traffic_requests", "Requests that the rules have sent to a version", "counter"
    )
    rollbacks = Metric(
        "headrace_traffic_rollbacks", "How often a version has lost its traffic", "counter"
    )
    shadows = Metric(
        "headrace_shadow_requests", "Copies for a shadow version by what became of them", "counter"
    )
    durations = HistogramMetricFamily(
        "headrace_shadow_duration_seconds",
        "Seconds from submitting a copy to its answer",
        labels=(),
    )
    for series in found:
        for version, share in series.shares.items():
            weight.add_sample(weight.name, {"model": series.model, "version": version}, share)
        for version, ledger in series.ledgers.items():
            labels = {"model": series.model, "version": version}
            routed.add_sample(f"{routed.name}_total", labels, ledger.routed)
            rollbacks.add_sample(f"{rollbacks.name}_total", labels, ledger.rollbacks)
        for version, shadow in series.shadows.items():
            labels = {"model": series.model, "version": version}
            for outcome in ("success", "failure", "dropped"):
                shadows.add_sample(
                    f"{shadows.name}_total",
                    {**labels, "outcome": outcome},
                    getattr(shadow, outcome),
                )
            _add(durations, labels, shadow.durations)
    yield from (weight, routed, rollbacks, shadows, durations)


def _add(family: "Metric", labels: dict[str, str], histogram: Histogram) -> None:
    running = 0
    bounds = [*(str(bound / 1e9) for bound in LATENCY_BOUNDS), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        running += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, running)
    family.add_sample(f"{family.name}_count", labels, running)
    family.add_sample(f"{family.name}_sum", labels, histogram.total_ns / 1e9)
