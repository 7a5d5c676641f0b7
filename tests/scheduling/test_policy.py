"""Policies: when a batch closes, when a request times out, and its priority level."""

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import Call
from headrace.observability.statistics import Closed
from headrace.scheduling.policy import (
    LOOK_AHEAD,
    NO_POLICY,
    BatchPolicy,
    QueuePolicy,
    SchedulingPolicy,
    TimeoutAction,
)


def queued(rows: int, arrived: int = 0, key: object = None, deadline: int | None = None) -> Call:
    """A waiting call as a policy sees it."""
    call = Call("m", "", "", {})
    call.rows, call.arrived, call.key, call.deadline = rows, arrived, key, deadline
    return call


def queue_of(rows: list[int]) -> list[Call]:
    """Requests that arrived one nanosecond apart."""
    return [queued(n, arrived) for arrived, n in enumerate(rows)]


def taken_of(policy: BatchPolicy, queue: Iterable[Call], now: int) -> tuple[int, int | None]:
    """Number of requests to run now, and when to ask again."""
    taken, _, ask_at = policy.take(queue, now)
    assert taken == range(len(taken))
    return len(taken), ask_at


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
def test_without_delay_a_batch_is_the_queued_requests(rows: list[int], taken: int) -> None:
    assert taken_of(BatchPolicy(max_rows=4), queue_of(rows), 0) == (taken, None)


@pytest.mark.parametrize(
    ("rows", "now", "answer"),
    [
        ([], 500, (0, None)),
        ([1], 0, (0, 100)),  # waiting for more requests
        ([1], 99, (0, 100)),
        ([1], 100, (1, None)),  # due
        ([1, 1], 99, (0, 100)),  # the oldest counts
        ([1, 1], 100, (2, None)),
        ([1, 3], 1, (2, None)),  # exactly full
        ([3, 2], 1, (1, None)),  # cannot grow
        ([1, 1], 9_999, (2, None)),  # a late wake-up
    ],
)
def test_with_delay_a_batch_waits_for_more_requests(
    rows: list[int], now: int, answer: tuple[int, int | None]
) -> None:
    assert taken_of(BatchPolicy(max_rows=4, max_delay=100), queue_of(rows), now) == answer


@pytest.mark.parametrize(
    ("rows", "now", "answer"),
    [
        ([1], 0, (0, 100)),
        ([1, 1], 1, (2, None)),  # reaches 2
        ([2, 1], 1, (1, None)),  # 2 is remembered, the third row waits
        ([2, 1], 100, (2, None)),  # due: everything runs
        ([2, 1, 1], 2, (3, None)),  # the largest reached wins
        ([3], 0, (0, 100)),  # between two preferred sizes
        ([3, 2], 1, (2, None)),  # beyond the largest preferred size it need not grow
        ([3, 4], 1, (1, None)),  # cannot grow
        ([1, 2, 1], 2, (3, None)),
    ],
)
def test_preferred_sizes(rows: list[int], now: int, answer: tuple[int, int | None]) -> None:
    policy = BatchPolicy(max_rows=6, max_delay=100, preferred=frozenset({2, 4}))
    assert taken_of(policy, queue_of(rows), now) == answer


@pytest.mark.parametrize(
    ("rows", "taken"), [([1], 1), ([1, 1, 1], 2), ([3], 1), ([2, 2], 2), ([1, 1, 2, 1], 3)]
)
def test_preferred_sizes_without_delay(rows: list[int], taken: int) -> None:
    policy = BatchPolicy(max_rows=6, preferred=frozenset({2, 4}))
    assert taken_of(policy, queue_of(rows), 0) == (taken, None)


@pytest.mark.parametrize("delay", [0, 100])
@pytest.mark.parametrize(
    ("keys", "rows", "positions", "reason"),
    [
        ("aaba", [1, 1, 1, 1], [0, 1, 3], Closed.SHAPE),
        ("ab", [1, 1], [0], Closed.SHAPE),  # no wait for more requests behind another shape
        ("abab", [2, 2, 2, 2], [0, 2], Closed.FULL),
        ("abcabca", [1, 4, 4, 2, 4, 4, 2], [0, 3], Closed.FULL),  # the last does not fit
        ("abaa", [3, 1, 2, 1], [0], Closed.FULL),  # and no request of its shape overtakes it
        ("ba", [4, 1], [0], Closed.FULL),
    ],
)
def test_requests_of_another_key_are_skipped(
    keys: str, rows: list[int], positions: list[int], reason: Closed, delay: int
) -> None:
    queue = [queued(n, key=key) for n, key in zip(rows, keys, strict=True)]
    taken, why, ask_at = BatchPolicy(4, delay).take(queue, 0)
    assert (list(taken), why, ask_at) == (positions, reason, None)


