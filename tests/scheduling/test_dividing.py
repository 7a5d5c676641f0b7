"""Batches of which some requests must not share a run with the others."""

from functools import partial

from headrace.core.call import Call
from headrace.scheduling.batcher import DividingBatcher
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import Bench


def tenant(request: Call) -> object:
    """The first letter of the id."""
    return request.id[0]


def bench(instances: int) -> Bench:
    kind = partial(DividingBatcher, alike=tenant)
    return Bench(SchedulingPolicy(BatchPolicy(8)), instances, kind=kind)


def test_those_that_are_alike_run_together() -> None:
    world = bench(1)
    sinks = [world.submit(name, value) for value, name in enumerate(["a1", "b1", "a2", "b2"])]
    world.finish_all()
    assert world.instances[0].runs == [["a1", "a2"], ["b1", "b2"]]
    assert [sink.values for sink in sinks] == [[0], [2], [4], [6]]


def test_the_others_run_at_the_same_time_where_they_can() -> None:
    world = bench(2)
    for name in ("a1", "b1", "c1", "a2"):
        world.submit(name)
    world.clock.settle()
    assert sorted(instance.running for instance in world.instances) == [["a1", "a2"], ["b1"]]
    world.submit("d1")
    world.finish_all()
    runs = [run for instance in world.instances for run in instance.runs]
    assert sorted(runs) == [["a1", "a2"], ["b1"], ["c1"], ["d1"]]


def test_what_waits_for_its_turn_can_be_cancelled() -> None:
    world = bench(1)
    world.submit("a1")
    call = world.submit("b1")
    world.clock.settle()
    call.cancel()
    world.finish_all()
    assert world.instances[0].runs == [["a1"]]
    assert not call.calls
    assert not world.batcher.busy
