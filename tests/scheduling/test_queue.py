"""The queue of one model: levels, limits, timeouts and cancellation."""

import gc
import weakref
from sys import maxsize

import pytest

from headrace.core.call import Call
from headrace.core.errors import QueueFull
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction
from headrace.scheduling.queue import RequestQueue
from tests.scheduling.fakes import Bench, entered, request

REJECT, DELAY = TimeoutAction.REJECT, TimeoutAction.DELAY


def policy_of(
    *, size: int = 0, timeout: int = 0, action: TimeoutAction = REJECT, levels: int = 0
) -> SchedulingPolicy:
    """Priority levels with the last as default and equal limits; `timeout` in us."""
    limits = QueuePolicy(size, timeout * 1_000, action, True)
    return SchedulingPolicy(BatchPolicy(4), limits, levels, levels)


def put(
    queue: RequestQueue, name: str, priority: int = 0, timeout: int = 0, arrived: int = 0
) -> Call:
    """Queue a request of one row."""
    asked = request(name, 1, priority=priority, timeout=timeout)
    call = entered(asked, 1, None, arrived, Bench().batcher)
    queue.append(call)
    return call


def end(queue: RequestQueue, call: Call) -> None:
    """Cancel a request like its client does."""
    call.ended = True
    queue.discard(call)


def names(queue: RequestQueue) -> list[str]:
    return [call.id for call in queue]


def test_any_number_of_levels() -> None:
    """A level is allocated when first used and released soon after."""
    queue = RequestQueue(policy_of(levels=2**64 - 1))
    for name, level in (("last", 0), ("c", 10**9), ("a", 1), ("b", 2000), ("c2", 10**9)):
        put(queue, name, priority=level)
    assert names(queue) == ["a", "b", "c", "c2", "last"]
    assert [call.id for call in queue.popleft(9)] == ["a", "b", "c", "c2", "last"]
    gc.collect()
    before = len(gc.get_objects())
    for level in range(1, 2_000):
        put(queue, "x", priority=level)
        assert len(queue.popleft(1)) == 1
    gc.collect()
    assert len(gc.get_objects()) < before + 1_000
    late = put(queue, "late", priority=7)
    early = put(queue, "early", priority=6)
    assert queue.popleft(2) == [early, late]


def test_levels_are_first_in_first_out() -> None:
    queue = RequestQueue(policy_of(levels=3))
    for name, priority in [("c", 3), ("default", 0), ("b", 2), ("a", 1), ("b2", 2), ("far", 17)]:
        put(queue, name, priority)
    assert names(queue) == ["a", "b", "b2", "c", "default", "far"]
    taken = queue.popleft(4)
    assert [p.id for p in taken] == ["a", "b", "b2", "c"]
    assert all(call.started for call in taken)
    assert not any(call.started for call in queue)
    assert (names(queue), queue.waiting) == (["default", "far"], 2)
    assert len(queue.popleft(9)) == 2
    assert (names(queue), queue.waiting) == ([], 0)


@pytest.mark.parametrize(
    "batch",
    [
        BatchPolicy(4), BatchPolicy(0), BatchPolicy(1), BatchPolicy(4, preferred=frozenset({1})),
        BatchPolicy(4, preferred=frozenset({2})), BatchPolicy(4, max_delay=100),
        BatchPolicy(4, max_delay=100, preferred=frozenset({1})),
    ],
)  # fmt: skip
def test_a_single_request_is_taken_by_the_policy(batch: BatchPolicy) -> None:
    queue = RequestQueue(SchedulingPolicy(batch))
    waits = put(queue, "a")
    for now in (0, 100):
        positions, reason, ask_at = batch.take([waits], now)
        assert queue.take(now) == ([waits] if positions else [], reason, ask_at)
        if positions:
            assert (queue.waiting, waits.started) == (0, True)
            break


def test_the_limit_applies_to_one_level() -> None:
    queue = RequestQueue(policy_of(size=2, levels=2))
    first = put(queue, "a", 1)
    put(queue, "b", 1)
    with pytest.raises(QueueFull, match=r"^\[request id: c\] Exceeds maximum queue size of 2"):
        put(queue, "c", 1)
    assert queue.waiting == 2
    put(queue, "d", 2)  # another level
    end(queue, first)
    put(queue, "e", 1)
    queue.popleft(1)
    put(queue, "f", 1)
    assert names(queue) == ["e", "f", "d"]
    with pytest.raises(QueueFull, match="<id_unknown>"):
        put(queue, "", 1)
    queue = RequestQueue(policy_of(size=1, timeout=1, action=DELAY))
    put(queue, "a")
    assert queue.expire(1_000) == []
    with pytest.raises(QueueFull):  # delayed requests count
        put(queue, "b")


def test_rejected_requests_leave_in_the_order_of_deadlines() -> None:
    queue = RequestQueue(policy_of(timeout=10))
    slow, fast, last = put(queue, "slow"), put(queue, "fast", timeout=5), put(queue, "last")
    assert queue.next_deadline() == 5_000
    assert queue.expire(4_999) == []
    assert queue.expire(5_000) == [fast]
    assert (fast.ended, queue.waiting, names(queue)) == (True, 2, ["slow", "last"])
    assert queue.next_deadline() == 10_000
    assert queue.expire(10_000) == [slow, last]
    assert (queue.waiting, queue.next_deadline()) == (0, None)


