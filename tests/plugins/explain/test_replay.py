"""The cost of a batch, and the replay of logged requests: tables, and the scheduler beside it."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from sys import maxsize

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.observability.statistics import Closed
from headrace.plugins.explain.replay import (
    SeenRequest,
    alternatives,
    learn_cost,
    replay,
    seen_requests,
)
from headrace.scheduling.batch_log import LoggedBatch, LoggedRequest
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import Bench, FakeInstance, signature

_MOST_ROWS = 8


def seen(*arrivals: tuple[int, int], key: object = None) -> list[SeenRequest]:
    """Requests that are seen as they arrive: moments and rows."""
    return [SeenRequest(moment, LoggedRequest(moment, rows, key)) for moment, rows in arrivals]


@pytest.mark.parametrize(("batches", "fixed", "row", "error", "sizes"), [
    ([(1, 110), (2, 120), (8, 180)], 100, 10, 0, 3),
    ([(4, 100), (4, 140)], 120, 0, 20, 1),  # a single size: all of it is fixed
    ([(1, 100), (2, 50)], 75, 0, 25, 2),  # more rows cannot cost less
    ([(1, 0), (2, 100)], 0, 40, 31.62, 2),  # nor can a batch without rows
])  # fmt: skip
def test_the_cost_of_a_batch(
    batches: Sequence[tuple[int, int]], fixed: float, row: float, error: float, sizes: int
) -> None:
    cost = learn_cost(batches)
    assert cost is not None
    found = cost.fixed_ns, cost.row_ns, cost.error_ns
    assert found == pytest.approx((fixed, row, error), abs=0.01)
    assert (cost.batches, cost.sizes) == (len(batches), sizes)


def test_no_batch_has_no_cost() -> None:
    assert learn_cost([]) is None


@given(
    st.floats(0, 1e6), st.floats(0, 1e5),
    st.lists(st.tuples(st.integers(1, 64), st.floats(-1e4, 1e4)), min_size=2, max_size=50),
)  # fmt: skip
def test_the_cost_is_the_best_of_those_near_it(
    fixed: float, row: float, noise: Sequence[tuple[int, float]]
) -> None:
    batches = [(rows, max(round(fixed + row * rows + wrong), 0)) for rows, wrong in noise]
    cost = learn_cost(batches)
    assert cost is not None
    assert cost.fixed_ns >= 0 <= cost.row_ns

    def squares(one: float, other: float) -> float:
        return float(np.mean([(one + other * rows - ns) ** 2 for rows, ns in batches]))

    least = squares(cost.fixed_ns, cost.row_ns)
    assert cost.error_ns == pytest.approx(least**0.5, abs=1e-3)
    for more, further in ((10, 0), (-10, 0), (0, 1), (0, -1), (10, -1), (-10, 1)):
        near = max(cost.fixed_ns + more, 0), max(cost.row_ns + further, 0)
        assert squares(*near) >= least * (1 - 1e-9) - 1e-3


# Requests as moments and rows, and what comes of them where a batch takes 100 ns and 10 for a row.
@pytest.mark.parametrize(("policy", "instances", "requests", "rows", "latencies"), [
    (BatchPolicy(4), 1, [], [], []),
    (BatchPolicy(4), 1, [(5, 1)], [1], [110]),
    # Those that come while the instance is busy run together, those beyond the size later.
    (BatchPolicy(4), 1, [(0, 1), (10, 1), (20, 2), (30, 2)], [1, 3, 2], [110, 230, 220, 330]),
    (BatchPolicy(4), 2, [(0, 1), (10, 1), (20, 2), (30, 2)], [1, 1, 4], [110, 110, 230, 220]),
    (BatchPolicy(4), 1, [(0, 2), (0, 2), (0, 1)], [4, 1], [140, 140, 250]),
    # A delay waits for others, until its end or a full batch.
    (BatchPolicy(4, 50), 1, [(0, 1), (10, 1)], [2], [170, 160]),
    (BatchPolicy(4, 50), 1, [(0, 1), (10, 3)], [4], [150, 140]),
    (BatchPolicy(4, 50, frozenset({2})), 1, [(0, 1), (10, 1), (20, 1)], [2, 1], [130, 120, 220]),
    (BatchPolicy(0), 1, [(0, 1), (0, 1)], [1, 1], [110, 220]),  # the model does not batch
])  # fmt: skip
def test_replays(
    policy: BatchPolicy, instances: int, requests: Sequence[tuple[int, int]],
    rows: Sequence[int], latencies: Sequence[int],
) -> None:  # fmt: skip
    found = replay(seen(*requests), policy, instances, lambda rows: 100 + 10 * rows)
    assert found.rows == rows
    assert found.latencies_ns == latencies
    assert 0 <= found.busy <= 1


# Clients that send again after a pause, and what comes of them at the same cost.
@pytest.mark.parametrize(("policy", "clients", "pause", "more", "rows", "latencies"), [
    (BatchPolicy(4), 1, 50, 2, [1, 1, 1], [110, 110, 110]),
    (BatchPolicy(4), 2, 0, 2, [2, 2], [120, 120, 120, 120]),
    (BatchPolicy(1), 2, 0, 2, [1, 1, 1, 1], [110, 220, 220, 220]),
    (BatchPolicy(4), 2, 0, 1, [2, 1], [120, 120, 110]),  # the first one is sent, and no other
])  # fmt: skip
def test_replays_of_clients_that_wait(
    policy: BatchPolicy, clients: int, pause: int, more: int,
    rows: Sequence[int], latencies: Sequence[int],
) -> None:  # fmt: skip
    first = seen(*[(0, 1)] * clients)
    found = replay(first, policy, 1, lambda rows: 100 + 10 * rows, pause, more)
    assert (found.rows, found.latencies_ns) == (rows, latencies)
    assert found.lasted_ns == sum(100 + 10 * each for each in rows) + pause * (len(rows) - 1)
    assert len(first) == clients


def test_requests_of_other_shapes_run_apart() -> None:
    requests = [*seen((0, 1), (1, 1)), *seen((2, 1), key="other"), *seen((3, 1))]
    found = replay(requests, BatchPolicy(4), 1, lambda rows: 100)
    assert found.rows == [1, 2, 1]
    assert found.latencies_ns == [100, 199, 197, 298]


def test_urgent_requests_run_first() -> None:
    levels = (1, 3, 2, 3, 1)  # the first one runs at once, the others wait for it
    requests = [
        SeenRequest(at, LoggedRequest(at, 1, None, level=level)) for at, level in enumerate(levels)
    ]
    found = replay(requests, BatchPolicy(2), 1, lambda rows: 100)
    assert (found.rows, found.levels) == ([1, 2, 2], [1, 1, 2, 3, 3])
    assert found.latencies_ns == [100, 196, 198, 299, 297]
    found = replay(requests, BatchPolicy(2), 1, lambda rows: 100, moved={3: 1, 2: 1})
    assert (found.rows, found.levels) == ([1, 2, 2], [1, 3, 2, 3, 1])
    assert found.latencies_ns == [100, 199, 198, 297, 296]


def test_a_busy_instance_is_busy_all_the_time() -> None:
    found = replay(seen((0, 1), (50, 1), (150, 1)), BatchPolicy(4), 1, lambda rows: 100)
    assert found.busy == 1.0


def logged(closed: Closed | None, free: int, started: int, *arrivals: int) -> LoggedBatch:
    requests = tuple(LoggedRequest(moment, 1, None) for moment in arrivals)
    ended = started + 100
    return LoggedBatch(requests, closed, free, started, started, ended, ended, ended)


@pytest.mark.parametrize(("batches", "delay", "expected"), [
    # With a free instance, requests are seen when the turn ends that has read them.
    ([logged(Closed.IDLE, 0, 9, 5, 7)], 0, [9, 9]),
    # A request that was read in the same turn, and did not fit, is seen then, too.
    ([logged(Closed.FULL, 0, 9, 3, 4), logged(Closed.IDLE, 120, 130, 5)], 0, [9, 9, 9]),
    ([logged(Closed.IDLE, 30, 40, 5, 7)], 0, [5, 7]),
    ([logged(Closed.FULL, 0, 9, 5, 7)], 20, [5, 7]),
    ([logged(None, 0, 9, 7), logged(Closed.IDLE, 6, 9, 5)], 0, [5, 7]),
])  # fmt: skip
def test_when_requests_are_seen(
    batches: Sequence[LoggedBatch], delay: int, expected: Sequence[int]
) -> None:
    found = seen_requests(batches, BatchPolicy(4, delay))
    assert [each.seen for each in found] == expected
    assert [each.request.arrived for each in found] == sorted(
        each.arrived for batch in batches for each in batch.requests
    )


def changes(
    policy: BatchPolicy, instances: int, largest: int = 1, sizes: int = 2,
    levels: Sequence[int] = (1,),
) -> list[object]:  # fmt: skip
    return [each.change for each in alternatives(policy, instances, largest, sizes, levels)]


def test_other_settings() -> None:
    size, delay, number = "max_batch_size", "max_queue_delay_microseconds", "instances"
    assert changes(BatchPolicy(8), 1) == [
        {}, {size: 4}, {size: 16}, {delay: 500}, {delay: 2000}, {number: 2},
    ]  # fmt: skip
    assert changes(BatchPolicy(8, 100_000), 2, largest=5) == [
        {}, {size: 16}, {delay: 0}, {delay: 50}, {delay: 200}, {number: 1}, {number: 3},
    ]  # fmt: skip
    assert changes(BatchPolicy(0), 1, sizes=1) == [{}, {number: 2}]
    assert changes(BatchPolicy(8), 1, sizes=1) == [{}]
    assert changes(BatchPolicy(0), 1, levels=(3, 1)) == [{}, {number: 2}, {"priority 3": 1}]
    assert changes(BatchPolicy(0), 1, levels=(2, 4, 6, 8, 9)) == [
        {}, {number: 2}, {"priority 4": 2}, {"priority 6": 2}, {"priority 8": 2},
        {"priority_levels": 0},
    ]  # fmt: skip


def test_other_settings_are_those_of_policies() -> None:
    policy = BatchPolicy(8, 100_000, frozenset({4, 8}), keeps_deadlines=True)
    found = {tuple(each.change.items()): each for each in alternatives(policy, 2, 1, 2)}
    assert found[(("max_batch_size", 16),)].policy.preferred == {4, 16}
    halved = found[(("max_batch_size", 4),)].policy
    assert halved == BatchPolicy(4, 100_000, frozenset({4}), keeps_deadlines=True)
    doubled = found[(("max_queue_delay_microseconds", 200),)].policy
    assert doubled == BatchPolicy(8, 200_000, frozenset({4, 8}), keeps_deadlines=True)
    assert found[(("instances", 3),)].instances == 3
    *_, one, every = alternatives(policy, 2, 1, 2, (1, 2, 5))
    assert (one.change, one.moved) == ({"priority 5": 1}, {5: 1})
    assert (every.change, every.moved) == ({"priority_levels": 0}, {2: 1, 5: 1})
    assert every.policy == policy


def simulated(
    policy: BatchPolicy, instances: int, requests: Sequence[tuple[int, int, int]], levels: int = 0
) -> list[LoggedBatch]:
    """The log of a scheduler whose batches take 103 ns, and 10 for each row.

    Requests come after gaps, with rows and widths; those of one width share batches. Of some
    `levels`, each has that of its rows, and the others the last one. Without a gap
    they are read in the same turn, each 1 ns after the one before.
    """
    policies = SchedulingPolicy(policy, levels=levels, default_level=levels)
    bench = Bench(policies, instances, shape=signature(policy.max_rows))
    bench.batcher.logged()  # the log begins with the first question
    clock, ends = bench.clock, dict[FakeInstance, int]()
    gaps = (gap or 1 for gap, _, _ in requests)
    arrivals = deque(zip(accumulate(gaps), requests, strict=True))
    while moments := [*ends.values(), *clock.armed[:1], *(at for at, _ in islice(arrivals, 1))]:
        clock.advance(min(moments) - clock.now())
        for instance in [one for one, end in ends.items() if end <= clock.now()]:
            del ends[instance]
            instance.finish()
        others = min([*ends.values(), *clock.armed], default=maxsize)
        first = True
        while arrivals and (
            arrivals[0][0] <= clock.now()
            if first
            else not arrivals[0][1][0] and arrivals[0][0] < others
        ):
            clock.time, (_, rows, width) = arrivals.popleft()
            bench.submit("", *range(rows), width=width, priority=rows if levels else 0)
            first = False
        clock.settle()
        for instance in bench.instances:
            if instance.busy and instance not in ends:
                ends[instance] = clock.now() + 103 + 10 * instance.rows[-1]
    return bench.batcher.logged()[0]


_POLICIES = st.builds(
    BatchPolicy, st.just(_MOST_ROWS),
    st.sampled_from([0, 55, 205, 1005]),  # never over when a request arrives
    st.frozensets(st.integers(1, _MOST_ROWS), max_size=2),
)  # fmt: skip
_REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 30).map(lambda tens: 100 * tens), st.integers(1, _MOST_ROWS),
        st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=1, max_size=60,
)  # fmt: skip


@given(_POLICIES, st.integers(1, 3), _REQUESTS, st.sampled_from([0, 0, 2, 4]))
@example(BatchPolicy(_MOST_ROWS), 1, [(100, 3, 1), (0, 3, 1), (0, 3, 1), (0, 8, 1), (100, 1, 1)], 0)
@example(BatchPolicy(_MOST_ROWS), 2, [(0, 1, 1), (0, 5, 1), (0, 3, 1)], 0)
def test_a_replay_of_the_present_settings_has_the_logged_batches(
    policy: BatchPolicy, instances: int, requests: Sequence[tuple[int, int, int]], levels: int
) -> None:
    if policy.max_delay:  # the replay knows turns only by batches that had no delay
        requests = [(gap or 100, rows, width) for gap, rows, width in requests]
    log = simulated(policy, instances, requests, levels)
    assert sum(len(batch.requests) for batch in log) == len(requests)
    cost = learn_cost([(batch.rows, batch.ended - batch.started) for batch in log])
    assert cost is not None
    assert cost.error_ns == pytest.approx(0, abs=1e-3)
    found = replay(seen_requests(log, policy), policy, instances, cost.of)
    assert sorted(found.rows) == sorted(batch.rows for batch in log)
    latencies = [batch.ended - each.arrived for batch in log for each in batch.requests]
    assert sorted(found.latencies_ns) == sorted(latencies)
    assert sorted(found.levels) == sorted(each.level for batch in log for each in batch.requests)
