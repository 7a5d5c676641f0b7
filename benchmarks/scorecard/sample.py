"""Result of one measurement, and the summary of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from benchmarks.summary import spread


class Metric(StrEnum):
    """A figure; times in seconds, memory in bytes."""

    THROUGHPUT = "requests/s"
    ROWS = "rows/s"
    P50 = "p50"
    P99 = "p99"
    P999 = "p99.9"
    CPU_PER_1000 = "CPU s per 1 000"
    USER_PER_1000 = "user CPU s per 1 000"
    MEAN_BATCH = "mean batch"
    RSS = "RSS"
    READY = "ready after"
    LATE = "sent late"  # p99 of how late the generator itself was, in open loop
    ANSWERS = "answers"  # how many came, also outside of the measured time


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: the figures that could be had, and errors by text."""

    figures: Mapping[Metric, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """The number of errors."""
        return sum(self.errors.values())


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over repetitions; `errors` is a sum, `spread` that of the throughput."""

    figures: Mapping[Metric, float]
    errors: int
    spread: float | None


def values(samples: Sequence[Sample], metric: Metric) -> list[float | None]:
    """A figure of each repetition, None where it is not known."""
    return [sample.figures.get(metric) for sample in samples]


def summary(samples: Sequence[Sample]) -> Summary:
    """Summarise the repetitions of a cell."""
    known = {metric: [v for v in values(samples, metric) if v is not None] for metric in Metric}
    rates = known[Metric.THROUGHPUT]
    return Summary(
        {metric: median(numbers) for metric, numbers in known.items() if numbers},
        sum(sample.failures for sample in samples),
        spread(rates) if len(rates) > 1 else None,
    )
