"""The batcher of one model version, on a manual clock with fake instances."""

from dataclasses import replace
from functools import partial

import pytest

from headrace.core.call import Call
from headrace.core.errors import QueueFull, QueueTimeout
from headrace.core.limits import ModelLoad
from headrace.observability.statistics import Closed
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction
from tests.scheduling.fakes import GATHER_NS, POISON, Bench, ends_by_tick

MS = 1_000_000


def timing_out(action: TimeoutAction = TimeoutAction.REJECT) -> SchedulingPolicy:
    """Requests time out after 10 ms, or earlier if they ask for it."""
    limits = QueuePolicy(0, 10 * MS, action, True)
    return SchedulingPolicy(BatchPolicy(4), limits)


# --- forming batches


def test_requests_of_one_tick_or_of_a_busy_instance_run_together() -> None:
    bench = Bench()
    calls = [bench.submit(name, value) for name, value in (("a", 1), ("b", 2), ("c", 3))]
    (instance,) = bench.instances
    assert instance.runs == []
    assert bench.batcher.pending == 3
    bench.clock.tick()
    assert instance.runs == [["a", "b", "c"]]
    assert bench.batcher.pending == 0
    for name in "def":
        bench.send(name)
    assert bench.batcher.pending == 3
    instance.finish()
    assert [call.values for call in calls] == [[2], [4], [6]]
    bench.clock.settle()
    assert instance.running == ["d", "e", "f"]


def test_fewer_calls_than_ran_together_wait_one_more_tick_for_others() -> None:
    bench = Bench(inline=True)
    for name in "abc":
        bench.submit(name)
    bench.clock.tick()
    bench.submit("d")
    bench.clock.tick()
    (instance,) = bench.instances
    assert instance.runs == [["a", "b", "c"]]
    bench.submit("e")
    bench.clock.tick()
    assert instance.runs[1:] == [["d", "e"]]
    bench.submit("f")
    bench.clock.tick()
    bench.clock.tick()
    assert instance.runs[2:] == [["f"]]
    bench.submit("g")
    bench.clock.tick()
    assert instance.runs[3:] == [["g"]]


def test_a_batch_has_no_more_rows_than_the_model_takes() -> None:
    bench = Bench()
    calls = [bench.submit(str(n), *range(n + 1)) for n in (0, 1, 2, 3, 0)]
    bench.finish_all()
    assert bench.instances[0].rows == [3, 3, 4, 1]
    assert [call.values for call in calls] == [[0], [0, 2], [0, 2, 4], [0, 2, 4, 6], [0]]


def test_an_inline_instance_runs_one_batch_a_tick() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(1)), inline=True)
    for name in "abc":
        bench.submit(name)
    bench.clock.tick()
    assert bench.log == ["a"]
    bench.clock.tick()
    assert bench.log == ["a", "b"]
    bench.clock.settle()
    assert bench.log == ["a", "b", "c"]


def test_requests_of_different_shapes_do_not_share_a_batch() -> None:
    bench = Bench()
    for name, width in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        bench.submit(name, width=width)
    bench.finish_all()
    assert bench.instances[0].runs == [["a", "b", "d"], ["c"]]
    assert bench.statistics.batches_closed == {
        Closed.FULL: 0, Closed.SHAPE: 1, Closed.DELAY: 0, Closed.IDLE: 1, Closed.DEADLINE: 0,
    }  # fmt: skip


def test_instances_run_concurrently_also_an_added_one() -> None:
    bench = Bench(instances=2)
    for name in "abc":
        bench.send(name)
    assert sorted(instance.runs for instance in bench.instances) == [[["a"]], [["b"]]]
    assert bench.batcher.pending == 1
    late = Bench().instances[0]
    bench.batcher.add_instance(late)
    bench.clock.settle()
    assert late.runs == [["c"]]


def test_more_urgent_requests_go_first() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(2), levels=2, default_level=2))
    for name, priority in (("low", 2), ("default", 0), ("high", 1), ("low2", 2)):
        bench.submit(name, priority=priority)
    bench.finish_all()
    assert bench.instances[0].runs == [["high", "low"], ["default", "low2"]]


# --- delay and timers


