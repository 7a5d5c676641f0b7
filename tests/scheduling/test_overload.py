"""Overload of a queue, in simulations of a model and its clients."""

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.core.errors import QueueTimeout
from headrace.scheduling.overload import DelayBound, Overload
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import Bench, FakeCall

MS, SEC = 1_000_000, 1_000_000_000
BOUND = DelayBound(1_000 * MS)


@dataclass
class Served:
    """Results of a simulation: waits of answered requests, number and waits of refused ones."""

    waits: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    @property
    def p99(self) -> int:
        return sorted(self.waits)[math.ceil(len(self.waits) * 0.99) - 1]


def serve(arrivals: list[int], run: int, rows: int = 1, bound: DelayBound | None = BOUND) -> Served:
    """One instance that runs up to `rows` of these arrivals at a time, in `run` ns."""
    overload, served, queue = Overload(bound), Served(), deque[int]()
    coming, now = deque(arrivals), 0
    while coming or queue:
        while coming and coming[0] <= now:
            queue.append(coming.popleft())
        batch: list[int] = []
        while queue and len(batch) < rows:
            arrived = queue.popleft()
            waited = now - arrived
            if waited > overload.late:
                if overload.late_start(now, len(queue)):
                    served.refused.append(waited)
                    continue
            else:
                overload.timely(waited, len(queue))
            batch.append(arrived)
        if batch:
            served.waits += [now - arrived for arrived in batch]
            now += run
            if run > overload.brief:
                overload.ran(run)
        elif coming:
            now = max(now, coming[0])
    return served


def steady(rate: float, seconds: float) -> list[int]:
    """Arrivals at a rate per second."""
    return [round(index * SEC / rate) for index in range(math.floor(rate * seconds))]


RUNS = st.integers(4, 120)  # milliseconds
ROWS = st.sampled_from([1, 4, 32])


@settings(max_examples=20)
@given(RUNS, ROWS, st.floats(1.5, 6.0))
def test_answers_are_in_time_and_the_model_stays_busy(run: int, rows: int, load: float) -> None:
    capacity = rows * 1000 / run
    assume(load * capacity <= 1_000)
    served = serve(steady(load * capacity, 60), run * MS, rows)
    settled = served.waits[round(10 * capacity) :]
    assert max(settled) <= max(1_000, 8 * run) * MS
    assert served.refused
    assert len(served.waits) >= 0.99 * capacity * 59


@settings(max_examples=20)
@given(RUNS, ROWS)
def test_three_times_the_capacity(run: int, rows: int) -> None:
    capacity = rows * 1000 / run
    assume(3 * capacity <= 1_000)
    served = serve(steady(3 * capacity, 60), run * MS, rows)
    assert served.p99 + run * MS <= 2_000 * MS
    assert len(served.waits) >= 0.99 * capacity * 59


@given(st.integers(1, 30_000), ROWS, st.floats(0.1, 6.0), st.floats(0.0, 0.8))
def test_a_burst_of_a_second_is_served(run: int, rows: int, load: float, before: float) -> None:
    capacity = rows * 1000 / run
    assume(load * capacity <= 3_000)
    usual = steady(before * capacity, 10)
    burst = [5 * SEC + moment for moment in steady(load * capacity, 1)]
    assert not serve(sorted(usual + burst), run * MS, rows).refused