def test_the_number_of_skipped_requests_is_bounded() -> None:
    others = [queued(1, key="b")] * LOOK_AHEAD
    near = [queued(1, key="a"), *others, queued(1, key="a")]
    far = [queued(1, key="a"), *others, queued(1, key="b"), queued(1, key="a")]
    assert list(BatchPolicy(4).take(near, 0)[0]) == [0, LOOK_AHEAD + 1]
    assert list(BatchPolicy(4).take(far, 0)[0]) == [0]


QUEUES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc")), max_size=40)


@given(QUEUES, st.sampled_from([frozenset[int](), frozenset({2}), frozenset({2, 4})]))
def test_no_shape_starves_and_order_holds_within_a_shape(
    asked: list[tuple[int, str]], preferred: frozenset[int]
) -> None:
    policy = BatchPolicy(4, preferred=preferred)
    waiting = list(enumerate(queued(rows, key=key) for rows, key in asked))
    order: dict[object, list[int]] = {}
    turn = 0
    while waiting:
        taken = list(policy.take([request for _, request in waiting], 0)[0])
        assert taken[0] == 0
        batch = [waiting[position] for position in taken]
        assert len({request.key for _, request in batch}) == 1
        assert sum(request.rows for _, request in batch) <= 4
        assert all(turn <= number for number, _ in batch)  # batches that it has waited for
        order.setdefault(batch[0][1].key, []).extend(number for number, _ in batch)
        waiting = [item for item in waiting if item not in batch]
        turn += 1
    assert all(numbers == sorted(numbers) for numbers in order.values())
    assert sum(map(len, order.values())) == len(asked)


@pytest.mark.parametrize(
    ("rows", "now", "reason"),
    [
        ([4], 0, Closed.FULL),
        ([3, 2], 0, Closed.FULL),
        ([2], 0, Closed.FULL),  # a preferred size
        ([1], 100, Closed.DELAY),
    ],
)
def test_reasons_for_closing_a_batch(rows: list[int], now: int, reason: Closed) -> None:
    policy = BatchPolicy(4, 100, frozenset({2}))
    assert policy.take(queue_of(rows), now)[1] is reason


def test_without_delay_a_batch_closes_for_a_free_instance() -> None:
    assert BatchPolicy(4).take(queue_of([1]), 0)[1] is Closed.IDLE
    assert BatchPolicy(0).take(queue_of([1]), 0)[1] is Closed.FULL


def test_a_delay_ends_before_a_request_times_out() -> None:
    queue = [queued(1, 10), queued(1, 20, deadline=80), queued(1, 30, deadline=400)]
    policy = BatchPolicy(4, 100, keeps_deadlines=True)
    assert policy.take(queue, 49) == (range(0), Closed.IDLE, 50)
    assert policy.take(queue, 50) == (range(3), Closed.DEADLINE, None)
    assert policy.take(queue[:1], 50) == (range(0), Closed.IDLE, 110)
    queue_policy = BatchPolicy(4, 100)  # Triton's rule: they time out
    assert queue_policy.take(queue, 50) == (range(0), Closed.IDLE, 110)


def test_a_model_that_does_not_batch_gets_one_request_at_a_time() -> None:
    policy = BatchPolicy(max_rows=0, max_delay=100)
    assert taken_of(policy, queue_of([1, 1]), 0) == (1, None)
    assert taken_of(policy, queue_of([]), 0) == (0, None)


def test_the_delay_counts_from_the_oldest_also_behind_a_more_urgent_one() -> None:
    queue = [queued(1, arrived=50), queued(1, arrived=0)]
    policy = BatchPolicy(max_rows=4, max_delay=100)
    assert taken_of(policy, queue, 60) == (0, 100)
    assert taken_of(policy, queue, 100) == (2, None)


def test_taking_looks_no_further_than_the_batch_can_grow() -> None:
    seen = []

    def arriving() -> Iterator[Call]:
        for n in range(1_000):
            seen.append(n)
            yield queued(1)

    assert taken_of(BatchPolicy(max_rows=4), arriving(), 0) == (4, None)
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
def test_deadline_of_a_request(
    default_us: int, override: bool, asked_us: int, deadline_ns: int | None
) -> None:
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
        (0, 0, 0, 1), (0, 0, 9, 1), (3, 2, 0, 2), (3, 2, 1, 1), (3, 2, 3, 3), (3, 2, 4, 2),
        (3, 2, 2**64 - 1, 2),
    ],
)  # fmt: skip
def test_priority_level_of_a_request(levels: int, default: int, priority: int, level: int) -> None:
    policy = SchedulingPolicy(BatchPolicy(4), levels=levels, default_level=default)
    assert policy.level(priority) == level


def test_a_level_without_limits_of_its_own_has_the_default_ones() -> None:
    own, common = QueuePolicy(max_size=1), QueuePolicy(max_size=9)
    policy = SchedulingPolicy(BatchPolicy(4), common, levels=2, default_level=1, by_level={2: own})
    assert policy.queue_policy(1) is common
    assert policy.queue_policy(2) is own