@pytest.mark.parametrize("ordered", [False, True])
def test_many_requests_that_time_out_together_are_refused_in_turns(ordered: bool) -> None:
    load = ModelLoad()
    bench = Bench(
        replace(timing_out(), preserve_ordering=ordered), kind=partial(Batcher, load=load)
    )
    bench.send("running")
    calls = [bench.submit(str(number)) for number in range(500)]
    refused = ends_by_tick(bench.clock, calls)
    bench.clock.settle()
    calls[300].cancel()
    calls[0].then, told = calls[400].cancel, bench.drained()
    bench.clock.advance(10 * MS)
    assert refused.total() == 497
    assert max(refused.values()) <= 100
    assert {type(error) for call in calls for error in call.errors} == {QueueTimeout}
    assert [number for number, call in enumerate(calls) if not call.calls] == [300, 400]
    behind = bench.submit("behind")
    assert not told
    bench.finish_all()
    assert (told, behind.values, load.requests) == ([True], [2], 0)


def test_a_delayed_batch_runs_when_due_or_full() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(4, 5 * MS)))
    (instance,) = bench.instances
    bench.send("a")
    assert bench.clock.armed == [5 * MS]
    bench.clock.advance(3 * MS)
    bench.send("b")
    assert instance.runs == []
    bench.clock.advance(2 * MS)
    assert instance.runs == [["a", "b"]]
    assert bench.clock.armed == []
    bench.send("c")
    bench.clock.advance(7 * MS)
    assert instance.running == ["a", "b"]
    instance.finish()
    bench.clock.settle()
    assert instance.running == ["c"]  # its delay has passed
    bench.finish_all()
    bench.send("d", 1, 2)
    bench.send("e", 1, 2)
    assert instance.running == ["d", "e"]


def test_a_request_times_out_while_the_instance_is_busy() -> None:
    bench = Bench(timing_out())
    bench.send("running")
    slow = bench.submit("slow")
    fast = bench.send("fast", timeout=4_000)
    bench.clock.advance(4 * MS)
    (error,) = fast.errors
    assert isinstance(error, QueueTimeout)
    assert str(error) == (
        "Request timeout expired: it has waited in the queue of model 'double' for 4 ms,"
        " its own timeout"
    )
    assert (slow.calls, bench.batcher.pending) == (0, 1)
    bench.clock.advance(6 * MS)
    assert isinstance(slow.errors[0], QueueTimeout)
    assert str(slow.errors[0]).endswith(" for 10 ms, the timeout of the model's queue policy")
    assert bench.batcher.pending == 0
    bench.finish_all()
    assert bench.log == ["fast", "slow", "running"]
    assert bench.clock.armed == []
    bench = Bench()
    bench.send("running")
    least = bench.send("least", timeout=1)
    bench.clock.advance(1 * MS)
    assert str(least.errors[0]).endswith(" for 1 ms, its own timeout")


def test_a_delayed_request_runs_after_those_in_time() -> None:
    bench = Bench(timing_out(TimeoutAction.DELAY))
    bench.send("running", 1, 1, 1, 1)
    bench.submit("late", 1, 1, 1, timeout=1_000)
    bench.send("in time", 1, 1, 1)
    bench.clock.advance(2 * MS)
    bench.finish_all()
    assert bench.instances[0].runs == [["running"], ["in time"], ["late"]]
    assert bench.statistics.fail_count == 0


def test_a_full_queue_refuses() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(4), QueuePolicy(max_size=1)))
    bench.send("running")
    waiting = bench.submit("waiting")
    with pytest.raises(QueueFull):
        bench.submit("refused")
    bench.finish_all()
    assert bench.log == ["running", "waiting"]
    assert waiting.values == [2]
    assert bench.statistics.fail_count == 0  # it was never accepted


# --- draining and closing


def test_draining_waits_for_running_and_queued_requests_and_reports_once() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(1)))
    assert bench.drained() == [True]  # an idle one, at once
    bench.submit("a")
    bench.send("b")
    drained, also = bench.drained(), bench.drained()
    bench.instances[0].finish()
    bench.clock.settle()
    assert (drained, bench.batcher.busy) == ([], True)
    bench.instances[0].finish()
    assert (drained, bench.log, bench.batcher.busy) == ([True], ["a", "b"], False)
    bench.send("c")
    bench.finish_all()
    assert drained == also == [True]


@pytest.mark.parametrize("cancelled", [True, False])
def test_draining_ends_when_the_last_request_is_cancelled_or_times_out(cancelled: bool) -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(4, 5 * MS), QueuePolicy(0, 2 * MS)))
    call = bench.send("a")
    drained = bench.drained()
    assert not drained
    if cancelled:
        call.cancel()
    else:
        bench.clock.advance(2 * MS)
    assert drained == [True]


def test_draining_waits_for_announced_requests() -> None:
    bench = Bench()
    bench.batcher.expect(2)
    drained = bench.drained()
    bench.submit("a")
    bench.batcher.expect(-1)
    bench.finish_all()
    assert (drained, bench.batcher.busy) == ([], True)
    bench.batcher.expect(-1)
    assert (drained, bench.batcher.busy) == ([True], False)


