"""Reports of instances in other processes: batches given back, deaths, single answers."""

from functools import partial

import numpy as np
import pytest

from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelNotReady,
    Quarantined,
    WorkerDied,
)
from headrace.scheduling.batch import NotStarted, Part
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.quarantine import Quarantine
from tests.scheduling.fakes import Bench, FakeCall


def test_an_unbegun_batch_goes_to_another_instance() -> None:
    bench = Bench(instances=2)
    call = bench.send("a")
    first = next(instance for instance in bench.instances if instance.busy)
    first.report(NotStarted())
    bench.batcher.suspend(first)
    bench.finish_all()
    assert call.values == [2]
    assert [instance.runs for instance in bench.instances if instance is not first] == [[["a"]]]
    assert bench.statistics.fail_count == 0


def test_a_suspended_instance_gets_nothing_and_a_busy_one_is_not_suspended() -> None:
    bench = Bench()
    [instance] = bench.instances
    bench.batcher.suspend(instance)
    bench.send("a")
    assert not instance.busy
    assert bench.batcher.busy
    bench.batcher.resume(instance)
    bench.clock.settle()
    bench.batcher.suspend(instance)
    bench.submit("b")
    bench.finish_all()
    assert instance.runs == [["a"], ["b"]]
    assert not bench.batcher.busy


def test_a_batch_that_killed_its_worker_is_not_retried() -> None:
    bench = Bench()
    calls = [bench.submit(name) for name in "abc"]
    bench.clock.settle()
    bench.instances[0].report(WorkerDied("it ended"))
    bench.finish_all()
    assert bench.started == ["a", "b", "c"]
    assert [type(call.errors[0]) for call in calls] == [WorkerDied] * 3
    assert bench.statistics.failures["BACKEND"] == 3
    assert bench.reports == []


def test_each_request_has_an_error_with_its_own_time() -> None:
    bench = Bench()
    bench.clock.advance(5)
    calls = [bench.submit("a")]
    bench.batcher.suspend(bench.instances[0])
    bench.clock.advance(20)
    calls.append(bench.submit("b"))
    bench.batcher.resume(bench.instances[0])
    bench.clock.advance(10)
    bench.clock.settle()
    bench.clock.advance(300)
    bench.instances[0].report(WorkerDied("it ended"))
    bench.batcher.suspend(bench.instances[0])
    calls.append(bench.submit("c"))
    bench.clock.advance(7)
    bench.batcher.fail_waiting(ModelNotReady("none", retry_after=9))
    spent = [call.errors[0].spent for call in calls]
    assert spent == [(30, 300, 2), (10, 300, 2), (7, 0, 0)]  # in the queue, in execution; rows
    [later] = calls[2].errors
    assert (type(later), str(later), later.retry_after) == (ModelNotReady, "none", 9)


@pytest.mark.parametrize("cancelled", [False, True])
def test_queued_requests_can_be_failed(cancelled: bool) -> None:
    bench = Bench()
    [instance] = bench.instances
    given_back = bench.send("a")
    instance.report(NotStarted())
    bench.batcher.suspend(instance)
    queued = bench.send("b")
    drained = bench.drained()
    assert not drained
    if cancelled:
        given_back.cancel()
        queued.cancel()
    else:
        bench.batcher.fail_waiting(ModelNotReady("none"))
    assert drained == [True]
    for call in (given_back, queued):
        assert [type(error) for error in call.errors] == [ModelNotReady] * (not cancelled)
    assert bench.statistics.failures["OTHER"] == 2 * (not cancelled)


def test_follow_ups_of_an_ended_request_end_too() -> None:
    """Such as the next request of a sequence: no one could end it later."""
    bench = Bench()
    bench.batcher.suspend(bench.instances[0])
    following: list[FakeCall] = []
    first = bench.submit("a")
    first.then = lambda: following.append(bench.submit("b"))
    bench.batcher.fail_waiting(ModelNotReady("none"))
    for call in (first, *following):
        [error] = call.errors
        assert isinstance(error, ModelNotReady)
    assert (len(following), bench.batcher.pending) == (1, 0)


