"""From single repetitions to the figures of a cell: pure functions over numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement's coordinates: server, model, protocol and concurrency."""

    server: str
    model: str
    protocol: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measurement of a cell. Times in seconds; what is not known of a server is None.

    `answers` were complete and right and came within `seconds`. `server_cpu` and `client_cpu` are
    CPU time used in these seconds; `rss` is in bytes. `errors` counts all that went wrong, by its
    text, also during warm-up and at the end.
    """

    seconds: float
    answers: int
    p50: float
    p99: float
    errors: Mapping[str, int]
    client_cpu: float
    server_cpu: float | None = None
    rss: int | None = None
    mean_batch: float | None = None

    @property
    def cost(self) -> float | None:
        """The server's CPU time for one answer, in seconds."""
        if self.server_cpu is None or not self.answers:
            return None
        return self.server_cpu / self.answers

    @property
    def failures(self) -> int:
        """The number of errors."""
        return sum(self.errors.values())

    @property
    def throughput(self) -> float:
        """Answers per second."""
        return self.answers / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """A cell's medians over its repetitions; `errors` is a sum, `spread` (max - min) / median.

    `cpu_per_1000` is the server's CPU time in seconds for 1 000 requests; `server_cpu` and
    `client_cpu` are shares of one core.
    """

    throughput: float
    spread: float
    p50: float
    p99: float
    errors: int
    server_cpu: float | None
    cpu_per_1000: float | None
    mean_batch: float | None
    rss: int | None
    client_cpu: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ascending `ordered` do not exceed; else 0."""
    if not ordered:
        return 0.0
    return ordered[max(ceil(share * len(ordered)), 1) - 1]


def spread(values: Sequence[float]) -> float:
    """The range of the values, as a share of their median."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def figures(repetitions: Sequence[Repetition]) -> Figures:
    """Summarise the repetitions, at least one, of one cell."""
    rates = [r.throughput for r in repetitions]
    rss = _median(repetitions, lambda r: r.rss)
    cost = _median(repetitions, lambda r: r.cost)
    return Figures(
        throughput=median(rates),
        spread=spread(rates),
        p50=median(r.p50 for r in repetitions),
        p99=median(r.p99 for r in repetitions),
        errors=sum(r.failures for r in repetitions),
        server_cpu=_median(repetitions, _server_share),
        cpu_per_1000=None if cost is None else cost * 1_000,
        mean_batch=_median(repetitions, lambda r: r.mean_batch),
        rss=None if rss is None else round(rss),
        client_cpu=median(r.client_cpu / r.seconds if r.seconds else 0.0 for r in repetitions),
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median of ours / theirs over repetitions that were measured side by side.

    A zero is a value that is missing: its pair is left out.
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if a and b]
    return median(pairs) if pairs else None


def _median(
    repetitions: Sequence[Repetition], value: Callable[[Repetition], float | None]
) -> float | None:
    known = [v for v in map(value, repetitions) if v is not None]
    return median(known) if known else None


def _server_share(repetition: Repetition) -> float | None:
    if repetition.server_cpu is None or not repetition.seconds:
        return None
    return repetition.server_cpu / repetition.seconds
