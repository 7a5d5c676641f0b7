"""Ends of requests: answered, in order if asked for, failed, or cancelled."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from math import log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import (
    ExecutionFailed,
    ExecutionTimeout,
    InvalidRequest,
    ModelNotReady,
    QueueFull,
    QueueTimeout,
    Unavailable,
)
from headrace.core.limits import ModelLoad
from headrace.core.tensors import Array
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy
from tests.scheduling.fakes import POISON, Bench, FakeCall, ends_by_tick, signature

MS = 1_000_000
ORDERED = SchedulingPolicy(BatchPolicy(1), preserve_ordering=True)


# --- cancellation


def test_a_request_that_is_cancelled_in_the_queue_never_runs() -> None:
    bench = Bench()
    call = bench.submit("a")
    bench.submit("b")
    call.cancel()
    assert bench.batcher.pending == 1
    assert call.inputs == {}
    bench.finish_all()
    assert bench.instances[0].runs == [["b"]]
    assert (bench.log, call.calls) == (["b"], 0)


def test_a_running_request_that_is_cancelled_is_not_answered() -> None:
    bench = Bench()
    call = bench.submit("a", 1)
    other = bench.send("b", 2)
    call.cancel()
    bench.finish_all()
    assert (call.calls, other.values) == (0, [4])
    counted = bench.statistics
    assert (counted.success_count, counted.inference_count, counted.execution_count) == (1, 1, 1)
    assert list(counted.batches) == [2]  # the batch still had two rows
    assert counted.failures["CANCELED"] == 1


def test_cancelling_again_or_too_late_does_nothing() -> None:
    bench = Bench()
    first = bench.submit("a")
    first.cancel()
    first.cancel()
    second = bench.submit("b")
    bench.finish_all()
    second.cancel()
    assert second.values == [2]
    fails = bench.send("c", POISON)
    fails.cancel()
    bench.finish_all()
    assert fails.calls == 0
    counted = bench.statistics
    assert counted.failures == {"REJECTED": 0, "CANCELED": 2, "BACKEND": 0, "OTHER": 0}
    assert counted.success_count == 1


def test_a_request_that_is_cancelled_before_its_retry_does_not_run_again() -> None:
    bench = Bench()
    (instance,) = bench.instances
    call = bench.submit("bad", POISON)
    other = bench.send("good", 1)
    instance.finish()
    call.cancel()
    bench.finish_all()
    assert instance.runs == [["bad", "good"], ["good"]]
    assert (other.values, [n for n, _ in bench.reports]) == ([2], [2])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_call_may_cancel_another_while_it_is_answered(ordered: bool) -> None:
    """Both came over one connection, which broke: within one batch, or later in the queue."""
    bench = Bench(ORDERED, instances=2) if ordered else Bench()
    first = bench.submit("a")
    second = bench.submit("b")
    first.then = second.cancel
    bench.clock.settle()
    if ordered:
        bench.finish("b")
    bench.finish_all()
    assert (bench.log, first.calls, second.calls) == (["a"], 1, 0)
    assert bench.statistics.success_count + bench.statistics.fail_count == 2


def test_a_call_may_submit_the_next_while_it_is_answered() -> None:
    bench = Bench(inline=True)
    next_one: list[FakeCall] = []
    first = bench.submit("a")
    first.then = lambda: next_one.append(bench.submit("again", 5))
    bench.finish_all()
    assert bench.log == ["a", "again"]
    assert next_one[0].values == [10]


# --- answers in order


def test_answers_and_errors_keep_the_order_of_requests() -> None:
    bench = Bench(ORDERED, instances=2)
    bench.submit("a", 1)
    bad = bench.submit("b", POISON)
    bench.submit("c", 3)
    bench.clock.settle()
    bench.finish("b")
    bench.clock.settle()
    assert bench.log == []  # b is ready, but waits for a
    bench.finish("c")
    assert bench.log == []
    bench.finish("a")
    assert bench.log == ["a", "b", "c"]
    assert isinstance(bad.errors[0], ExecutionFailed)


def test_many_answers_behind_a_late_one_go_in_turns() -> None:
    load = ModelLoad()
    bench = Bench(ORDERED, instances=2, kind=partial(Batcher, load=load))
    late = bench.send("late")
    calls = [bench.submit(str(number)) for number in range(500)]
    ended = ends_by_tick(bench.clock, calls)
    bench.clock.settle()
    (other,) = [one for one in bench.instances if one.running != ["late"]]
    while other.busy:
        other.finish()
        bench.clock.settle()
    calls[300].cancel()
    calls[0].then = calls[1].cancel  # which is next
    told = bench.drained()
    bench.finish("late")
    assert late.values == [2]
    calls[400].cancel()
    bench.submit("behind")
    assert not told
    bench.finish_all()
    assert max(ended.values()) <= 100
    answered = [str(number) for number in range(500) if number not in (1, 300, 400)]
    assert bench.log == ["late", *answered, "behind"]
    assert (told, load.requests) == ([True], 0)


def test_many_requests_in_order_fail_in_turns() -> None:
    """No instance is left, not even for those that their ends have submitted."""
    bench = Bench(ORDERED)
    bench.batcher.suspend(bench.instances[0])
    calls = [bench.submit(str(number)) for number in range(500)]
    ended, following = ends_by_tick(bench.clock, calls), list[FakeCall]()
    calls[499].then = lambda: following.append(bench.submit("next"))
    bench.batcher.fail_waiting(ModelNotReady("none"))
    told = bench.drained()
    assert not told
    bench.clock.settle()
    assert max(ended.values()) <= 100
    assert bench.log == [*map(str, range(500)), "next"]
    assert [type(error) for call in following for error in call.errors] == [ModelNotReady]
    assert (told, bench.batcher.pending) == ([True], 0)


def test_an_answer_that_lets_others_go_comes_before_them() -> None:
    bench = Bench(ORDERED, instances=4)
    first, _, third, _ = [bench.submit(name) for name in "abcd"]
    bench.clock.settle()
    for name in "bd":
        bench.finish(name)
    first.then = third.cancel
    bench.finish("a")
    assert bench.log == ["a", "b", "d"]


@given(
    ends=st.permutations(range(150)),
    cancelled=st.sets(st.integers(0, 149)),
    ticks=st.sets(st.integers(0, 149)),
)
@settings(max_examples=25)
def test_answers_keep_their_order_however_runs_end(
    ends: list[int], cancelled: set[int], ticks: set[int]
) -> None:
    bench = Bench(ORDERED, instances=150)
    calls = [bench.submit(str(number)) for number in range(150)]
    bench.clock.tick()
    gone = set[int]()
    for place, number in enumerate(ends):
        bench.finish(str(number))
        if place in cancelled and not calls[place].calls:
            calls[place].cancel()
            gone.add(place)
        if place in ticks:
            bench.clock.tick()
    bench.clock.settle()
    assert bench.log == [str(number) for number in range(150) if number not in gone]
    assert bench.drained() == [True]


def test_an_answer_cancelled_before_its_turn_is_not_delivered() -> None:
    bench = Bench(ORDERED, instances=2)
    bench.submit("a")
    call = bench.send("b")
    bench.finish("b")
    call.cancel()
    first = bench.submit("c")
    bench.finish_all()
    assert (bench.log, call.calls) == (["a", "c"], 0)
    assert bench.statistics.success_count == 3  # it had been computed
    first = bench.submit("d")
    bench.send("e")
    bench.finish("e")
    assert bench.log == ["a", "c"]
    first.cancel()  # which releases those behind it
    assert bench.log == ["a", "c", "e"]
    bench.finish_all()
    assert bench.log == ["a", "c", "e"]


def test_requests_that_time_out_are_answered_then_whatever_runs_before_them() -> None:
    limits = QueuePolicy(default_timeout=10 * MS)
    bench = Bench(SchedulingPolicy(BatchPolicy(4), limits, preserve_ordering=True))
    bench.send("running")
    calls = [bench.submit(name) for name in "abc"]
    bench.clock.settle()
    bench.clock.advance(10 * MS)
    assert bench.log == ["a", "b", "c"]
    assert all(isinstance(call.errors[0], QueueTimeout) for call in calls)
    bench.submit("d")
    bench.finish_all()
    assert bench.log == ["a", "b", "c", "running", "d"]


def test_answers_behind_an_expired_request_keep_their_order() -> None:
    limits = QueuePolicy(default_timeout=10 * MS)
    policy = SchedulingPolicy(BatchPolicy(1), limits, preserve_ordering=True)
    bench = Bench(policy)
    bench.send("running")
    bench.submit("late")
    bench.clock.settle()
    bench.clock.advance(9 * MS)
    bench.submit("behind")
    bench.clock.advance(MS)
    assert bench.log == ["late"]
    bench.finish("running")
    bench.clock.settle()
    assert bench.log == ["late", "running"]
    bench.finish("behind")
    assert bench.log == ["late", "running", "behind"]


def test_a_refused_request_does_not_hold_up_those_in_order() -> None:
    policy = SchedulingPolicy(BatchPolicy(1), QueuePolicy(max_size=1), preserve_ordering=True)
    bench = Bench(policy)
    bench.send("a")
    bench.submit("b")
    with pytest.raises(QueueFull):
        bench.submit("refused")
    bench.finish_all()
    assert bench.log == ["a", "b"]


# --- failing batches


@pytest.mark.parametrize("guilty", range(8))
def test_only_the_invalid_request_of_a_batch_fails(guilty: int) -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(8)), shape=signature(8))
    values = [POISON if n == guilty else n for n in range(8)]
    calls = [bench.submit(str(n), value) for n, value in enumerate(values)]
    bench.finish_all()
    (error,) = calls[guilty].errors
    assert isinstance(error, ExecutionFailed)
    assert str(error) == "model 'double' failed to execute the request"  # nothing internal
    assert [s.values for n, s in enumerate(calls) if n != guilty] == [
        [2 * n] for n in range(8) if n != guilty
    ]
    assert len(bench.instances[0].runs) == 1 + 2 * log2(8)  # both halves, level by level
    assert [(n, str(error)) for n, error in bench.reports] == [
        (n, "poisoned")
        for n in (8, 4, 2, 1)  # every run that it spoiled
    ]
    counted = bench.statistics
    assert (counted.success_count, counted.execution_count) == (7, 3)
    assert {n: c.count for n, c in counted.batches.items()} == {4: 1, 2: 1, 1: 1}
    assert counted.failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 0}


def test_a_wrong_number_of_rows_never_reaches_another_caller() -> None:
    def mean(inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return [inputs["x"].sum(axis=0, keepdims=True)]

    bench = Bench(model=mean)
    alone = [bench.submit(name, value) for name, value in (("a", 3), ("b", 5))]
    wide = bench.submit("c", 7, 8)
    bench.finish_all()
    assert [call.values for call in alone] == [[3], [5]]  # alone, each with its own
    (error,) = wide.errors
    assert isinstance(error, ExecutionFailed)
    assert "axis 0 must be the number of rows" in str(error)
    assert [count for count, _ in bench.reports] == [1]  # reported to the operator


@pytest.mark.parametrize("client", [False, True])
def test_outputs_that_are_not_arrays_and_client_errors(client: bool) -> None:
    def model(inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Any]:
        if client:
            raise InvalidRequest("input 'x' is not to this model's taste")
        return [[1]]

    bench = Bench(model=model)
    call = bench.submit("a")
    bench.finish_all()
    assert isinstance(call.errors[0], InvalidRequest if client else ExecutionFailed)
    assert len(bench.reports) == (not client)
    assert bench.statistics.failures["BACKEND"] == 1
    assert not bench.batcher.busy


def test_refused_outputs_are_released_with_their_error() -> None:
    answered: list[weakref.ref[Array]] = []

    def mean(inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        mean = inputs["x"].sum(axis=0, keepdims=True)
        answered.append(weakref.ref(mean))
        return [mean]

    bench = Bench(model=mean)
    call = bench.submit("a", 7, 8)
    gc.disable()  # without cycles, there is nothing for it to do
    try:
        bench.finish_all()
        call.errors.clear()
        bench.reports.clear()
        assert [output() for output in answered] == [None]
    finally:
        gc.enable()


def test_retries_go_before_queued_requests() -> None:
    bench = Bench()
    for name, value in (("a", 1), ("bad", POISON), ("b", 2)):
        bench.submit(name, value)
    bench.clock.settle()
    calls = [bench.submit("later", 1), bench.submit("last", 2)]
    bench.finish_all()
    assert bench.log == ["a", "bad", "b", "later", "last"]
    first, second = (call.responses[0].outputs[0].array for call in calls)
    assert not np.shares_memory(first, second)


# --- executions ended by the server


def test_a_batch_that_took_too_long_is_not_retried_in_halves() -> None:
    bench = Bench()
    calls = [bench.submit(name) for name in "ab"]
    bench.clock.settle()
    bench.instances[0].report(ExecutionTimeout("too long"))
    bench.finish_all()
    assert [str(error) for call in calls for error in call.errors] == ["too long"] * 2
    assert bench.instances[0].runs == [["a", "b"]]


def test_a_batch_without_clients_is_not_retried() -> None:
    bench = Bench()
    call = bench.send("a")
    call.cancel()
    bench.batcher.suspend(bench.instances[0])
    drained = bench.drained()
    assert not drained
    bench.instances[0].report(NotStarted())
    assert drained
    assert call.calls == 0


def test_a_refused_batch_ends_as_not_begun() -> None:
    bench = Bench()
    calls = [bench.submit("a"), bench.send("b")]
    bench.instances[0].report(NotStarted(Unavailable("full")))
    assert [str(error) for call in calls for error in call.errors] == ["full"] * 2
    assert not any(call.started for call in calls)
    assert bench.instances[0].runs == [["a", "b"]]


def test_a_refusal_after_a_failed_run_is_not_one_of_a_request_not_begun() -> None:
    bench = Bench()
    calls = [bench.submit("a"), bench.send("b")]
    bench.instances[0].report(ValueError("no"))
    bench.clock.settle()
    bench.instances[0].report(NotStarted(Unavailable("full")))
    bench.batcher.suspend(bench.instances[0])
    bench.batcher.fail_waiting(Unavailable("gone"))
    assert [str(error) for call in calls for error in call.errors] == ["full", "gone"]
    assert all(call.started for call in calls)


def test_a_request_that_waited_in_vain_was_not_begun() -> None:
    bench = Bench(instances=0)
    call = bench.send("a")
    bench.batcher.fail_waiting(Unavailable("gone"))
    assert (call.started, len(call.errors)) == (False, 1)
