"""The servers that run a model elsewhere, as a scrape sees them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(slots=True)
class EndpointCounts:
    """What has become of one server of a version.

    `requests` counts the calls that it was sent, each with a batch, `failures` those of them that
    it has not answered as a healthy server does, `ejections` how often it was left out for those.
    """

    requests: int = 0
    failures: int = 0
    ejections: int = 0


@dataclass(slots=True)
class EndpointSeries:
    """A server as it is now.

    `outstanding` calls are under way, `serves` is whether it gets any. `sequences` have their state
    there; None for a model without sequences. In `differences` ways it has the model otherwise than
    was asked for.
    """

    name: str
    counts: EndpointCounts
    outstanding: int = 0
    serves: bool = False
    sequences: int | None = None
    differences: int = 0


def endpoint_families(
    found: Iterable[tuple[dict[str, str], Sequence[EndpointSeries]]],
) -> "Iterator[Metric]":
    """The metric families, from the labels and the servers of each version that has any."""
    from prometheus_client.core import Metric  # as late as that: see `metrics`

    requests = Metric("headrace_endpoint_requests", "Calls to a server of a model", "counter")
    failures = Metric(
        "headrace_endpoint_failures", "Calls that a server of a model has not answered well",
        "counter",
    )  # fmt: skip
    ejections = Metric(
        "headrace_endpoint_ejections", "Times that a server was left out for its failures",
        "counter",
    )  # fmt: skip
    outstanding = Metric("headrace_endpoint_outstanding", "Calls under way", "gauge")
    healthy = Metric("headrace_endpoint_healthy", "Whether a server is sent calls", "gauge")
    sequences = Metric("headrace_endpoint_sequences", "Sequences whose state a server has", "gauge")
    drift = Metric(
        "headrace_endpoint_differences", "Ways in which a server has a model otherwise than asked",
        "gauge",
    )  # fmt: skip
    # Dashboards may have these names: they count calls of a kind that is not made any more.
    hedges = Metric("headrace_endpoint_hedges", "Always 0", "counter")
    wins = Metric("headrace_endpoint_hedge_wins", "Always 0", "counter")
    for labels, endpoints in found:
        for endpoint in endpoints:
            own, counts = {**labels, "endpoint": endpoint.name}, endpoint.counts
            requests.add_sample(f"{requests.name}_total", own, counts.requests)
            failures.add_sample(f"{failures.name}_total", own, counts.failures)
            ejections.add_sample(f"{ejections.name}_total", own, counts.ejections)
            outstanding.add_sample(outstanding.name, own, endpoint.outstanding)
            healthy.add_sample(healthy.name, own, int(endpoint.serves))
            if endpoint.sequences is not None:
                sequences.add_sample(sequences.name, own, endpoint.sequences)
            drift.add_sample(drift.name, own, endpoint.differences)
            for gone in (hedges, wins):
                gone.add_sample(f"{gone.name}_total", own, 0)
    yield from (requests, failures, ejections, outstanding, healthy, sequences, drift)
    yield from (hedges, wins)