def test_draining_ends_when_all_retries_are_cancelled() -> None:
    bench = Bench()
    calls = [bench.submit(name, POISON) for name in "ab"]
    bench.clock.settle()
    drained = bench.drained()
    bench.instances[0].finish()
    for call in calls:
        call.cancel()
    bench.finish_all()
    assert drained == [True]
    assert len(bench.instances[0].runs) == 1


def test_closing_closes_the_instances_and_leaves_no_timer() -> None:
    bench = Bench(timing_out(), instances=2)
    bench.submit("a")
    bench.finish_all()
    assert bench.clock.armed == [10 * MS]  # nothing disarms it before it is due
    bench.batcher.close()
    assert all(instance.closed for instance in bench.instances)
    assert bench.clock.armed == []


# --- statistics


def test_a_batch_is_counted_with_rows_and_times() -> None:
    bench = Bench()
    bench.submit("a", 1, 2)
    bench.clock.advance(100)
    bench.send("b", 3)
    bench.clock.advance(50)
    bench.instances[0].finish()
    counted = bench.statistics
    assert (counted.success_count, counted.inference_count, counted.execution_count) == (2, 3, 1)
    assert (counted.queue_ns, counted.success_ns) == (100 + 0, 150 + 50)
    # Each request has the times of the whole batch.
    assert (counted.compute_input_ns, counted.compute_infer_ns) == (2 * GATHER_NS, 2 * 47)
    ((rows, batch),) = counted.batches.items()
    assert (rows, batch.count) == (3, 1)
    assert (batch.compute_input_ns, batch.compute_infer_ns) == (GATHER_NS, 47)


def test_a_single_request_is_counted_one_tick_after_its_answer() -> None:
    bench = Bench()
    bench.send("a", 1)
    bench.instances[0].finish()
    assert bench.statistics.success_count == 0  # the tick's writes come first
    bench.clock.settle()
    assert bench.statistics.success_count == 1


def test_failures_are_counted_by_reason_with_their_time() -> None:
    bench = Bench(timing_out())
    call = bench.submit("cancelled")
    bench.clock.advance(10)
    call.cancel()
    assert bench.statistics.fail_ns == 10
    bench.send("running", POISON)
    bench.submit("late")
    bench.clock.advance(10 * MS)
    assert bench.statistics.fail_ns == 10 + 10 * MS
    bench.finish_all()
    assert bench.statistics.failures == {"REJECTED": 1, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
    assert bench.statistics.fail_count == 3
    assert bench.statistics.success_count == 0


def test_a_request_runs_before_it_times_out_in_the_delay() -> None:
    bench = Bench(SchedulingPolicy(BatchPolicy(4, 10 * MS, keeps_deadlines=True)))
    for name, timeout in (("patient", 0), ("hurried", 4_000)):
        bench.submit(name, timeout=timeout)
    bench.clock.settle()
    bench.clock.advance(2 * MS - 1)
    assert bench.instances[0].runs == []
    bench.clock.advance(1)
    assert bench.instances[0].running == ["patient", "hurried"]
    assert bench.statistics.batches_closed[Closed.DEADLINE] == 1


def tenant(request: Call) -> object:
    """The first letter of the id."""
    return request.id[0]


def dividing(instances: int) -> Bench:
    kind = partial(Batcher, alike=tenant)
    return Bench(SchedulingPolicy(BatchPolicy(8)), instances, kind=kind)


def test_requests_of_one_group_run_together() -> None:
    world = dividing(1)
    calls = [world.submit(name, value) for value, name in enumerate(["a1", "b1", "a2", "b2"])]
    world.finish_all()
    assert world.instances[0].runs == [["a1", "a2"], ["b1", "b2"]]
    assert [call.values for call in calls] == [[0], [2], [4], [6]]


def test_other_groups_run_on_other_instances() -> None:
    world = dividing(2)
    for name in ("a1", "b1", "c1", "a2"):
        world.submit(name)
    world.clock.settle()
    assert sorted(instance.running for instance in world.instances) == [["a1", "a2"], ["b1"]]
    world.submit("d1")
    world.finish_all()
    runs = [run for instance in world.instances for run in instance.runs]
    assert sorted(runs) == [["a1", "a2"], ["b1"], ["c1"], ["d1"]]


def test_a_group_waiting_for_its_turn_can_be_cancelled() -> None:
    world = dividing(1)
    world.submit("a1")
    call = world.submit("b1")
    world.clock.settle()
    call.cancel()
    world.finish_all()
    assert world.instances[0].runs == [["a1"]]
    assert not call.calls
    assert not world.batcher.busy
