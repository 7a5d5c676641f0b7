"""Decisions by traffic rules: participating versions, routing, and judging of versions.

Pure functions over values. Rules are matched with the ready versions (`arrange`); a version is
judged by its results (`verdict`); and each request gets one of the versions by weight (`Split`), a
new choice for each request, or the same one for each key.

Requests without a key take the points of an additive recurrence (multiples of the golden ratio,
modulo one), which are as evenly distributed as possible: after any number of requests, each version
has had its share within a few. No random numbers are needed, and unlike with round robin, periodic
requests do not all meet the same version.

Keys choose by weighted rendezvous hashing: each version derives a number from the key, which grows
with its weight, and the highest one wins. If a weight changes, or a version is added or removed,
only the necessary keys move. The numbers only depend on model, version and key: they are the same
on every server, and after a restart.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log

from headrace.core.signature import Signature, difference
from headrace.observability.statistics import LATENCY_BOUNDS
from headrace.plugins.traffic.rules import RollbackRule, TrafficRules

_WHOLE = 2**64
_MASK = _WHOLE - 1
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio, as a share of 2**64
SILVER = 0x6A09E667F3BCC909  # the square root of two, likewise: independent of the golden ratio


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The versions that get requests, or copies.

    `weights` are those of the versions that get requests, `shadow` is 0 without copies. Requests
    are decoded by the signature of `reference`. `reasons` tell why a version named by the rules
    gets nothing. `fallback` is true if no version of the split is available.
    """

    weights: Mapping[int, float]
    reference: int
    shadow: int
    reasons: Mapping[int, str]
    fallback: bool


def arrange(rules: TrafficRules, ready: Mapping[int, Signature]) -> Arrangement | None:
    """Match rules with the ready versions; None if there are none."""
    if not ready:
        return None
    reasons: dict[int, str] = {}
    wanted = {number: weight for number, weight in rules.split.items() if weight}
    reasons |= dict.fromkeys((number for number in wanted if number not in ready), "is not ready")
    weights = {number: weight for number, weight in wanted.items() if number in ready}
    fallback = not weights
    shadow = rules.shadow.version if rules.shadow is not None else 0
    if fallback:
        weights = {max((n for n in ready if n != shadow), default=max(ready)): 1.0}
    reference = rules.baseline if rules.baseline in weights else min(weights)
    for number in [*weights, *([shadow] if shadow else [])]:
        why = difference(ready[reference], ready[number]) if number in ready else "is not ready"
        if why or (number == shadow and number in weights):
            reasons[number] = why or "gets requests itself, since no other version is ready"
    return Arrangement(
        {n: weight for n, weight in weights.items() if n == reference or n not in reasons},
        reference,
        0 if shadow in reasons else shadow,
        reasons,
        fallback and bool(wanted),
    )


class Sequence64:
    """Evenly distributed points from 0 to 2**64."""

    __slots__ = ("_step", "point")

    def __init__(self, step: int, point: int = 0) -> None:
        self._step = step
        self.point = point

    def next(self) -> int:
        """The next point."""
        self.point = point = (self.point + self._step) & _MASK
        return point


def bound(share: float) -> int:
    """The point below which a `share` (0 to 1) of all points is."""
    return min(round(share * _WHOLE), _WHOLE)


def point_of(key: bytes) -> int:
    """The point of a key, from 0 to 2**64, which is always the same."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


class Split:
    """Versions by weight. The weights are positive, and there is at least one."""

    def __init__(self, model: str, weights: Mapping[int, float]) -> None:
        total = sum(weights.values())
        versions = sorted(weights)
        self.shares = {number: weights[number] / total for number in versions}
        self._bounds: list[tuple[int, int]] = []
        reached = 0.0
        for number in versions:
            reached += weights[number]
            self._bounds.append((bound(reached / total), number))
        self._bounds[-1] = (_WHOLE, versions[-1])
        self._salted = [
            (number, weights[number], f"{model}\0{number}\0".encode(errors="replace"))
            for number in versions
        ]

    def at(self, point: int) -> int:
        """The version for a point from 0 to 2**64."""
        for limit, number in self._bounds:
            if point < limit:
                return number
        raise ValueError(f"{point} is beyond 2**64")

    def of(self, key: str) -> int:
        """The version for a key."""
        text = key.encode(errors="replace")
        chosen, least = 0, float("inf")
        for number, weight, salt in self._salted:
            # The time of a first event with this rate: the earliest of all versions wins.
            wait = -log((point_of(salt + text) + 1) / (_WHOLE + 1)) / weight
            if wait < least or not chosen:
                chosen, least = number, wait
        return chosen


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a version's requests: all, failures, and latencies of the others.

    `latencies` are counts by `LATENCY_BOUNDS`, the last one above all bounds.
    """

    requests: int
    failures: int
    latencies: tuple[int, ...]

    def since(self, earlier: "Counts") -> "Counts":
        """The difference to `earlier`."""
        latencies = zip(self.latencies, earlier.latencies, strict=True)
        return Counts(
            self.requests - earlier.requests,
            self.failures - earlier.failures,
            tuple([now - before for now, before in latencies]),
        )

    @property
    def error_rate(self) -> float:
        """The share of failed requests."""
        return self.failures / self.requests if self.requests else 0.0

    def latency_ms(self, quantile: float) -> float:
        """A latency quantile in milliseconds; 0 without answers.

        Interpolated between bounds; infinite above all of them.
        """
        return quantile_ms(self.latencies, quantile)


def quantile_ms(latencies: Sequence[int], quantile: float) -> float:
    """`Counts.latency_ms` for counts by `LATENCY_BOUNDS`."""
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
    """The reason to roll `candidate` back; "" for none."""
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
    """True if two latencies are between the same bounds, where a ratio would be meaningless."""
    first, second = (bisect_left(LATENCY_BOUNDS, ms * 1e6) for ms in (latency, usual))
    return first == second


def _ms(latency: float) -> str:
    if latency == float("inf"):
        return f"above {LATENCY_BOUNDS[-1] / 1e6:.0f} ms"
    return f"{latency:.3g} ms" if latency < 1_000 else f"{latency:.0f} ms"
