"""Instances that are lent to threads, with threads that are held where it matters."""

from threading import Event, Thread
from typing import Any

import numpy as np

from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.batch import Batch, Outcome
from headrace.scheduling.lending import Lender, ThreadedCall
from headrace.scheduling.policy import BatchPolicy

X = TensorSpec("x", Datatype.FP32, (1,))
SIGNATURE = Signature("m", 8, (X,), (TensorSpec("y", Datatype.FP32, (1,)),))


class Held:
    """An instance that doubles, once it may."""

    load = 0
    lendable = True

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.running, self.may = Event(), Event()
        self.error: Exception | None = None

    def execute(self, batch: Batch, done: Any) -> None:
        raise NotImplementedError

    def serves(self, target: object) -> bool:
        return True

    def run_each(self, batches: Any) -> Any:
        return [self.run(batch) for batch in batches]

    def light(self, batch: Batch) -> bool:
        return True

    def close(self) -> None: ...

    def run(self, batch: Batch) -> Outcome:
        self.batches.append(len(batch.calls))
        self.running.set()
        self.may.wait()
        return Outcome([np.asarray(batch.gather()["x"]) * 2], self.error, 1, 2, 3)


class Asked(ThreadedCall):
    def __init__(self, value: float) -> None:
        inputs = {"x": Tensor("x", Datatype.FP32, np.full((1, 1), value, np.float32))}
        super().__init__("m", "", "", inputs)
        self.rows, self.key, self.outcome = 1, None, None
        self.found: list[float] = []
        self.woken, self.handed_over = Event(), Event()

    def respond(self, response: InferResponse, final: bool) -> None:
        self.found = response.outputs[0].array.ravel().tolist()
        self.woken.set()

    def fail(self, error: ServerError) -> None:
        raise AssertionError(error)

    def wake(self) -> None:
        self.woken.set()

    def hand_over(self) -> None:
        self.handed_over.set()


class World:
    """A lender of one held instance, and what it has returned."""

    def __init__(self) -> None:
        self.instance, self.statistics = Held(), VersionStatistics()
        self.returned: list[tuple[Any, ...]] = []
        self.lender = Lender(
            SIGNATURE, "1", BatchPolicy(8), self.statistics, [self.instance],
            lambda callback, *given: callback(*given), lambda *given: self.returned.append(given),
        )  # fmt: skip

    def begin(self, call: Asked) -> Thread:
        """Let a thread run a call whose turn it is, up to its model."""
        assert self.lender.enter(call)
        assert call.instance is not None
        thread = Thread(target=self.lender.run, args=(call,))
        thread.start()
        assert self.instance.running.wait(60)
        return thread


def waiting(world: World, *values: float) -> list[Asked]:
    calls = [Asked(value) for value in values]
    for call in calls:
        assert world.lender.enter(call)
        assert call.instance is None
    return calls


def test_calls_that_wait_run_together_by_the_thread_of_the_first() -> None:
    world, first = World(), Asked(1)
    thread = world.begin(first)
    calls = waiting(world, 2, 3, 4)
    world.instance.may.set()
    thread.join(60)
    assert first.found == [2]
    assert calls[0].woken.is_set()
    assert not calls[1].woken.is_set()
    world.lender.run(calls[0])
    assert [call.found for call in calls] == [[4], [6], [8]]
    assert world.instance.batches == [1, 3]
    world.statistics.settle()
    assert (world.statistics.success_count, world.statistics.execution_count) == (4, 2)
    assert not world.lender.in_use


def test_a_call_whose_thread_no_longer_waits_is_skipped() -> None:
    world, first = World(), Asked(1)
    thread = world.begin(first)
    late, second = waiting(world, 2, 3)
    world.lender.leave(late)
    world.instance.may.set()
    thread.join(60)
    assert second.woken.is_set()
    world.lender.leave(second)  # its turn had come: the instance is free again
    assert not world.lender.in_use
    assert not late.woken.is_set()


def test_an_instance_taken_back_while_in_use_is_returned_later() -> None:
    world, first = World(), Asked(1)
    thread = world.begin(first)
    [second] = waiting(world, 2)
    assert world.lender.take_back() == []
    assert second.handed_over.is_set()
    assert not world.lender.enter(Asked(3))
    assert world.returned == []
    world.instance.may.set()
    thread.join(60)
    assert first.found == [2]
    assert world.returned == [(world.instance, None, None)]


def test_a_failed_batch_is_returned_with_its_instance() -> None:
    world, first = World(), Asked(1)

    world.instance.error = ValueError("broken")
    world.instance.may.set()
    assert world.lender.enter(first)
    world.lender.run(first)
    [(instance, batch, outcome)] = world.returned
    assert (instance, batch.calls) == (world.instance, [first])
    assert str(outcome.error) == "broken"
