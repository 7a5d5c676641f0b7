"""Whether a version is bad enough to lose its traffic: a decision over counts."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ExecutionFailed, ModelNotReady, ServerError, Unknown
from headrace.observability.statistics import LATENCY_BOUNDS
from headrace.scheduling.traffic_rules import RollbackRule


@dataclass(frozen=True, slots=True)
class Counts:
    """What a version has made of requests: how many, how many failed, latencies of the others.

    `latencies` counts by `LATENCY_BOUNDS`, and at last those above all bounds.
    """

    requests: int
    failures: int
    latencies: tuple[int, ...]

    def since(self, earlier: "Counts") -> "Counts":
        """What has been added to `earlier`."""
        latencies = zip(self.latencies, earlier.latencies, strict=True)
        return Counts(
            self.requests - earlier.requests,
            self.failures - earlier.failures,
            tuple([now - before for now, before in latencies]),
        )

    @property
    def error_rate(self) -> float:
        """The share that failed."""
        return self.failures / self.requests if self.requests else 0.0

    def latency_ms(self, quantile: float) -> float:
        """The latency that this share stayed below, in milliseconds; 0 if nothing was answered.

        Between bounds as if latencies were spread evenly; infinite above all of them.
        """
        return quantile_ms(self.latencies, quantile)


def is_fault(error: ServerError) -> bool:
    """Whether an error is the version's own: its execution failed, or nothing can execute it.

    Clients cause all others as they like, by what they send or by how much of it: requests that are
    wrong, expire in the queue, find it full, or are given up.
    """
    return isinstance(error, ExecutionFailed | Unknown | ModelNotReady)


def quantile_ms(latencies: Sequence[int], quantile: float) -> float:
    """`Counts.latency_ms` of counts by `LATENCY_BOUNDS`."""
    wanted = quantile * sum(latencies)
    if not wanted:
        return 0.0
    reached = 0
    for index, count in enumerate(latencies):
        if count and reached + count >= wanted:
            if index == len(LATENCY_BOUNDS):
                return float("inf")
            low = LATENCY_BOUNDS[index - 1] if index else 0
            part = (wanted - reached) / count
            return (low + (LATENCY_BOUNDS[index] - low) * part) / 1e6
        reached += count
    return float("inf")


def verdict(rule: RollbackRule, candidate: Counts, baseline: Counts) -> str:
    """Why `candidate` is to lose its traffic; "" if it is not."""
    if candidate.requests < rule.min_requests:
        return ""
    comparable = baseline.requests >= rule.min_requests
    errors = candidate.error_rate
    counted = f"{candidate.failures} of {candidate.requests} requests failed"
    if rule.max_error_rate is not None and errors > rule.max_error_rate:
        return f"{counted}, more than max_error_rate {rule.max_error_rate:g} allows"
    increase = rule.max_error_rate_increase
    if increase is not None and comparable and errors > baseline.error_rate + increase:
        return (
            f"{counted}, and {baseline.failures} of {baseline.requests} of the baseline: more than"
            f" max_error_rate_increase {increase:g} allows"
        )
    answered = sum(candidate.latencies)
    if answered < rule.min_requests:
        return ""
    latency = candidate.latency_ms(rule.latency_quantile)
    measured = f"the {rule.latency_quantile:g} quantile of its latency is {_ms(latency)}"
    if rule.max_latency_ms is not None and latency > rule.max_latency_ms:
        return f"{measured}, more than max_latency_ms {rule.max_latency_ms:g}"
    ratio = rule.max_latency_ratio
    if ratio is not None and sum(baseline.latencies) >= rule.min_requests:
        usual = baseline.latency_ms(rule.latency_quantile)
        if latency > usual * ratio and not _alike(latency, usual):
            return (
                f"{measured}, and {_ms(usual)} for the baseline: more than max_latency_ratio"
                f" {ratio:g} allows"
            )
    return ""


def _alike(latency: float, usual: float) -> bool:
    """Whether two latencies lie between the same bounds, where a ratio would be made up."""
    first, second = (bisect_left(LATENCY_BOUNDS, ms * 1e6) for ms in (latency, usual))
    return first == second


def _ms(latency: float) -> str:
    if latency == float("inf"):
        return f"above {LATENCY_BOUNDS[-1] / 1e6:g} ms"
    return f"{latency:.3g} ms"
