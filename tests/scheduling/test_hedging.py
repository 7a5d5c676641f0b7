"""When a second server is asked, and how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.hedging import (
    LEAST_SECS,
    HedgePolicy,
    HedgeRules,
    least_sample,
    quantile,
)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.0), ([2.0, 1.0, 4.0, 3.0], 0.75, 3.0),
     ([float(n) for n in range(1, 101)], 0.95, 95.0)],
)  # fmt: skip
def test_a_quantile(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.5, 0.999))
def test_so_many_are_not_above_a_quantile(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert found in values


def test_after_a_time_that_is_given() -> None:
    assert HedgePolicy(HedgeRules(seconds=0.05)).begun() == 0.05
    assert HedgePolicy(HedgeRules(seconds=1e-6)).begun() == LEAST_SECS


def test_after_a_quantile_once_enough_calls_are_known() -> None:
    policy = HedgePolicy(HedgeRules(quantile=0.9))
    for number in range(least_sample(0.9)):
        assert policy.begun() is None
        policy.answered(0.01 * (number + 1))
    assert policy.begun() == pytest.approx(0.18)
    for _ in range(1000):
        policy.answered(0.5)
    assert policy.begun() == 0.5


@pytest.mark.parametrize(("share", "count"), [(0.5, 20), (0.95, 20), (0.99, 100), (0.999, 512)])
def test_the_rarer_the_more_calls_have_to_be_known(share: float, count: int) -> None:
    assert least_sample(share) == count


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.01, 0.1, 1.0]))
def test_no_more_than_a_share_is_hedged(wanted: list[bool], share: float) -> None:
    """Whatever calls take long: one at once, and then a share of all that there were."""
    policy = HedgePolicy(HedgeRules(seconds=1.0, share=share))
    hedged = 0
    for begun, slow in enumerate(wanted, 1):
        policy.begun()
        hedged += slow and policy.spend()
        assert hedged <= 1 + share * begun + 1e-6
    if share == 1.0:
        assert hedged == sum(wanted)


def test_only_a_little_is_saved_up() -> None:
    policy = HedgePolicy(HedgeRules(seconds=1.0, share=0.1))
    for _ in range(10_000):
        policy.begun()
    assert sum(policy.spend() for _ in range(100)) == 10
