"""Traffic decisions: eligible versions, the choice among them, and roll-back."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import errors
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError, Unavailable, is_fault
from headrace.core.signature import Signature, TensorSpec, difference
from headrace.observability.statistics import LATENCY_BOUNDS, Histogram
from headrace.plugins.traffic.decisions import (
    GOLDEN,
    SILVER,
    Counts,
    Sequence64,
    Split,
    arrange,
    bound,
    verdict,
)
from headrace.plugins.traffic.rules import RollbackRule, Shadow, TrafficRules

X = TensorSpec("X", Datatype.FP32, (4,))
Y = TensorSpec("Y", Datatype.FP32, (2,))
SAME = Signature("m", 8, (X,), (Y,))
OTHER = replace(SAME, inputs=(replace(X, dims=(5,)),))
RULES = TrafficRules({1: 90.0, 2: 10.0}, 1)
COPIED = replace(RULES, shadow=Shadow(3))


@pytest.mark.parametrize(
    ("rules", "ready", "weights", "reference", "shadow", "fallback"),
    [
        (RULES, {1: SAME, 2: SAME}, {1: 90, 2: 10}, 1, 0, False),
        (RULES, {1: SAME}, {1: 90}, 1, 0, False),
        (RULES, {2: SAME}, {2: 10}, 2, 0, False),
        (RULES, {1: SAME, 2: OTHER}, {1: 90}, 1, 0, False),
        (RULES, {3: SAME, 4: OTHER}, {4: 1}, 4, 0, True),
        (COPIED, {1: SAME, 2: SAME, 3: SAME}, {1: 90, 2: 10}, 1, 3, False),
        (COPIED, {1: SAME, 2: SAME}, {1: 90, 2: 10}, 1, 0, False),
        (COPIED, {1: SAME, 3: OTHER}, {1: 90}, 1, 0, False),
        (COPIED, {3: SAME}, {3: 1}, 3, 0, True),
        (COPIED, {3: SAME, 0: SAME}, {0: 1}, 0, 3, True),
        (TrafficRules(shadow=Shadow(3)), {1: SAME, 2: SAME, 3: SAME}, {2: 1}, 2, 3, False),
        (TrafficRules({1: 0.0, 2: 5.0}, 1), {1: SAME, 2: SAME}, {2: 5}, 2, 0, False),
    ],
)
def test_the_shares_of_versions(
    rules: TrafficRules,
    ready: dict[int, Signature],
    weights: dict[int, float],
    reference: int,
    shadow: int,
    fallback: bool,
) -> None:
    found = arrange(rules, ready)
    assert found is not None
    assert (found.weights, found.reference, found.shadow) == (weights, reference, shadow)
    assert found.fallback is fallback


def test_reasons() -> None:
    assert arrange(RULES, {}) is None
    found = arrange(COPIED, {1: SAME, 2: OTHER})
    assert found is not None
    assert found.reasons[3] == "is not ready"
    assert "its input 'X' is missing, or of another datatype or shape" in found.reasons[2]
    alone = arrange(COPIED, {3: SAME})
    assert alone is not None
    assert "no other version is ready" in alone.reasons[3]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (SAME, ""),
        (replace(SAME, max_batch_size=4), ""),
        (replace(SAME, outputs=(Y, replace(Y, name="Z"))), ""),
        (replace(SAME, inputs=(X, replace(X, name="Z", optional=True))), ""),
        (replace(SAME, inputs=(replace(X, optional=True),)), ""),
        (replace(SAME, inputs=(X, replace(X, name="Z"))), "it needs the input 'Z'"),
        (replace(SAME, outputs=()), "its output 'Y' is missing"),
        (replace(SAME, outputs=(replace(Y, datatype=Datatype.FP64),)), "its output 'Y'"),
        (replace(SAME, decoupled=True), "it is decoupled"),
        (replace(SAME, max_batch_size=0), "it does not batch"),
    ],
)
def test_difference(other: Signature, why: str) -> None:
    assert why in difference(SAME, other)
    assert bool(why) == bool(difference(SAME, other))


def test_an_input_that_only_the_baseline_does_without() -> None:
    optional = replace(SAME, inputs=(replace(X, optional=True),))
    assert "it needs the input 'X'" in difference(optional, SAME)


WHOLE = 2**64
WEIGHTS = st.dictionaries(st.integers(0, 2**63 - 1), st.floats(1e-3, 1e6), min_size=1, max_size=5)
KEYS = [f"user-{number}" for number in range(4000)]


@given(WEIGHTS, st.integers(1, 300))
def test_shares_hold_at_any_time(weights: dict[int, float], requests: int) -> None:
    split, points = Split("m", weights), Sequence64(GOLDEN)
    counts = Counter(split.at(points.next()) for _ in range(requests))
    for number, share in split.shares.items():
        # The discrepancy of this sequence grows with the logarithm, not with the root.
        assert abs(counts[number] - share * requests) <= 6


def test_a_rhythm_of_requests_does_not_matter() -> None:
    split, points = Split("m", {1: 50, 2: 50}), Sequence64(GOLDEN)
    every_other = [split.at(points.next()) for _ in range(2000)][::2]
    assert 480 <= Counter(every_other)[1] <= 520
    with pytest.raises(ValueError, match="beyond"):
        Split("m", {1: 1}).at(WHOLE)


@pytest.mark.parametrize("step", [GOLDEN, SILVER])
def test_a_share_of_points_is_below_its_bound(step: int) -> None:
    points, limit = Sequence64(step), bound(0.25)
    assert abs(sum(points.next() < limit for _ in range(1000)) - 250) <= 3
    assert bound(1) == WHOLE


@given(WEIGHTS, st.integers(0, WHOLE - 1))
def test_every_point_and_key_has_a_version(weights: dict[int, float], point: int) -> None:
    split = Split("m", weights)
    assert split.at(point) in weights
    assert split.of(str(point)) in weights


def test_keys_are_divided_by_weight() -> None:
    counts = Counter(Split("m", {1: 70, 2: 20, 3: 10}).of(key) for key in KEYS)
    for number, share in ((1, 0.7), (2, 0.2), (3, 0.1)):
        assert abs(counts[number] / len(KEYS) - share) < 0.02
    first, second = Split("a", {1: 50, 2: 50}), Split("b", {1: 50, 2: 50})
    alike = sum(first.of(key) == second.of(key) for key in KEYS) / len(KEYS)
    assert 0.45 < alike < 0.55
    three = Split("m", {1: 50, 2: 30, 3: 20})
    found = "".join(str(three.of(f"user-{number}")) for number in range(24))
    assert found == "123133133111311111111112"


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ({1: 90, 2: 10}, {1: 80, 2: 20}, 0.1),
        ({1: 60, 2: 20, 3: 20}, {1: 40, 2: 40, 3: 20}, 0.2),
        ({1: 40, 2: 20, 3: 40}, {1: 60, 2: 20, 3: 20}, 0.2),
        ({1: 50, 2: 30, 3: 20}, {1: 50, 3: 20}, 0.3),  # a version goes
        ({1: 50, 2: 50}, {1: 5, 2: 5}, 0.0),
    ],
)
def test_a_change_of_weights_moves_the_fewest_keys(
    before: dict[int, float], after: dict[int, float], moved: float
) -> None:
    first, second = Split("m", before), Split("m", after)
    changed = sum(first.of(key) != second.of(key) for key in KEYS) / len(KEYS)
    assert moved - 0.02 <= changed <= moved + 0.06


@given(st.text(max_size=20))
def test_keys_of_a_growing_version_stay(key: str) -> None:
    if Split("m", {1: 90, 2: 10}).of(key) == 2:
        assert Split("m", {1: 70, 2: 30}).of(key) == 2


def counts(requests: int, failures: int = 0, ms: float = 1.0) -> Counts:
    """Counts of requests of equal duration, with some failures."""
    histogram = Histogram()
    histogram.observe(int(ms * 1e6), requests - failures)
    return Counts(requests, failures, tuple(histogram.counts))


ERRORS = RollbackRule(max_error_rate=0.05, min_requests=20)
MORE_ERRORS = RollbackRule(max_error_rate_increase=0.05, min_requests=20)
SLOW = RollbackRule(max_latency_ms=100, min_requests=20)
SLOWER = RollbackRule(max_latency_ratio=2, min_requests=20)


@pytest.mark.parametrize(
    ("rule", "candidate", "baseline", "why"),
    [
        (ERRORS, counts(100, 5), counts(0), ""),  # the maximum
        (ERRORS, counts(100, 6), counts(0), "6 of 100 requests failed, more than max_error_rate"),
        (ERRORS, counts(19, 19), counts(0), ""),  # too few for a verdict
        (ERRORS, counts(20, 20), counts(0), "20 of 20 requests failed"),
        (MORE_ERRORS, counts(100, 20), counts(100, 16), ""),
        (MORE_ERRORS, counts(100, 22), counts(100, 16), "16 of 100 of the baseline"),
        (MORE_ERRORS, counts(100, 50), counts(19, 0), ""),  # no baseline
        (SLOW, counts(100, ms=90), counts(0), ""),
        (SLOW, counts(100, ms=140), counts(0), "0.95 quantile of its latency is"),
        (SLOW, counts(100, ms=700_000), counts(0), "is above 600000 ms"),
        (SLOW, counts(19, ms=140), counts(0), ""),
        (SLOW, counts(100, 81, ms=140), counts(0), ""),  # of those that were answered
        (SLOWER, counts(100, ms=30), counts(100, ms=30), ""),
        (SLOWER, counts(100, ms=30), counts(100, ms=3), "for the baseline"),
        (SLOWER, counts(100, ms=30), counts(19, ms=3), ""),
        (SLOWER, counts(100, ms=3), counts(100, ms=30), ""),
    ],
)
def test_verdict(rule: RollbackRule, candidate: Counts, baseline: Counts, why: str) -> None:
    found = verdict(rule, candidate, baseline)
    assert why in found
    assert bool(why) == bool(found)


SOME = st.builds(counts, st.integers(0, 1000), st.just(0), st.floats(0.01, 20_000)) | st.integers(
    0, 1000
).flatmap(lambda n: st.builds(counts, st.just(n), st.integers(0, n)))


@given(SOME)
def test_a_version_is_never_worse_than_itself(measured: Counts) -> None:
    rule = RollbackRule(max_error_rate_increase=0, max_latency_ratio=1, min_requests=1)
    assert verdict(rule, measured, measured) == ""


@given(SOME, SOME)
def test_fewer_requests_than_asked_for_are_never_judged(first: Counts, second: Counts) -> None:
    rule = RollbackRule(
        max_error_rate=0, max_error_rate_increase=0, max_latency_ms=0, max_latency_ratio=1,
        min_requests=1001,
    )  # fmt: skip
    assert verdict(rule, first, second) == ""


@given(SOME, st.integers(0, 50))
def test_more_failures_are_never_better(measured: Counts, more: int) -> None:
    worse = Counts(measured.requests + more, measured.failures + more, measured.latencies)
    rule = RollbackRule(max_error_rate=0.1, min_requests=1)
    if verdict(rule, measured, measured):
        assert verdict(rule, worse, measured)


@given(st.lists(st.floats(0.01, 9_000), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_lies_between_the_bounds_around_it(values: list[float], share: float) -> None:
    histogram = Histogram()
    for ms in values:
        histogram.observe(int(ms * 1e6))
    found = Counts(len(values), 0, tuple(histogram.counts)).latency_ms(share)
    bounds = [0.0, *(bound / 1e6 for bound in LATENCY_BOUNDS)]
    exact = sorted(int(ms * 1e6) / 1e6 for ms in values)[
        min(int(share * len(values)), len(values) - 1)
    ]
    above = next(b for b in bounds if b >= exact)
    assert 0 < found <= above


def test_differences_of_counters() -> None:
    added = counts(30, 3, ms=2).since(counts(10, 1, ms=2))
    assert (added.requests, added.failures, sum(added.latencies)) == (20, 2, 18)
    assert Counts(0, 0, (0,) * (len(LATENCY_BOUNDS) + 1)).latency_ms(0.5) == 0


FAULTS = {
    "ExecutionFailed", "WorkerDied", "RemoteUnavailable", "RemoteLost", "RemoteTimeout",
    "RemoteBroken", "Unknown", "ModelNotReady", "ExecutionTimeout", "ResponseTooLarge",
}  # fmt: skip
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServerError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_failures_that_count_against_a_version(kind: type[ServerError]) -> None:
    assert is_fault(kind("x"), begun=False) == (kind.__name__ in FAULTS)
    # Raised by the model; others are later requests of a lost sequence.
    begun = issubclass(kind, Unavailable) or kind is errors.SequenceLost
    assert is_fault(kind("x"), begun=True) == (kind.__name__ in FAULTS or begun)
