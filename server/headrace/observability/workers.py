"""What has become of a model version's workers: counters, and the series that a scrape shows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class EndKind(StrEnum):
    """How a worker came to its end, unless the server wanted it to end."""

    EXIT = "exit"  # by itself, with whatever status
    SIGNAL = "signal"  # it crashed, or something else has killed it
    HANG = "hang"  # no sign of life
    LIMIT = "limit"  # a batch took longer than it may
    NONSENSE = "nonsense"  # it sent what makes no sense
    ABANDONED = "abandoned"  # it went on with what nobody waited for any more


class RecycleReason(StrEnum):
    """Why a worker was replaced while it was well; the name of the parameter that says when."""

    MAX_RSS = "max_rss"
    MAX_REQUESTS = "max_requests"


@dataclass(slots=True)
class WorkerCounters:
    """What has happened to the workers of one version so far."""

    ends: dict[EndKind, int] = field(default_factory=lambda: dict.fromkeys(EndKind, 0))
    recycled: dict[RecycleReason, int] = field(
        default_factory=lambda: dict.fromkeys(RecycleReason, 0)
    )


@dataclass(frozen=True, slots=True)
class WorkerSeries:
    """The workers of one version as a scrape sees them.

    `resident` has the bytes of each instance whose worker runs, `instances` counts all of them.
    """

    instances: int
    resident: Mapping[str, int]
    counters: WorkerCounters
    quarantined: int


def worker_families(
    found: Iterable[tuple[dict[str, str], WorkerSeries]],
) -> "Iterator[Metric]":
    """The metric families, from the labels and the workers of each version that has any."""
    from prometheus_client.core import Metric  # as late as that: see `metrics`

    wanted = Metric("headrace_workers", "Worker processes that there should be", "gauge")
    running = Metric("headrace_workers_running", "Worker processes that run", "gauge")
    resident = Metric(
        "headrace_worker_resident_bytes", "Memory of a worker process in use", "gauge"
    )
    ends = Metric(
        "headrace_worker_ends", "Worker processes that ended unasked, by how they did", "counter"
    )
    recycled = Metric(
        "headrace_worker_recycles", "Worker processes replaced while they were well", "counter"
    )
    refused = Metric(
        "headrace_quarantined_requests", "Requests refused because workers died of their input",
        "counter",
    )  # fmt: skip
    for labels, series in found:
        wanted.add_sample(wanted.name, labels, series.instances)
        running.add_sample(running.name, labels, len(series.resident))
        for instance, size in series.resident.items():
            resident.add_sample(resident.name, {**labels, "instance": instance}, size)
        for kind, count in series.counters.ends.items():
            ends.add_sample(f"{ends.name}_total", {**labels, "reason": kind.value}, count)
        for reason, count in series.counters.recycled.items():
            recycled.add_sample(f"{recycled.name}_total", {**labels, "reason": reason.value}, count)
        refused.add_sample(f"{refused.name}_total", labels, series.quarantined)
    yield from (wanted, running, resident, ends, recycled, refused)
