"""The servers that run a model elsewhere, as a scrape sees them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric


@dataclass(slots=True)
class EndpointSeries:
    """One server of a version.

    `requests` counts the calls that it was sent, each with a batch, `failures` those of them that
    it has not answered as a healthy server does. `serves` is whether it gets any.
    """

    name: str
    requests: int = 0
    failures: int = 0
    ejections: int = 0
    outstanding: int = 0
    serves: bool = False


def endpoint_families(
    found: Iterable[tuple[dict[str, str], Sequence[EndpointSeries]]],
) -> Iterator[Metric]:
    """The metric families, from the labels and the servers of each version that has any."""
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
    for labels, endpoints in found:
        for endpoint in endpoints:
            own = {**labels, "endpoint": endpoint.name}
            requests.add_sample(f"{requests.name}_total", own, endpoint.requests)
            failures.add_sample(f"{failures.name}_total", own, endpoint.failures)
            ejections.add_sample(f"{ejections.name}_total", own, endpoint.ejections)
            outstanding.add_sample(outstanding.name, own, endpoint.outstanding)
            healthy.add_sample(healthy.name, own, int(endpoint.serves))
    yield from (requests, failures, ejections, outstanding, healthy)
