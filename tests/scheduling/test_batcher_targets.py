"""Requests for one instance, beside those that any may run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ModelNotReady, QueueFull, QueueTimeout
from headrace.scheduling.batch import NotStarted
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy
from tests.scheduling.fakes import POISON, Bench, FakeCall, FakeInstance, signature

MS = 1_000_000


def test_a_request_runs_on_its_instance_alone() -> None:
    bench = Bench(instances=2)
    first, second = bench.instances
    bench.submit("a", target=first)
    bench.clock.settle()
    bench.submit("b", target=first)
    bench.submit("c", target=first)
    other = bench.send("d")
    assert (first.runs, second.runs) == ([["a"]], [["d"]])
    assert bench.batcher.pending == 2
    bench.finish("d")
    bench.clock.settle()
    assert (other.values, bench.batcher.pending) == ([2], 2)
    bench.finish_all()
    assert (first.runs, second.runs) == ([["a"], ["b", "c"]], [["d"]])
    assert not bench.batcher.busy


def test_requests_share_batches_with_those_of_their_target() -> None:
    """The line that has waited for longest is next."""
    bench = Bench()
    [instance] = bench.instances
    bench.send("running")
    for name, target in (("a", None), ("b", instance), ("c", None), ("d", instance)):
        bench.clock.advance(1)
        bench.submit(name, target=target)
    bench.finish_all()
    assert instance.runs == [["running"], ["a", "c"], ["b", "d"]]


def test_shapes_part_requests_of_a_target() -> None:
    bench = Bench(shape=signature(8))
    [instance] = bench.instances
    for name, width in (("a", 1), ("b", 2), ("c", 1)):
        bench.submit(name, width=width, target=instance)
    bench.finish_all()
    assert sorted(instance.runs) == [["a", "c"], ["b"]]


def test_requests_of_an_instance_that_goes_are_refused() -> None:
    bench = Bench(instances=2)
    first, second = bench.instances
    begun = bench.submit("a", target=first)
    bench.clock.settle()
    waits, stays = bench.submit("b", target=first), bench.submit("c", target=second)
    bench.batcher.remove_instance(first, first.close)
    [error] = waits.errors
    assert isinstance(error, ModelNotReady)
    assert "the instance that the request is for is gone" in str(error)
    assert not waits.started
    assert bench.statistics.failures["OTHER"] == 1
    with pytest.raises(ModelNotReady, match="is gone"):
        bench.submit("d", target=first)
    bench.finish_all()
    assert (begun.values, stays.values) == ([2], [2])
    assert (first.closed, bench.batcher.busy) == (True, False)


def test_requests_of_an_instance_are_refused() -> None:
    """Requests that it has begun go on, and those of other instances."""
    bench = Bench(instances=2)
    first, second = bench.instances
    begun = bench.submit("a", target=first)
    bench.clock.settle()
    waits, stays = bench.submit("b", target=first), bench.submit("c", target=second)
    error = ModelNotReady("its state is gone")
    for _ in range(2):
        bench.batcher.refuse(first, error)
    assert waits.errors == [error]
    bench.finish_all()
    assert (begun.values, stays.values, bench.batcher.busy) == ([2], [2], False)


def test_no_batch_of_a_stateful_model_is_run_twice() -> None:
    bench = Bench(shape=replace(signature(8), stateful=True))
    [instance] = bench.instances
    calls = [bench.submit(name, value, target=instance) for name, value in
             (("a", 1), ("b", POISON), ("c", 3))]  # fmt: skip
    bench.finish_all()
    assert instance.runs == [["a", "b", "c"]]
    assert [len(call.errors) for call in calls] == [1, 1, 1]


def test_a_batch_for_a_target_waits_for_as_many_requests_as_the_last_one() -> None:
    """For one tick, in which clients send what they are going to send."""
    bench = Bench(shape=signature(8))
    [instance] = bench.instances
    for name in "abc":
        bench.submit(name, target=instance)
    bench.finish_all()
    bench.submit("d", target=instance)
    bench.clock.tick()
    bench.submit("e", target=instance)
    bench.finish_all()
    assert instance.runs == [["a", "b", "c"], ["d", "e"]]


def test_a_batcher_is_not_drained_while_a_target_has_requests() -> None:
    bench = Bench(instances=2)
    first, _ = bench.instances
    bench.batcher.suspend(first)
    call = bench.submit("a", target=first)
    bench.clock.settle()
    drained = bench.drained()
    assert (bench.batcher.busy, drained) == (True, [])
    bench.batcher.remove_instance(first, first.close)
    assert (call.calls, drained) == (1, [True])


def test_a_suspended_instance_runs_its_requests_once_it_is_resumed() -> None:
    bench = Bench(instances=2)
    first, second = bench.instances
    bench.batcher.suspend(first)
    call = bench.send("a")
    bench.finish("a")
    aimed = bench.submit("b", target=first)
    bench.finish_all()
    assert (call.values, aimed.calls, second.runs) == ([2], 0, [["a"]])
    bench.batcher.resume(first)
    bench.finish_all()
    assert (aimed.values, first.runs) == ([2], [["b"]])


def test_failed_and_unstarted_batches_run_again_where_they_have_to() -> None:
    bench = Bench(instances=2)
    first, second = bench.instances
    good, bad = bench.submit("a", 1, target=first), bench.submit("b", POISON, target=first)
    bench.clock.settle()
    first.report(NotStarted())
    bench.finish_all()
    assert first.runs == [["a", "b"], ["a", "b"], ["a"], ["b"]]
    assert (good.values, len(bad.errors), second.runs) == ([2], 1, [])


def test_queue_limits_and_timeouts_are_those_of_the_policy() -> None:
    limits = QueuePolicy(max_size=1, default_timeout=10 * MS)
    bench = Bench(SchedulingPolicy(BatchPolicy(1), limits), instances=2)
    first, _ = bench.instances
    bench.submit("a", target=first)
    bench.clock.settle()
    late = bench.submit("b", target=first)
    with pytest.raises(QueueFull):
        bench.submit("c", target=first)
    bench.clock.advance(11 * MS)
    assert isinstance(late.errors[0], QueueTimeout)
    bench.finish_all()
    assert first.runs == [["a"]]


def test_cancelled_requests_leave_nothing() -> None:
    bench = Bench()
    [instance] = bench.instances
    bench.send("a")
    call, other = bench.submit("b", target=instance), bench.submit("c", target=instance)
    call.cancel()
    assert (bench.batcher.pending, call.inputs) == (1, {})
    other.cancel()
    bench.finish_all()
    assert (instance.runs, bench.batcher.busy) == ([["a"]], False)


def test_all_waiting_requests_fail_together() -> None:
    bench = Bench()
    [instance] = bench.instances
    bench.batcher.suspend(instance)
    calls = [bench.submit("a"), bench.submit("b", target=instance)]
    assert bench.batcher.fail_waiting(ModelNotReady("none"))
    assert [len(call.errors) for call in calls] == [1, 1]
    assert not bench.batcher.busy


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["any", "aimed", "aimed", "finish", "settle", "cancel", "rest", "remove"]),
        st.integers(0, 5),
    ),
    max_size=50,
)


@given(STEPS, st.booleans(), st.booleans())
def test_any_order_of_events(steps: list[tuple[str, int]], inline: bool, ordered: bool) -> None:
    """Each request ends once, and was run, if at all, where it had to be."""
    policy = SchedulingPolicy(BatchPolicy(4), preserve_ordering=ordered)
    bench = Bench(policy, 3, inline=inline)
    names = {id(instance): str(place) for place, instance in enumerate(bench.instances)}
    there = list(bench.instances)
    resting: list[FakeInstance] = []
    calls: list[FakeCall] = []
    for number, (step, which) in enumerate(steps):
        if step == "any":
            calls.append(bench.submit(f"{number}"))
        elif step == "aimed":
            target = bench.instances[which % 3]
            try:
                calls.append(bench.submit(f"{number}>{names[id(target)]}", target=target))
            except ModelNotReady:
                assert target not in there
        elif step == "finish" and (busy := [one for one in bench.instances if one.busy]):
            busy[which % len(busy)].finish()
        elif step == "settle":
            bench.clock.settle()
        elif step == "cancel" and calls:
            calls[which % len(calls)].cancel()
        elif step == "rest" and not resting:
            resting.append(bench.instances[which % 3])
            bench.batcher.suspend(resting[0])
        elif step == "rest":
            bench.batcher.resume(resting.pop())
        elif step == "remove" and len(there) > 1:
            gone = there.pop(which % len(there))
            bench.batcher.remove_instance(gone, gone.close)
    for instance in resting:
        bench.batcher.resume(instance)
    bench.finish_all()
    assert not bench.batcher.busy
    assert bench.batcher.pending == 0
    assert all(call.calls <= 1 and call.ended for call in calls)
    for instance in bench.instances:
        for run in instance.runs:
            places = {name.partition(">")[2] for name in run}
            assert places in ({""}, {names[id(instance)]})