@settings(max_examples=20)
@given(RUNS, ROWS, st.integers(1, 600))
def test_clients_that_wait_for_their_answers_are_served(run: int, rows: int, clients: int) -> None:
    overload, now, queue = Overload(BOUND), 0, deque([0] * clients)
    for _ in range(2_000 // rows):
        batch = [queue.popleft() for _ in range(min(rows, len(queue)))]
        waited = now - batch[0]
        if waited > overload.late:
            assert not overload.late_start(now, len(queue))
        else:
            overload.timely(waited, len(queue))
        now += run * MS
        queue.extend([now] * len(batch))


def refused_in_closed_loop(
    run: int, joining: list[tuple[int, int]], seconds: int, pauses: Callable[[], int]
) -> int:
    """Refusals of clients that join, so many at a time, and pause after each answer."""
    overload, now, queue = Overload(BOUND), 0, deque[int]()
    sending = [moment for moment, clients in joining for _ in range(clients)]
    refused = 0
    while now < seconds * SEC:
        while sending and sending[0] <= now:
            queue.append(heappop(sending))
        if not queue:
            now = sending[0]
            continue
        waited = now - queue.popleft()
        if waited > overload.late:
            refused += overload.late_start(now, len(queue))
        else:
            overload.timely(waited, len(queue))
        now += run
        if run > overload.brief:
            overload.ran(run)
        heappush(sending, now + pauses())
    return refused


@pytest.mark.parametrize("run", [5 * MS, 20 * MS, 100 * MS, SEC])
@pytest.mark.parametrize("clients", [12, 64, 300])
def test_more_clients_that_wait_for_their_answers_are_served(run: int, clients: int) -> None:
    joining = [(0, clients), (20 * SEC, clients // 4)]
    assert not refused_in_closed_loop(run, joining, 60, lambda: 0)


@pytest.mark.parametrize(("run", "clients"), [(20 * MS, 200), (100 * MS, 64), (SEC, 12)])
def test_clients_that_pause_between_their_requests_are_served(run: int, clients: int) -> None:
    chance, longest = random.Random(1), run * clients // 2
    pauses = partial(chance.randint, 0, longest)
    assert not refused_in_closed_loop(run, [(0, clients)], 120, pauses)


def test_growth_is_seen_after_a_long_time_without_any() -> None:
    state, now = Overload(BOUND), SEC
    for waiting in [1_000] + [100] * 50_000:
        assert not state.late_start(now, waiting)
        now += 20 * MS
    grown = now
    for waiting in range(100, 5_000, 2):
        if state.late_start(now, waiting):
            break
        now += 20 * MS
    assert state.refusing
    assert now - grown < 30 * SEC


@given(st.integers(1, 500), ROWS)
def test_work_for_a_second_that_arrives_at_once_is_served(run: int, rows: int) -> None:
    arrivals = [0] * round(rows * 1000 / run)
    assert not serve(arrivals, run * MS, rows).refused


@given(st.integers(1, 120), st.integers(1, 8))
def test_a_slow_model_with_a_short_queue_is_not_overloaded(run: int, clients: int) -> None:
    # Each of these clients sends its next request when the last one is answered.
    overload, now, asked = Overload(BOUND), 0, deque([0] * clients)
    for _ in range(200):
        waited = now - asked.popleft()
        if waited > overload.late:
            assert not overload.late_start(now, len(asked))
        else:
            overload.timely(waited, len(asked))
        now += run * SEC
        overload.ran(run * SEC)
        asked.append(now)


@given(st.lists(st.integers(1, 3_000), min_size=2, max_size=300))
def test_nothing_is_refused_without_a_bound(gaps: list[int]) -> None:
    arrivals = [sum(gaps[:index]) for index in range(len(gaps))]
    served = serve(arrivals, 60 * SEC, 1, None)
    assert not served.refused
    assert len(served.waits) == len(gaps)


def test_a_time_without_any_start_is_none_of_overload() -> None:
    overload = Overload(BOUND)
    for now in range(100, 160, 10):  # a worker that starts again and again
        assert not overload.late_start(now * SEC, now)


def test_a_bound_has_the_time_in_which_batches_gather() -> None:
    assert Overload(DelayBound(100 * MS, 5 * SEC)).late == 5_100 * MS


def test_a_model_that_has_become_fast_has_the_usual_bound_again() -> None:
    overload = Overload(BOUND)
    overload.ran(30 * SEC)
    assert overload.late == 240 * SEC
    found = [overload.late]
    while overload.brief < 0:
        overload.ran(MS)
        found.append(overload.late)
    assert all(after < before for before, after in pairwise(found))
    assert overload.late == 1_000 * MS


# --- in the scheduler


def bench() -> Bench:
    policy = SchedulingPolicy(BatchPolicy(0), overload=DelayBound(100 * MS))
    return Bench(policy)


def overload(made: Bench, count: int, timeout: int = 0) -> list[FakeCall]:
    """Send so many requests, three for each run of 12 ms; returns them when all have ended."""
    calls = [made.submit("first", timeout=timeout)]
    made.clock.settle()
    while made.instances[0].busy:
        for _ in range(min(3, count - len(calls))):
            calls.append(made.submit(str(len(calls)), timeout=timeout))
        made.clock.advance(12 * MS)
        made.instances[0].finish()
        made.clock.settle()
    return calls


def test_late_requests_are_refused_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = bench()
    calls = overload(made, 300)
    answered = [call for call in calls if call.responses]
    assert all(call.calls == 1 for call in calls)
    assert 100 <= len(answered) < 150
    refused = made.statistics.overload_refusals
    assert refused == made.statistics.failures["REJECTED"] == len(calls) - len(answered)
    assert "is overloaded: requests that have waited for more than 0.1 s are refused" in caplog.text
    assert f"is not overloaded any more: {refused} requests were refused" in caplog.text
    assert caplog.text.count("is overloaded") == 1
    assert not made.statistics.overloaded


def test_a_refused_request_was_not_begun() -> None:
    made = bench()
    refused = [call for call in overload(made, 300) if call.errors]
    assert refused
    assert all(isinstance(call.errors[0], QueueTimeout) for call in refused)
    assert not any(call.started for call in refused)
    assert "is overloaded" in str(refused[0].errors[0])


def test_requests_with_a_timeout_of_their_own_wait_for_it() -> None:
    made = bench()
    calls = overload(made, 300, timeout=10_000_000)
    assert [call.values for call in calls] == [[2]] * 300


def test_many_late_requests_are_refused_in_several_turns() -> None:
    made = bench()
    calls = [made.submit(str(name)) for name in range(20)]
    made.clock.settle()
    for _ in range(19):  # with a queue that grows, slowly at first
        calls += [made.submit("more"), made.submit("more")]
        made.clock.advance(12 * MS)
        made.instances[0].finish()
        if made.statistics.overloaded:
            break
        made.clock.settle()
    calls += [made.submit("more") for _ in range(1_000)]
    made.clock.advance(SEC)
    if made.instances[0].busy:
        made.instances[0].finish()
    ended, most = sum(call.calls for call in calls), 0
    while made.clock.tick():
        now = sum(call.calls for call in calls)
        ended, most = now, max(most, now - ended)
    assert most <= 64
    assert sum(bool(call.errors) for call in calls) > 900
