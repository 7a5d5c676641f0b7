"""When a version is bad enough to lose its traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import errors
from headrace.core.errors import ServerError, is_fault
from headrace.observability.statistics import LATENCY_BOUNDS, Histogram
from headrace.plugins.traffic.decisions import Counts, verdict
from headrace.plugins.traffic.rules import RollbackRule


def counts(requests: int, failures: int = 0, ms: float = 1.0) -> Counts:
    """Counts of requests that all took as long, but for those that failed."""
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
        (ERRORS, counts(100, 5), counts(0), ""),  # as many as may be
        (ERRORS, counts(100, 6), counts(0), "6 of 100 requests failed, more than max_error_rate"),
        (ERRORS, counts(19, 19), counts(0), ""),  # too few to tell
        (ERRORS, counts(20, 20), counts(0), "20 of 20 requests failed"),
        (MORE_ERRORS, counts(100, 20), counts(100, 16), ""),
        (MORE_ERRORS, counts(100, 22), counts(100, 16), "16 of 100 of the baseline"),
        (MORE_ERRORS, counts(100, 50), counts(19, 0), ""),  # nothing to hold it against
        (SLOW, counts(100, ms=90), counts(0), ""),
        (SLOW, counts(100, ms=140), counts(0), "0.95 quantile of its latency is"),
        (SLOW, counts(100, ms=60_000), counts(0), "is above 10000 ms"),
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


def test_what_was_added() -> None:
    added = counts(30, 3, ms=2).since(counts(10, 1, ms=2))
    assert (added.requests, added.failures, sum(added.latencies)) == (20, 2, 18)
    assert Counts(0, 0, (0,) * (len(LATENCY_BOUNDS) + 1)).latency_ms(0.5) == 0


FAULTS = {
    "ExecutionFailed", "WorkerDied", "RemoteUnavailable", "RemoteLost", "RemoteTimeout",
    "RemoteBroken", "Unknown", "ModelNotReady", "ExecutionTimeout",
}  # fmt: skip
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServerError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_fault_of_a_version(kind: type[ServerError]) -> None:
    assert is_fault(kind("x")) == (kind.__name__ in FAULTS)
