"""Latencies under Triton's names that are there only if they are asked for: summaries, histograms.

Quantiles need every latency, which ordinary statistics do not keep. A version whose statistics are
`SummarisedStatistics` keeps those of its last requests. Owned by the event-loop thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy as np

from headrace.observability.responses import FIRST_RESPONSE, FirstResponses
from headrace.observability.statistics import VersionStatistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_KEPT = 4096  # requests
_AGE_NS = 60 * 10**9  # older ones are left out
_KINDS = ("request", "queue", "compute_input", "compute_infer", "compute_output")

Labelled = tuple[Mapping[str, str], VersionStatistics]


class Window:
    """The latencies of the last requests, in nanoseconds, of each kind."""

    def __init__(self) -> None:
        self._when: list[int] = []
        self._kinds: list[list[int]] = [[] for _ in _KINDS]
        self._next = 0

    def add(self, now: int, *durations: int) -> None:
        """Keep the durations of one request, in the order of kinds, in place of the oldest."""
        if len(self._when) < _KEPT:
            self._when.append(now)
            for kept, duration in zip(self._kinds, durations, strict=True):
                kept.append(duration)
            return
        index = self._next
        self._when[index] = now
        for kept, duration in zip(self._kinds, durations, strict=True):
            kept[index] = duration
        self._next = (index + 1) % _KEPT

    def quantiles(self, quantiles: Sequence[float], now: int) -> list[list[float]]:
        """Nanoseconds for each kind and quantile; NaN if nothing is recent enough."""
        recent = np.array(self._when, np.int64) > now - _AGE_NS
        if not recent.any():
            return [[float("nan")] * len(quantiles) for _ in self._kinds]
        every = np.array(self._kinds, np.float64)[:, recent]
        found = np.quantile(every, quantiles, axis=1, method="inverted_cdf")
        return [[float(value) for value in values] for values in found.T]


class SummarisedStatistics(VersionStatistics):
    """The counters of one model version, and the latencies of its last requests."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()

    def batch_succeeded(
        self,
        arrived: Sequence[int],
        inferences: int,
        batch_rows: int,
        started: int,
        gathered: int,
        computed: int,
        ended: int,
    ) -> None:
        """Count a batch; see `VersionStatistics`."""
        super().batch_succeeded(arrived, inferences, batch_rows, started, gathered, computed, ended)
        parts = gathered - started, computed - gathered, ended - computed
        for moment in arrived:
            self.window.add(ended, ended - moment, started - moment, *parts)

    def request_completed(
        self, arrived: int, rows: int, started: int, ended: int, paused: bool = False
    ) -> None:
        """Count a request with its last response; see `VersionStatistics`."""
        super().request_completed(arrived, rows, started, ended, paused)
        self.window.add(ended, ended - arrived, started - arrived, 0, ended - started, 0)


def summary_families(found: Iterable[Labelled], quantiles: Sequence[float]) -> "Iterator[Metric]":
    """The summaries of versions that keep what they need."""
    from prometheus_client.core import Metric  # as late as that: see `metrics`

    families = [
        Metric(
            f"nv_inference_{kind}_summary_us",
            f"Microseconds of {kind.replace('_', ' ')}, of requests in the last minute",
            "summary",
        )
        for kind in _KINDS
    ]
    now = monotonic_ns()
    for labels, statistics in found:
        if not isinstance(statistics, SummarisedStatistics):
            continue
        s = statistics
        totals = (
            s.success_ns, s.queue_ns, s.compute_input_ns, s.compute_infer_ns, s.compute_output_ns
        )  # fmt: skip
        values = s.window.quantiles(quantiles, now)
        for family, of_kind, total in zip(families, values, totals, strict=True):
            for quantile, value in zip(quantiles, of_kind, strict=True):
                of_quantile = {**labels, "quantile": f"{quantile:g}"}
                family.add_sample(family.name, of_quantile, value / 1000)
            family.add_sample(f"{family.name}_count", dict(labels), s.success_count)
            family.add_sample(f"{family.name}_sum", dict(labels), total // 1000)
    yield from families


def first_response_family(found: Iterable[Labelled]) -> "Metric":
    """The histogram of the time to the first response, of versions that answer many times."""
    from prometheus_client.core import HistogramMetricFamily  # as late as that: see `metrics`

    family = HistogramMetricFamily(
        FIRST_RESPONSE, "Milliseconds from accepting a request to its first response", labels=()
    )
    for labels, statistics in found:
        first = statistics.responses.first
        if first is not None:
            _add(family, labels, first)
    return family


def _add(family: "Metric", labels: Mapping[str, str], first: FirstResponses) -> None:
    running = 0
    for bound, count in zip([*first.bounds, float("inf")], first.counts, strict=True):
        running += count
        text = "+Inf" if bound == float("inf") else f"{bound:g}"
        family.add_sample(f"{family.name}_bucket", {**labels, "le": text}, running)
    family.add_sample(f"{family.name}_count", dict(labels), running)
    family.add_sample(f"{family.name}_sum", dict(labels), first.total_ms)
