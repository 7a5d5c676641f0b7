"""Calls of this process that need no queue: run at once, or together at the end of a tick."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pytest

from headrace.core.call import Call, CallOptions, InferResponse, Submit
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.limits import ModelLoad
from headrace.core.tensors import Tensor
from headrace.observability.statistics import Closed
from headrace.scheduling.batch import Batch, Outcome
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.lending import JoinedCall
from headrace.scheduling.queue import MANY
from tests.scheduling.fakes import POISON, Bench, FakeInstance, double, signature

MS = 1_000_000


class Joining(JoinedCall):
    """A call with one row for each value."""

    def __init__(self, name: str, *values: int, width: int = 1) -> None:
        array = np.repeat(np.array(values or (1,), np.int64).reshape(-1, 1), width, axis=1)
        super().__init__("double", "", name, {"x": Tensor("x", Datatype.INT64, array)})
        self.rows, self.outcome = len(array), None
        self.key = signature().batch_key(self)
        self.found: list[InferResponse] = []
        self.errors: list[ServerError] = []
        self.queued = self.completed = False

    def complete(self) -> None:
        self.completed = True
        self.nbytes = 8

    def queue(self, submit: Submit) -> None:
        self.queued = True
        self.complete()
        self.options = CallOptions()
        submit(self)

    def respond(self, response: InferResponse, final: bool) -> None:
        assert final
        self.found.append(response)

    def fail(self, error: ServerError) -> None:
        self.errors.append(error)

    @property
    def values(self) -> list[int]:
        (response,) = self.found
        (tensor,) = response.outputs
        return [int(value) for value in np.asarray(tensor.array).ravel()]


class Light(FakeInstance):
    """An instance that runs batches of up to `most` rows on the event loop."""

    most = 4
    lendable = True
    given_up: Joining | None = None  # while it runs

    def light(self, batch: Batch) -> bool:
        return batch.rows <= self.most

    def run(self, batch: Batch) -> Outcome:
        self.runs.append([call.id for call in batch.calls])
        if self.given_up is not None:
            self.given_up.ended = True
        try:
            inputs = {name: np.asarray(array) for name, array in batch.gather().items()}
            arrays: Sequence[np.ndarray] = double(inputs, ["y"])
        except ValueError as error:
            return Outcome((), error, 0, 0, 0)
        return Outcome(arrays, None, 0, 0, 0)

    def run_each(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        return [self.run(batch) for batch in batches]


class Joined:
    """A batcher with one light instance."""

    def __init__(self, load: ModelLoad | None = None) -> None:
        self.bench = Bench(instances=0, kind=partial(Batcher, load=load))
        self.batcher, self.clock = self.bench.batcher, self.bench.clock
        self.clock.advance(MS)  # 0 would be no time
        self.instance = Light(self.clock)
        self.batcher.add_instance(self.instance)
        self.clock.settle()

    def free(self) -> bool | None:
        return self.batcher.free

    def join(self, *calls: Joining) -> None:
        for call in calls:
            assert self.batcher.join(call)

    def together(self, *calls: Joining) -> None:
        """Join `calls` in a tick in which another one has run for too long."""
        first = Joining("first")
        self.join(first)
        self.clock.time += MS
        self.join(*calls)
        assert not any(call.found for call in calls)
        self.clock.tick()


@pytest.fixture
def joined() -> Joined:
    return Joined()


def named(names: Iterable[str]) -> list[Joining]:
    return [Joining(name, at) for at, name in enumerate(names)]


def test_a_call_that_comes_alone_runs_at_once(joined: Joined) -> None:
    for name in "abc":
        joined.join(call := Joining(name, 7))
        assert call.values == [14]
    assert joined.instance.runs == [["a"], ["b"], ["c"]]
    assert joined.bench.statistics.batches_closed[Closed.IDLE] == 3
    assert joined.batcher.pending == 0


def test_other_callbacks_have_their_turn_after_a_while(joined: Joined) -> None:
    joined.together(*(calls := named("ab")))
    assert joined.instance.runs == [["first"], ["a", "b"]]
    assert [call.values for call in calls] == [[0], [2]]
    assert not any(call.queued for call in calls)


def test_calls_that_ran_together_wait_for_each_other(joined: Joined) -> None:
    joined.together(*named("ab"))
    joined.join(*named("cd"))
    joined.clock.tick()
    joined.join(Joining("e"))
    joined.clock.tick()
    assert joined.instance.runs[2:] == [["c", "d"]]
    joined.clock.tick()
    assert joined.instance.runs[3:] == [["e"]]
    joined.join(alone := Joining("f"))
    assert alone.found


def test_calls_that_do_not_fit_the_batch_are_queued(joined: Joined) -> None:
    wide, late = Joining("wide", 5, width=2), Joining("late", 1, 2, 3)
    joined.together(Joining("a", 1, 2), wide, late)
    assert joined.instance.runs[1:2] == [["a"]]
    assert wide.queued
    assert late.queued
    joined.bench.instances.append(joined.instance)
    joined.bench.finish_all()
    assert wide.values == [10, 10]
    assert late.values == [2, 4, 6]


def test_a_call_that_has_ended_does_not_run(joined: Joined) -> None:
    calls = named("ab")
    joined.join(Joining("first"))
    joined.clock.time += MS
    joined.join(*calls)
    calls[0].ended = True
    joined.clock.tick()
    assert joined.instance.runs[1:] == [["b"]]


def test_a_heavy_call_is_queued(joined: Joined) -> None:
    joined.instance.most = 1
    joined.join(heavy := Joining("a", 1, 2))
    joined.clock.settle()
    assert heavy.queued
    joined.instance.finish()
    assert heavy.values == [2, 4]


def test_no_call_joins_a_busy_instance(joined: Joined) -> None:
    joined.bench.send("a")
    assert joined.free() is False
    assert not joined.batcher.join(Joining("b"))
    joined.instance.finish()
    assert joined.free() is True
    joined.join(Joining("c"))


def test_no_more_calls_join_than_may_wait(joined: Joined) -> None:
    joined.join(Joining("first"))
    joined.clock.time += MS
    joined.join(*(calls := [Joining(str(at), at) for at in range(MANY)]))
    assert not joined.batcher.join(Joining("late"))
    joined.clock.tick()
    joined.bench.instances.append(joined.instance)
    joined.bench.finish_all()
    assert [call.values for call in calls] == [[2 * at] for at in range(MANY)]


def test_a_failed_call_is_handled_like_a_queued_one(joined: Joined) -> None:
    joined.together(good := Joining("a", 3), bad := Joining("b", POISON))
    assert bad.completed
    joined.bench.instances.append(joined.instance)
    joined.bench.finish_all()
    assert good.values == [6]
    assert "failed to execute" in str(bad.errors[0])
    assert not bad.found
    assert joined.batcher.pending == 0


def test_a_call_is_given_up_while_its_batch_fails() -> None:
    """By its thread, while another one runs it."""
    load = ModelLoad()
    joined = Joined(load)
    gone, bad = Joining("a", 3), Joining("b", POISON)
    joined.join(Joining("first"))
    joined.clock.time += MS
    joined.join(gone, bad)
    joined.instance.given_up = gone
    joined.clock.tick()
    joined.bench.instances.append(joined.instance)
    joined.bench.finish_all()
    assert len(bad.errors) == 1
    assert (gone.found, gone.errors) == ([], [])
    assert (load.requests, load.bytes) == (0, 0)


def test_calls_that_fill_a_batch_each_run_one_after_the_other(joined: Joined) -> None:
    calls: list[Call] = [Joining("a", 1, 2, 3, 4), Joining("b", 5, 6, 7, 8)]
    assert joined.batcher.run_alone(calls)
    assert joined.instance.runs == [["a"], ["b"]]
    assert joined.bench.statistics.batches_closed[Closed.FULL] == 2
    assert joined.free() is None  # others first
    joined.clock.tick()
    assert joined.free() is True
    joined.instance.most = 3
    assert not joined.batcher.run_alone([Joining("c", 1, 2, 3, 4)])


def test_one_of_the_calls_that_run_alone_fails(joined: Joined) -> None:
    calls = [Joining("a", 1), Joining("b", POISON), Joining("c", 2)]
    assert joined.batcher.run_alone(calls)
    joined.bench.instances.append(joined.instance)
    joined.bench.finish_all()
    assert [call.values for call in (calls[0], calls[2])] == [[2], [4]]
    assert "failed to execute" in str(calls[1].errors[0])
    assert joined.free() is True


def test_batches_without_a_queue_are_logged(joined: Joined) -> None:
    joined.batcher.logged()
    joined.together(Joining("a", 1), Joining("b", 1, 2))
    found, _ = joined.batcher.logged()
    assert [[each.rows for each in batch.requests] for batch in found] == [[1], [1, 2]]
    assert [batch.closed for batch in found] == [Closed.IDLE, Closed.IDLE]


def test_calls_without_a_queue_are_logged(joined: Joined) -> None:
    assert joined.batcher.logged()[0] == []
    joined.join(Joining("a", 1, 2))
    joined.clock.tick()
    [batch] = joined.batcher.logged()[0]
    assert [(each.rows, each.level) for each in batch.requests] == [(2, 1)]
