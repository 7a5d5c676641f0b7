"""The backends of a version that has several, as a scrape sees them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(slots=True)
class BackendCounts:
    """What has become of one backend of a version.

    `requests` counts those that it has answered, be it with an error, `batches` those that it has
    run, `switches` how often requests went over to it from another one.
    """

    requests: int = 0
    batches: int = 0
    switches: int = 0


@dataclass(frozen=True, slots=True)
class BackendSeries:
    """A backend as it is now; `active` is whether it is the one that gets requests."""

    name: str
    counts: BackendCounts
    active: bool


def backend_families(
    found: Iterable[tuple[dict[str, str], Sequence[BackendSeries]]],
) -> "Iterator[Metric]":
    """The metric families, from the labels and the backends of each version that has several."""
    from prometheus_client.core import Metric  # as late as that: see `metrics`

    requests = Metric(
        "headrace_backend_requests", "Requests that a backend of a model has answered", "counter"
    )
    batches = Metric(
        "headrace_backend_batches", "Batches that a backend of a model has run", "counter"
    )
    switches = Metric(
        "headrace_backend_switches", "Times that requests went over to a backend of a model",
        "counter",
    )  # fmt: skip
    active = Metric("headrace_backend_active", "Whether a backend is the one that gets requests",
                    "gauge")  # fmt: skip
    for labels, backends in found:
        for backend in backends:
            own = {**labels, "backend": backend.name}
            requests.add_sample(f"{requests.name}_total", own, backend.counts.requests)
            batches.add_sample(f"{batches.name}_total", own, backend.counts.batches)
            switches.add_sample(f"{switches.name}_total", own, backend.counts.switches)
            active.add_sample(active.name, own, int(backend.active))
    yield from (requests, batches, switches, active)