def test_delayed_requests_go_behind_their_level() -> None:
    queue = RequestQueue(policy_of(timeout=10, action=DELAY, levels=2))
    put(queue, "late", 1, timeout=5)
    put(queue, "in time", 1)
    put(queue, "less urgent", 2)
    assert queue.expire(5_000) == []
    assert names(queue) == ["in time", "late", "less urgent"]
    put(queue, "new", 1, arrived=6_000)
    assert names(queue) == ["in time", "new", "late", "less urgent"]
    assert queue.waiting == 4
    assert [p.id for p in queue.popleft(9)] == ["in time", "new", "late", "less urgent"]
    assert queue.next_deadline() is None


def test_started_or_ended_requests_do_not_time_out() -> None:
    queue = RequestQueue(policy_of(timeout=10))
    put(queue, "started")
    gone = put(queue, "gone")
    queue.popleft(1)
    end(queue, gone)
    assert queue.next_deadline() is None
    assert queue.expire(99_999) == []


def test_cancelled_requests_release_tensors_and_are_skipped() -> None:
    queue = RequestQueue(policy_of())
    first, second, third = (put(queue, name) for name in "abc")
    end(queue, second)
    assert second.inputs == {}
    assert (queue.waiting, names(queue)) == (2, ["a", "c"])
    assert queue.popleft(2) == [first, third]
    assert not second.started


def test_cancelling_all_empties_the_queue() -> None:
    queue = RequestQueue(policy_of(size=2))
    for _ in range(200):  # often enough for a sweep
        first, second = put(queue, "a"), put(queue, "b")
        end(queue, second)
        end(queue, first)
        assert (queue.waiting, names(queue), queue.popleft(1)) == (0, [], [])


def test_order_limits_and_deadlines_survive_a_sweep() -> None:
    queue = RequestQueue(policy_of(timeout=100, size=300))
    kept = []
    for n in range(300):
        call = put(queue, str(n), timeout=90 - n % 3, arrived=n)
        if n % 50:
            end(queue, call)
        else:
            kept.append(call)
    assert queue.waiting == len(kept) == 6
    assert list(queue) == kept
    assert queue.next_deadline() == 50 + 88_000  # the first of the shortest timeouts
    assert set(queue.expire(200_000)) == set(kept)


@pytest.mark.parametrize("started", [True, False])
def test_started_or_ended_requests_are_not_kept(started: bool) -> None:
    """Neither until their deadline nor until they reach the head."""
    queue = RequestQueue(policy_of(timeout=10, levels=2))
    put(queue, "head", 2 if started else 1)  # before the others, also in timing out
    calls = []
    for n in range(1_000):
        call = put(queue, str(n), 1, arrived=n)
        calls.append(weakref.ref(call))
        if started:
            queue.popleft(1)
        else:
            end(queue, call)
        del call
    assert (queue.waiting, queue.next_deadline()) == (1, 10_000)
    gc.collect()
    assert sum(call() is not None for call in calls) < 100


def test_light_requests_have_every_other_turn() -> None:
    """Requests of a busy client wait longer, but not for ever."""
    queue = RequestQueue(SchedulingPolicy(BatchPolicy(2)))

    def add(name: str, light: bool = False) -> Call:
        call = entered(request(name, 1), 1, None, int(light), Bench().batcher)
        queue.append(call, light)
        return call

    for number in range(8):
        add(f"busy {number}")
    assert queue.oldest == maxsize  # asked for beside light ones only
    cancelled = add("light x", True)
    for number in range(5):
        add(f"light {number}", True)
    end(queue, cancelled)
    assert (queue.waiting, queue.oldest) == (13, 0)
    taken = []
    while queue.waiting:
        taken.append([call.id for call in queue.take(0)[0]])
        assert len(taken) < 10
    assert sorted(name for batch in taken for name in batch) == [
        *(f"busy {n}" for n in range(8)),
        *(f"light {n}" for n in range(5)),
    ]
    kinds = ["".join(name[0] for name in batch) for batch in taken]
    assert kinds == ["ll", "bb", "ll", "bb", "lb", "bb", "b"]
    for kind in ("busy", "light"):
        found = [name for batch in taken for name in batch if name.startswith(kind)]
        assert found == sorted(found)


def test_busy_clients_get_no_more_than_in_order_of_arrival() -> None:
    queue = RequestQueue(SchedulingPolicy(BatchPolicy(1)))
    for number in range(20):
        queue.append(entered(request("light", 1), 1, None, number, Bench().batcher), True)
    queue.append(entered(request("busy", 1), 1, None, 15, Bench().batcher))
    taken = [queue.take(0)[0][0].id for _ in range(21)]
    assert taken.index("busy") == 16


def test_picking_keeps_the_order_of_the_others() -> None:
    queue = RequestQueue(policy_of(levels=2))
    first, gone, second, third = (put(queue, name, 1) for name in ("a", "gone", "b", "c"))
    low = [put(queue, name, 2) for name in "de"]
    end(queue, gone)
    assert queue.pick([0, 2, 3]) == [first, third, low[0]]
    assert (names(queue), queue.waiting) == (["b", "e"], 2)
    assert [p.started for p in (first, second, third, *low)] == [True, False, True, True, False]
    put(queue, "f", 1)
    assert names(queue) == ["b", "f", "e"]
    assert [p.id for p in queue.popleft(3)] == ["b", "f", "e"]
