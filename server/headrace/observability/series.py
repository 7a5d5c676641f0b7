"""Metric families, and the values that they are read from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.observability.statistics import (
    BackendCounts,
    EndpointCounts,
    Histogram,
    WorkerCounters,
)

S = TypeVar("S", contravariant=True)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_TRUE, _FALSE = ("true", "1"), ("false", "0")


class Buckets(NamedTuple):
    """A histogram: counts up to each bound and above all of them; the sum of the values."""

    bounds: Sequence[str]
    counts: Sequence[int]
    total: float


def in_seconds(histogram: Histogram) -> Buckets:
    """The buckets of a histogram of nanoseconds, in seconds."""
    bounds = [str(bound / 1e9) for bound in histogram.bounds]
    return Buckets(bounds, histogram.counts, histogram.total_ns / 1e9)


class Quantiles(NamedTuple):
    """A summary: values by quantile, the number of observations, and the sum of their values."""

    values: Mapping[str, float]
    observed: int
    total: float


Reading = float | Buckets | Quantiles | None


@dataclass(frozen=True, slots=True)
class Family(Generic[S]):
    """A metric family: `name` is that of its samples, `kind` the Prometheus type.

    `read` returns the value of a source, None for no sample, or a mapping of values by label value,
    or by a tuple of the values of the `labels`.
    """

    name: str
    kind: str
    read: Callable[[S], Reading | Mapping[Any, Reading]]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSeries:
    """The workers of one version, for a scrape.

    `resident` has the bytes of each instance with a running worker, `instances` counts all of them.
    """

    instances: int
    resident: Mapping[str, int]
    counters: WorkerCounters
    quarantined: int


# A family with its sources and their labels.
Sourced = tuple[Family[Any], Sequence[tuple[Mapping[str, str], Any]]]


@dataclass(slots=True)
class EndpointSeries:
    """The current state of an upstream.

    `outstanding` is the number of calls in flight, `serves` is true if it receives calls.
    `sequences` is the number of sequences with their state there; None for a model without
    sequences. `differences` counts deviations of its model from the requested configuration.
    """

    name: str
    counts: EndpointCounts
    outstanding: int = 0
    serves: bool = False
    sequences: int | None = None
    differences: int = 0


@dataclass(frozen=True, slots=True)
class BackendSeries:
    """The current state of a backend; `active` is true if it gets requests."""

    name: str
    counts: BackendCounts
    active: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of a GPU at one moment; None for values that it does not report.

    Memory in bytes, `utilization` from 0 to 1, power in watts, `energy` in joules since the driver
    was loaded.
    """

    uuid: str
    memory_total: int
    memory_used: int
    utilization: float | None = None
    power_usage: float | None = None
    power_limit: float | None = None
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """GPUs for a scrape, and the bytes of page-locked memory: total, and in use."""

    readings: Sequence[GpuReading] = ()
    pinned: tuple[int, int] | None = None


class MemoryCounts(NamedTuple):
    """The number of models in memory, their limit in bytes, and evictions so far."""

    models: int
    budget: int
    evictions: int


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """`counters` of microseconds, `histograms` and `summaries` under Triton's names.

    `quantiles` are those of the summaries.
    """

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = QUANTILES

    @classmethod
    def of(cls, texts: Sequence[str]) -> "MetricsOptions":
        """Parse texts such as `summary_latencies=true`; raises `ValueError`.

        Quantiles may be given with an error, such as `0.5:0.05`, as in Triton; it is ignored, since
        quantiles are exact here.
        """
        found: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if name not in _NAMES or not equals:
                raise ValueError(
                    f"expected NAME=VALUE with one of {', '.join(_NAMES)}, got {text!r}"
                )
            found[name] = value
        default = cls()
        return cls(
            _flag(found, "counter_latencies", default.counters),
            _flag(found, "histogram_latencies", default.histograms),
            _flag(found, "summary_latencies", default.summaries),
            _quantiles(found["summary_quantiles"]) if "summary_quantiles" in found else QUANTILES,
        )


_NAMES = ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")


def _flag(found: dict[str, str], name: str, default: bool) -> bool:
    if name not in found:
        return default
    text = found[name].lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name} must be true or false, got {found[name]!r}")
    return text in _TRUE


def _quantiles(text: str) -> tuple[float, ...]:
    quantiles = []
    for part in text.split(","):
        quantile, colon, error = part.partition(":")
        try:
            numbers = [float(quantile), *([float(error)] if colon else [])]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= number <= 1 for number in numbers):
            raise ValueError(
                f"summary_quantiles must be numbers from 0 to 1, such as 0.5:0.05,0.99:0.001,"
                f" got {text!r}"
            )
        quantiles.append(numbers[0])
    return tuple(quantiles)