def test_many_queued_requests_fail_in_turns() -> None:
    """A turn of the event loop has other requests to serve."""
    bench = Bench()
    bench.batcher.suspend(bench.instances[0])
    calls = [bench.submit(str(number)) for number in range(500)]
    following: list[FakeCall] = []
    calls[499].then = lambda: following.append(bench.submit("next"))
    calls[300].cancel()
    bench.batcher.fail_waiting(ModelNotReady("none"))
    gone = calls[400]
    gone.cancel()
    drained = bench.drained()
    failed = 0
    while not drained:
        bench.clock.tick()
        now = sum(len(call.errors) for call in calls)
        assert now - failed <= 100
        failed = now
    assert [len(call.errors) for call in calls] == [
        int(number not in (300, 400)) for number in range(500)
    ]
    assert [len(call.errors) for call in following] == [1]
    assert bench.batcher.pending == 0


def parts(*values: int) -> list[Part]:
    """One row for each request."""
    return [Part({"y": np.array([[value]], np.int64)}, {"n": value}) for value in values]


def test_single_answers() -> None:
    bench = Bench()
    calls = [bench.submit(name) for name in "abcd"]
    bench.clock.settle()
    one, two, three = parts(1, 2, 3)
    three.arrays = {"y": np.zeros((2, 1), np.int64)}  # of a request of one row
    bench.instances[0].report(parts=[one, InvalidRequest("no"), two, three])
    assert calls[0].values == [1]
    assert calls[0].responses[0].parameters == {"n": 1}
    assert isinstance(calls[1].errors[0], InvalidRequest)
    assert calls[2].values == [2]
    assert isinstance(calls[3].errors[0], ExecutionFailed)
    bench.clock.settle()
    assert bench.statistics.success_count == 2
    assert bench.statistics.failures["BACKEND"] == 2
    assert bench.statistics.execution_count == 1
    call = bench.send("a")
    bench.instances[0].report(parts=[InvalidRequest("no")])
    assert call.errors
    assert bench.statistics.execution_count == 1  # no execution if all fail


def test_the_instance_with_the_least_load_is_taken() -> None:
    bench = Bench(instances=3)
    for instance, load in zip(bench.instances, (1, 0, 2), strict=True):
        instance.load = load
    for name in "abc":
        bench.send(name)
    assert [instance.runs for instance in bench.instances] == [[["b"]], [["a"]], [["c"]]]


def test_an_idle_instance_is_removed_soon() -> None:
    bench = Bench(instances=2)
    removed: list[int] = []
    bench.batcher.remove_instance(bench.instances[0], lambda: removed.append(0))
    bench.batcher.suspend(bench.instances[1])
    bench.batcher.remove_instance(bench.instances[1], lambda: removed.append(1))
    assert not removed
    bench.send("a")
    assert removed == [0, 1]
    assert not bench.started
    bench.batcher.resume(bench.instances[1])
    bench.clock.settle()
    assert not bench.started


@pytest.mark.parametrize("begun", [True, False])
def test_a_busy_instance_is_removed_when_it_has_answered(begun: bool) -> None:
    bench = Bench(instances=2)
    call = bench.send("a")
    [leaving] = [instance for instance in bench.instances if instance.busy]
    removed: list[int] = []
    bench.batcher.remove_instance(leaving, lambda: removed.append(1))
    bench.send("b")
    bench.finish("b")  # the other one stays
    assert not removed
    if begun:
        leaving.finish()
    else:
        leaving.report(NotStarted())
    bench.finish_all()
    assert (removed, call.values) == ([1], [2])
    assert leaving.runs == [["a"]]
    assert bench.started == (["a", "b"] if begun else ["a", "b", "a"])
    assert not bench.batcher.busy


def test_the_refusal_of_one_request_cancels_another() -> None:
    """Of its batch, and by a client that both of them belong to."""
    bench = Bench(kind=partial(Batcher, quarantine=Quarantine("double", 1)))
    bench.send("a", 5)
    bench.instances[0].report(WorkerDied("it ended"))
    refused, other = bench.submit("b", 5), bench.submit("c", 1)
    refused.then = other.cancel
    bench.clock.settle()
    assert isinstance(refused.errors[0], Quarantined)
    assert bench.started == ["a"]
    assert (bench.batcher.busy, other.calls) == (False, 0)
