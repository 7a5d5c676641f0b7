"""When a batch closes, when a request times out, and which level it goes to."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from headrace.scheduling.policy import (
    NO_POLICY,
    BatchPolicy,
    QueuePolicy,
    SchedulingPolicy,
    TimeoutAction,
)


@dataclass(frozen=True)
class Waiting:
    """A waiting request as a policy sees it."""

    rows: int
    arrived: int = 0
    key: object = None


def queue_of(rows: list[int]) -> list[Waiting]:
    """Requests that arrived one nanosecond after the other."""
    return [Waiting(n, arrived) for arrived, n in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([], 0),
        ([1], 1),
        ([1, 1, 1], 3),
        ([1, 3], 2),  # exactly full
        ([4, 1], 1),
        ([3, 2], 1),  # the second does not fit
        ([3, 2, 1], 1),  # the third would, but it does not overtake
        ([2, 2, 2], 2),
        ([0, 0, 4, 0], 3),  # nothing is as good as full
        ([4], 1),
    ],
)
def test_without_delay_a_batch_is_what_waits(rows: list[int], taken: int) -> None:
    assert BatchPolicy(max_rows=4).take(queue_of(rows), 0) == (taken, None)


@pytest.mark.parametrize(
    ("rows", "now", "answer"),
    [
        ([], 500, (0, None)),
        ([1], 0, (0, 100)),  # still hoping for company
        ([1], 99, (0, 100)),
        ([1], 100, (1, None)),  # ripe
        ([1, 1], 99, (0, 100)),  # the oldest counts
        ([1, 1], 100, (2, None)),
        ([1, 3], 1, (2, None)),  # exactly full
        ([3, 2], 1, (1, None)),  # cannot grow
        ([1, 1], 9_999, (2, None)),  # a late wake-up
    ],
)
def test_with_delay_a_batch_waits_for_company(
    rows: list[int], now: int, answer: tuple[int, int | None]
) -> None:
    assert BatchPolicy(max_rows=4, max_delay=100).take(queue_of(rows), now) == answer


@pytest.mark.parametrize(
    ("rows", "now", "answer"),
    [
        ([1], 0, (0, 100)),
        ([1, 1], 1, (2, None)),  # reaches 2
        ([2, 1], 1, (1, None)),  # 2 is remembered, the third row waits
        ([2, 1], 100, (2, None)),  # ripe: everything goes
        ([2, 1, 1], 2, (3, None)),  # the largest reached wins
        ([3], 0, (0, 100)),  # between two preferred sizes
        ([3, 2], 1, (2, None)),  # beyond the largest preferred size it need not grow
        ([3, 4], 1, (1, None)),  # cannot grow
        ([1, 2, 1], 2, (3, None)),
    ],
)
def test_preferred_sizes(rows: list[int], now: int, answer: tuple[int, int | None]) -> None:
    policy = BatchPolicy(max_rows=6, max_delay=100, preferred=frozenset({2, 4}))
    assert policy.take(queue_of(rows), now) == answer


@pytest.mark.parametrize(
    ("rows", "taken"),
    [([1], 1), ([1, 1, 1], 2), ([3], 1), ([2, 2], 2), ([1, 1, 2, 1], 3)],
)
def test_preferred_sizes_without_delay(rows: list[int], taken: int) -> None:
    policy = BatchPolicy(max_rows=6, preferred=frozenset({2, 4}))
    assert policy.take(queue_of(rows), 0) == (taken, None)


@pytest.mark.parametrize("delay", [0, 100])
def test_another_key_closes_the_batch(delay: int) -> None:
    queue = [Waiting(1, key="a"), Waiting(1, key="a"), Waiting(1, key="b"), Waiting(1, key="a")]
    assert BatchPolicy(4, delay).take(queue, 0) == (2, None)


def test_a_model_that_does_not_batch_gets_one_request_at_a_time() -> None:
    policy = BatchPolicy(max_rows=0, max_delay=100)
    assert policy.take(queue_of([1, 1]), 0) == (1, None)
    assert policy.take(queue_of([]), 0) == (0, None)


def test_the_delay_counts_from_the_oldest_also_behind_a_more_urgent_one() -> None:
    queue = [Waiting(1, arrived=50), Waiting(1, arrived=0)]
    policy = BatchPolicy(max_rows=4, max_delay=100)
    assert policy.take(queue, 60) == (0, 100)
    assert policy.take(queue, 100) == (2, None)


def test_taking_looks_no_further_than_the_batch_can_grow() -> None:
    seen = []

    def waiting() -> Iterator[Waiting]:
        for n in range(1_000):
            seen.append(n)
            yield Waiting(1)

    assert BatchPolicy(max_rows=4).take(waiting(), 0) == (4, None)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "deadline_ns"),
    [
        (0, False, 0, None),
        (0, True, 7, None),  # nothing to shorten
        (10, False, 0, 10_005),
        (10, False, 7, 10_005),
        (10, True, 7, 7_005),
        (10, True, 12, 10_005),  # cannot lengthen
        (10, True, 10, 10_005),
    ],
)
def test_deadline(default_us: int, override: bool, asked_us: int, deadline_ns: int | None) -> None:
    policy = QueuePolicy(0, default_us * 1_000, TimeoutAction.REJECT, override)
    assert policy.deadline(5, asked_us) == deadline_ns


@pytest.mark.parametrize(
    ("asked_us", "deadline_ns"),
    [
        (0, None),
        (7_000, 7_000_005),
        (1, 1_000_005),  # a free instance comes first, at the end of the tick
    ],
)
def test_without_a_policy_a_request_has_its_own_deadline(
    asked_us: int, deadline_ns: int | None
) -> None:
    assert NO_POLICY.deadline(5, asked_us) == deadline_ns


@pytest.mark.parametrize(
    ("levels", "default", "priority", "level"),
    [
        (0, 0, 0, 1),
        (0, 0, 9, 1),
        (3, 2, 0, 2),
        (3, 2, 1, 1),
        (3, 2, 3, 3),
        (3, 2, 4, 2),
        (3, 2, 2**64 - 1, 2),
    ],
)
def test_level(levels: int, default: int, priority: int, level: int) -> None:
    policy = SchedulingPolicy(BatchPolicy(4), levels=levels, default_level=default)
    assert policy.level(priority) == level


def test_a_level_without_limits_of_its_own_has_the_default_ones() -> None:
    own, common = QueuePolicy(max_size=1), QueuePolicy(max_size=9)
    policy = SchedulingPolicy(BatchPolicy(4), common, levels=2, default_level=1, by_level={2: own})
    assert policy.queue_policy(1) is common
    assert policy.queue_policy(2) is own
