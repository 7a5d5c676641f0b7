"""The choice of an upstream for a call, as a pure function."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.upstreams import (
    FAILURES,
    FIRST_CHECK_SECS,
    FIRST_EJECTION_SECS,
    LONGEST_EJECTION_SECS,
    Condition,
    Ending,
    Pin,
    Way,
    abandon,
    after,
    begin,
    check,
    choose,
    disconnect,
    fail,
    next_check,
    succeed,
    way,
)

WELL = Condition(reachable=True)
CONDITIONS = st.builds(
    Condition,
    reachable=st.booleans(),
    outstanding=st.integers(0, 9),
    taken=st.integers(0, 99),
    failures=st.integers(0, FAILURES - 1),
    ejections=st.integers(0, 2000),
    ejected_until=st.floats(0, 100),
    misses=st.integers(0, 2000),
)
TIMES = st.floats(0, 100)


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        ([], None),
        ([Condition()], None),
        ([Condition(), WELL], 1),
        ([replace(WELL, outstanding=2), replace(WELL, outstanding=1)], 1),
        (
            [replace(WELL, taken=9), replace(WELL, taken=8)],
            1,
        ),  # of equals, the one with fewer calls so far
        ([replace(WELL, ejected_until=5.0), replace(WELL, outstanding=9)], 1),
        ([replace(WELL, ejected_until=5.0), Condition()], 0),  # better than nothing
        (
            [replace(WELL, ejected_until=0.5), replace(WELL, outstanding=1)],
            0,
        ),  # the ejection has ended
    ],
)
def test_choose(conditions: list[Condition], chosen: int | None) -> None:
    assert choose(conditions, 1.0) == chosen


@given(st.lists(CONDITIONS, max_size=6), TIMES, st.sets(st.integers(0, 5)))
def test_the_chosen_upstream_is_reachable_and_has_the_fewest_calls(
    conditions: list[Condition], now: float, tried: set[int]
) -> None:
    index = choose(conditions, now, tried)
    able = [i for i, c in enumerate(conditions) if c.reachable and i not in tried]
    if index is None:
        assert not able
        return
    assert index in able
    in_use = [i for i in able if conditions[i].ejected_until <= now] or able
    assert index in in_use
    assert conditions[index].outstanding == min(conditions[i].outstanding for i in in_use)


@given(CONDITIONS, TIMES)
def test_every_end_of_a_call_decrements_its_upstream(condition: Condition, now: float) -> None:
    for end in (succeed, abandon, disconnect, lambda one: fail(one, now)):
        one = replace(condition)
        begin(one)
        end(one)
        assert one.outstanding == condition.outstanding
        assert one.taken == condition.taken + 1
        assert one.reachable is (condition.reachable and end is not disconnect)


@given(CONDITIONS, TIMES)
def test_ejections_are_bounded(condition: Condition, now: float) -> None:
    after = replace(condition)
    begin(after)
    ejected = fail(after, now)
    assert ejected is (condition.failures + 1 >= FAILURES)
    if not ejected:
        assert after.ejected_until == condition.ejected_until
    else:
        seconds = after.ejected_until - now
        assert seconds + 1e-9 >= FIRST_EJECTION_SECS
        assert seconds <= LONGEST_EJECTION_SECS + 1e-9


def test_ejections_double_until_something_succeeds() -> None:
    condition, lengths = replace(WELL), []
    for _ in range(7):
        for _ in range(FAILURES):
            begin(condition)
            fail(condition, 0.0)
        lengths.append(condition.ejected_until)
    assert lengths == [1, 2, 4, 8, 16, 30, 30]
    begin(condition)
    succeed(condition)
    for _ in range(FAILURES):
        begin(condition)
        fail(condition, 0.0)
    assert condition.ejected_until == 1


@given(CONDITIONS, st.floats(0.2, 60))
def test_unreachable_upstreams_are_checked_soon_and_often(
    condition: Condition, interval: float
) -> None:
    seconds = next_check(condition, interval)
    assert seconds <= interval
    assert condition.reachable or seconds >= FIRST_CHECK_SECS
    begin(condition)
    disconnect(condition)
    assert next_check(condition, interval) == FIRST_CHECK_SECS
    check(condition, True)
    assert condition.reachable
    assert next_check(condition, interval) == interval


@dataclass(frozen=True)
class Here:
    """An upstream with the states of sequences."""

    usable: bool = True


HERE, AWAY = Pin(Here()), Pin(Here(usable=False))
LOST = Pin(lost=True)


@pytest.mark.parametrize(
    ("pin", "start", "expected"),
    [
        (None, True, Way.ANY), (HERE, False, Way.PINNED), (AWAY, False, Way.NOWHERE),
        (HERE, True, Way.PINNED), (AWAY, True, Way.ANY), (LOST, False, Way.NOWHERE),
        (LOST, True, Way.ANY),
    ],
)  # fmt: skip
def test_destination_of_a_sequence_request(pin: Pin | None, start: bool, expected: Way) -> None:
    assert way(pin, start) is expected


@pytest.mark.parametrize(
    ("pin", "end", "ending", "expected"),
    [
        (None, False, Ending.RUN, HERE), (None, True, Ending.RUN, None),
        (HERE, True, Ending.RUN, None), (LOST, False, Ending.RUN, HERE),
        (None, False, Ending.REFUSED, None), (HERE, True, Ending.REFUSED, HERE),
        (LOST, False, Ending.REFUSED, LOST), (None, False, Ending.UNSURE, LOST),
        (HERE, True, Ending.UNSURE, LOST),
    ],
)  # fmt: skip
def test_pin_after_a_sequence_request(
    pin: Pin | None, end: bool, ending: Ending, expected: Pin | None
) -> None:
    assert after(pin, Here(), end, ending) == expected
