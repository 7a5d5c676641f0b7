"""Inline or on a thread: a decision over measured costs."""

import pytest

from headrace.placement.choice import BUDGET_NS, AutoChoice, InstanceKind

INLINE, THREAD = InstanceKind.INLINE, InstanceKind.THREAD
BUDGET = 1_000


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        (0, INLINE),
        (BUDGET, INLINE),
        (BUDGET + 1, THREAD),
        (float("inf"), THREAD),  # it could not be measured
    ],
)
def test_warm_up_decides_first(measured: float, kind: InstanceKind) -> None:
    assert AutoChoice(measured, BUDGET).kind is kind


@pytest.mark.parametrize(
    ("measured", "costs", "kind"),
    [
        (100, [900] * 50, INLINE),  # within the budget
        (100, [1_100] * 50, THREAD),  # over it for long enough
        (100, [1_100], INLINE),
        (100, [10**9] * 2, INLINE),  # two page faults are not a trend
        (100, [10**9] * 3, THREAD),
        (100, [10**9, 900, 900, 900, 900] * 50, INLINE),  # now and then the machine is busy
        (100, [10**9, 900] * 5, THREAD),  # every other run is heavy
        (2_000, [900] * 2_000, THREAD),  # between the two thresholds it stays
        (2_000, [400] * 1_000, INLINE),
        (2_000, [400] * 999, THREAD),
        (2_000, [*[400] * 999, 900] * 2, THREAD),
        (float("inf"), [400] * 1_000, INLINE),
        (500, [900, 600] * 50, INLINE),
    ],
)
def test_runs_move_it(measured: float, costs: list[int], kind: InstanceKind) -> None:
    choice = AutoChoice(measured, BUDGET)
    changes = sum(choice.observe(cost) for cost in costs)
    assert choice.kind is kind
    assert changes == (kind is not AutoChoice(measured, BUDGET).kind)


def test_it_does_not_flap_around_the_budget() -> None:
    choice = AutoChoice(BUDGET, BUDGET)
    assert sum(choice.observe(cost) for cost in [1_300, 700] * 100) <= 1


def test_the_usual_budget_is_what_a_tick_can_bear() -> None:
    assert AutoChoice(BUDGET_NS).kind is INLINE
    assert AutoChoice(BUDGET_NS + 1).kind is THREAD
    assert 100_000 <= BUDGET_NS <= 1_000_000
