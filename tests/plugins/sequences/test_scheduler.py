"""Sequences in front of a batcher: what reaches the instances, and what becomes of the others."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from headrace.core.call import Call, CallOptions
from headrace.core.datatypes import Datatype
from headrace.core.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelNotReady,
    Overloaded,
    QueueTimeout,
    SequenceLost,
    ServerError,
    WorkerDied,
)
from headrace.core.limits import ModelLoad, Payer
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.observability.statistics import VersionStatistics
from headrace.plugins.sequences.controls import CarriedState, ControlInput, Controls, Kind
from headrace.plugins.sequences.scheduler import LocalSequencePlan
from headrace.scheduling.batch import Deferral, Instance, NotStarted, Part
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import BatchPolicy, SchedulingPolicy
from tests.scheduling.fakes import FakeCall, FakeClock, FakeInstance, ends_by_tick, submitted

IDLE = 1_000_000
CONTROLS = Controls(
    "double",
    [
        ControlInput("start", Kind.START, Datatype.INT32, (0, 1)),
        ControlInput("ready", Kind.READY, Datatype.BOOL, (False, True)),
        ControlInput("id", Kind.CORRID, Datatype.INT64),
    ],
    batches=True,
)
STATE = CarriedState("old", "new", Tensor("old", Datatype.INT64, np.array([[5]])), shown=False)


def controls(inputs: Mapping[str, Array], row: int) -> list[int]:
    return [int(inputs[name][row, 0]) for name in ("x", "start", "ready", "id")]


class Full(ModelLoad):
    """A model without room while `full`."""

    full = False

    def __init__(self) -> None:
        super().__init__()
        self.free_requests = 0

    def check(self, payer: Payer | None) -> None:
        if self.full:
            raise Overloaded("full")


class World:
    """Sequences, their batcher, and the instances of a model that doubles its input."""

    def __init__(
        self,
        instances: int = 1,
        *,
        seats: int = 4,
        fixed: bool = True,
        policy: BatchPolicy | None = None,
        states: Sequence[CarriedState] = (),
        iterative: bool = False,
        delay: tuple[int, int] = (0, 0),
    ) -> None:
        self.clock = FakeClock()
        self.statistics = VersionStatistics()
        self.load = Full()  # the batcher's
        self.share = Full()
        self.given: list[list[list[int]]] = []  # x, start, ready and id of each row, by run
        self.reported: list[Exception] = []
        inputs = [("x", Datatype.INT64), ("start", Datatype.INT32), ("ready", Datatype.BOOL),
                  ("id", Datatype.INT64)]  # fmt: skip
        outputs = ["y"]
        if states:
            inputs.append(("old", Datatype.INT64))
            outputs.append("new")
        signature = Signature(
            "double", 4, tuple(TensorSpec(name, kind, (1,)) for name, kind in inputs),
            tuple(TensorSpec(name, Datatype.INT64, (1,)) for name in outputs), stateful=True,
        )  # fmt: skip
        plan = LocalSequencePlan(
            "double",
            seats,
            IDLE,
            policy or BatchPolicy(4),
            False,
            fixed,
            iterative,
            CONTROLS,
            states,
        )
        batcher = Batcher(
            signature, "1", plan.scheduling(SchedulingPolicy(BatchPolicy(4))), self.clock,
            self.statistics, lambda calls, error: self.reported.append(error), load=self.load,
        )  # fmt: skip
        self.batcher = batcher
        failed = self.statistics.request_failed
        self.sequences = plan.start(batcher, self.clock, self.share, failed)
        if any(delay):
            self.sequences.delay(*delay)
        self.instances = [FakeInstance(self.clock, self.model) for _ in range(instances)]
        for instance in self.instances:
            self.sequences.add_instance(instance)

    def model(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.given.append([controls(inputs, row) for row in range(len(inputs["x"]))])
        if (inputs["x"] == 99).any():
            raise ValueError("not this")
        results = {"y": 2 * inputs["x"]}
        if "old" in inputs:
            results["new"] = inputs["old"] + inputs["x"]
            results["y"] = results["new"]
        return [results[name] for name in outputs]

    def send(self, x: int, id: int, flags: str = "", timeout: int = 0) -> FakeCall:
        """Submit a request, which is named by its number; `flags` as in a configuration."""
        options = CallOptions(
            timeout=timeout, sequence_id=id, sequence_start="s" in flags, sequence_end="e" in flags
        )
        tensor = Tensor("x", Datatype.INT64, np.array([[x]], np.int64))
        asked = Call("double", "", str(x), {"x": tensor}, options=options)
        return submitted(self.sequences.submit, asked, FakeCall(str(x)), 1)

    def run(self) -> None:
        """Let ticks and batches end until nothing is in progress."""
        self.clock.settle()
        while any(instance.busy for instance in self.instances):
            for instance in self.instances:
                if instance.busy:
                    instance.finish()
            self.clock.settle()

    def fail(self, error: Exception, instance: int = 0, lost: bool = False) -> None:
        """End the batch of an instance with an error; its state may be `lost` with it."""
        if lost:
            self.sequences.lose(self.instances[instance])
        self.instances[instance].report(error)
        self.clock.settle()


def test_controls_and_places() -> None:
    """Requests are on the seats of their sequences, whatever the order of their arrival."""
    world = World()
    for id in (11, 12, 13):
        world.send(id, id, "s")
    world.run()
    assert world.given == [[[11, 1, 1, 11], [12, 1, 1, 12], [13, 1, 1, 13]]]
    third, first = world.send(3, 13), world.send(1, 11, "e")
    world.run()
    assert world.given[1] == [[1, 0, 1, 11], [0, 0, 0, 0], [3, 0, 1, 13]]
    assert (first.values, third.values) == ([2], [6])
    # The first seat is free, and a batch ends with its last request.
    world.send(4, 13)
    world.run()
    assert world.given[2] == [[0, 0, 0, 0], [0, 0, 0, 0], [4, 0, 1, 13]]
    other = world.send(5, 15, "s")
    world.run()
    assert world.given[3] == [[5, 1, 1, 15]]
    batches = {rows: batch.count for rows, batch in world.statistics.batches.items()}
    assert batches == {3: 3, 1: 1}  # with empty seats
    assert other.values == [10]
    assert (world.statistics.inference_count, world.statistics.success_count) == (7, 7)


def test_without_places_only_requests_are_in_a_batch() -> None:
    world = World(fixed=False)
    for id in (11, 12, 13):
        world.send(id, id, "s")
    world.send(2, 12)
    world.run()
    assert [[row[0] for row in batch] for batch in world.given] == [[11, 12, 13], [2]]


def test_a_sequence_has_one_request_in_a_batch() -> None:
    world = World()
    calls = [world.send(x, 1, "s" * (x == 1) + "e" * (x == 4)) for x in (1, 2, 3, 4)]
    assert world.sequences.waiting == 3
    assert world.batcher.busy
    world.run()
    assert [batch[0][:2] for batch in world.given] == [[1, 1], [2, 0], [3, 0], [4, 0]]
    assert [call.values for call in calls] == [[2], [4], [6], [8]]
    assert world.sequences.waiting == 0
    assert not world.batcher.busy


def test_the_wait_for_a_turn_is_time_in_the_queue() -> None:
    world = World()
    world.send(1, 1, "s")
    second = world.send(2, 1)
    world.clock.settle()
    world.clock.advance(700)
    world.run()
    (response,) = second.responses
    assert response.timing.queue_ns == 700


def test_a_batch_waits_for_enough_seats() -> None:
    """A batch with fewer requests than `minimum_slot_utilization` has waits for its delay."""
    world = World(policy=BatchPolicy(4, 5_000, frozenset({3, 4})))
    world.send(1, 1, "s")
    world.send(2, 2, "s")
    world.clock.settle()
    assert not world.instances[0].busy
    world.send(3, 3, "s")
    world.send(4, 4, "s")
    world.run()
    world.send(5, 4)
    world.clock.settle()
    assert not world.instances[0].busy
    world.clock.advance(5_000)
    world.run()
    assert [[row[0] for row in batch] for batch in world.given] == [[1, 2, 3, 4], [0, 0, 0, 5]]


def test_a_failed_batch_is_not_run_again() -> None:
    """The model may have taken its requests into its states; the sequences go on."""
    world = World()
    calls = [world.send(x, x, "s") for x in (1, 99, 3)]
    world.run()
    assert len(world.given) == 1
    assert all(isinstance(call.errors[0], ExecutionFailed) for call in calls)
    again = world.send(4, 3)
    world.run()
    assert again.values == [8]


def test_a_cancelled_request_holds_its_sequence_while_the_model_has_it() -> None:
    world = World(2)
    first, second = world.send(1, 1, "s"), world.send(2, 1)
    world.clock.settle()
    first.cancel()
    world.clock.settle()
    assert world.instances[0].running == ["1"]
    assert world.sequences.waiting == 1
    world.run()
    assert (first.calls, second.values) == (0, [4])


@pytest.mark.parametrize("early", [False, True], ids=["after the batch", "within it"])
def test_a_cancelled_request_holds_its_sequence_until_its_last_response(early: bool) -> None:
    world = World()
    (instance,), sequences = world.instances, world.sequences
    first, second, other = world.send(1, 1, "s"), world.send(2, 1), world.send(3, 3, "s")
    world.clock.settle()
    first.cancel()
    if early:
        sequences.answer(first, None, True)
    instance.report(parts=[Deferral.LATER, part(6)])
    world.clock.settle()
    assert (instance.running, sequences.waiting) == ((["2"], 0) if early else ([], 1))
    if not early:
        sequences.answer(first, None, False)
        world.clock.settle()
        assert not instance.busy
        sequences.answer(first, None, True)
    world.run()
    assert (first.calls, second.values, other.values) == (0, [4], [6])
    assert world.send(4, 1, "e").calls == 0
    world.run()
    assert not world.batcher.busy


def test_a_request_that_lasts_is_cancelled() -> None:
    world = World()
    first, second = world.send(1, 1, "s"), world.send(2, 1, "e")
    world.clock.settle()
    world.instances[0].report(parts=[Deferral.LATER])
    world.clock.settle()
    first.cancel()
    world.clock.settle()
    assert world.instances[0].running == []
    world.sequences.answer(first, None, True)
    world.run()
    assert (second.values, world.sequences.series.seated) == ([4], 0)


def test_a_request_that_lasts_is_answered() -> None:
    world = World()
    first, second = world.send(1, 1, "s"), world.send(2, 1, "e")
    world.clock.settle()
    world.instances[0].report(parts=[Deferral.LATER])
    world.clock.settle()
    assert world.instances[0].running == []
    world.sequences.answer(first, part(6), True)
    world.run()
    assert (first.values, second.values) == ([6], [4])


def test_a_worker_ends_with_a_cancelled_request_that_lasts() -> None:
    world = World()
    first, second = world.send(1, 1, "s"), world.send(2, 1)
    world.clock.settle()
    world.instances[0].report(parts=[Deferral.LATER])
    first.cancel()
    world.sequences.suspend(world.instances[0])
    world.sequences.lose(world.instances[0])
    world.clock.settle()
    assert isinstance(second.errors[0], SequenceLost)
    world.sequences.answer(first, WorkerDied("it died"), True)
    again = world.send(3, 1, "s")
    world.sequences.resume(world.instances[0])
    world.run()
    assert (first.calls, again.values) == (0, [6])


def test_cancelled_requests_that_wait() -> None:
    world = World(seats=1)
    first, second, third = world.send(1, 1, "s"), world.send(2, 1), world.send(3, 1)
    other, late = world.send(4, 2, "s"), world.send(5, 2)
    second.cancel()
    other.cancel()  # with it, its sequence
    assert isinstance(late.errors[0], InvalidRequest)
    world.run()
    assert (first.values, third.values) == ([2], [6])
    assert world.statistics.failures["CANCELED"] == 2
    assert world.sequences.waiting == 0


def test_a_start_that_is_refused_leaves_no_sequence() -> None:
    world = World()
    world.load.full = True
    with pytest.raises(Overloaded):
        world.send(1, 1, "s")
    world.load.full = False
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        world.send(2, 1)
    assert world.sequences.series.seated == 0


def test_requests_count_as_the_models_from_their_arrival_to_their_end() -> None:
    world = World(seats=1)
    first, second, third, other = (
        world.send(1, 1, "s"), world.send(2, 1), world.send(3, 1, "e"), world.send(4, 2, "se")
    )  # fmt: skip
    assert world.share.requests == 4
    world.share.full = True
    with pytest.raises(Overloaded):
        world.send(5, 3, "s")
    second.cancel()
    assert world.share.requests == 3
    world.run()  # those that wait are not refused later
    assert (first.values, third.values, other.values) == ([2], [6], [8])
    assert (world.share.requests, world.load.requests) == (0, 0)
    world.share.full = False
    with pytest.raises(InvalidRequest):
        world.send(6, 3)
    assert world.share.requests == 0


def test_a_request_that_is_refused_does_not_end_its_sequence() -> None:
    world = World()
    world.send(1, 1, "s")
    waiting = world.send(2, 1)
    world.load.full = True
    world.run()
    assert isinstance(waiting.errors[0], Overloaded)
    with pytest.raises(Overloaded):
        world.send(3, 1)
    world.load.full = False
    again = world.send(3, 1)
    assert set(again.inputs) == {"x", "start", "ready", "id"}
    world.run()
    assert again.values == [6]


def test_idle_sequences_end() -> None:
    world = World()
    world.send(1, 1, "s")
    world.run()
    world.clock.advance(IDLE - 1)
    assert world.sequences.series.seated == 1
    world.clock.advance(1)
    assert world.sequences.series.seated == 0
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        world.send(2, 1)
    assert world.clock.armed == []


def test_a_timeout_in_the_backlog() -> None:
    world = World(seats=1)
    world.send(1, 1, "s")
    waiting = [world.send(2, 2, "s", timeout=50), world.send(3, 2)]
    world.clock.settle()
    world.clock.advance(49_999)
    assert not waiting[0].errors
    world.clock.advance(1)
    for call in waiting:
        (error,) = call.errors
        assert isinstance(error, QueueTimeout)
        assert str(error) == "timeout of the corresponding sequence has been expired"
    assert world.statistics.failures["REJECTED"] == 2
    # Once it has a seat, a request has all the time that it needs.
    timely = world.send(4, 1, timeout=10)
    world.clock.advance(1_000_000)
    world.run()
    assert timely.values == [8]


def test_the_answer_to_one_request_cancels_another_that_is_about_to_begin() -> None:
    """Two seats become free at once; the first of the two requests for them is refused."""
    world = World(seats=2)
    for id in (1, 2):
        world.send(id, id, "s")
    world.run()
    refused, other = world.send(3, 3, "s"), world.send(4, 4, "s")
    world.load.full = True

    def let_go() -> None:
        world.load.full = False
        other.cancel()

    refused.then = let_go
    world.clock.advance(IDLE)
    assert isinstance(refused.errors[0], Overloaded)
    assert (world.batcher.busy, world.batcher.pending, world.share.requests) == (False, 0, 0)
    assert other.calls == 0
    last = world.send(5, 5, "se")
    world.run()
    assert last.values == [10]


def test_the_end_of_a_worker() -> None:
    """Its requests fail, and those that wait for it; sequences elsewhere notice nothing."""
    world = World(2, seats=2)
    running, other = world.send(1, 1, "s"), world.send(2, 2, "s")
    queued = world.send(3, 1)
    world.clock.settle()
    world.sequences.suspend(world.instances[0])
    late = world.send(4, 3, "s")  # for the first one, too
    world.clock.settle()
    world.fail(WorkerDied("it died"), lost=True)
    for call in (running, queued, late):
        (error,) = call.errors
        assert isinstance(error, SequenceLost)
        assert "has to be begun again" in str(error)
    with pytest.raises(SequenceLost, match="sequence 1 of model 'double' is lost"):
        world.send(5, 1)
    again, further = world.send(6, 1, "s"), world.send(7, 4, "s")
    world.run()
    assert (other.values, again.values) == ([4], [12])
    assert not further.calls
    world.sequences.resume(world.instances[0])
    world.run()
    assert further.values == [14]


@pytest.mark.parametrize("how", ["its worker dies", "it is given up", "time is over"])
def test_many_requests_that_wait_end_in_turns(how: str) -> None:
    world = World(seats=1)
    (instance,), sequences = world.instances, world.sequences
    first = world.send(1, 1, "s")
    late = how == "time is over"
    if how == "its worker dies":
        waiting = [world.send(x, 1) for x in range(1000, 1500)]
    else:  # in the backlog, of one sequence or of many
        waiting = [world.send(1000, 2, "s", timeout=50 * late)]
        waiting += [world.send(x, 2 if late else x, "s" * (not late)) for x in range(1001, 1500)]
    ended, told = ends_by_tick(world.clock, waiting), list[bool]()
    world.clock.settle()
    waiting[300].cancel()
    waiting[0].then = waiting[400].cancel
    world.batcher.when_drained(lambda: told.append(True))
    error: type[ServerError] = QueueTimeout
    if late:
        world.clock.advance(50_000)
        instance.finish()
    else:
        error = SequenceLost
        sequences.suspend(instance)
        sequences.lose(instance)
        if how == "it is given up":
            error = ModelNotReady
            sequences.fail_waiting(ModelNotReady("gone"))
        instance.report(WorkerDied("it died"))
        waiting[450].cancel()
        assert not told
    again = world.send(2, 1, "s")
    sequences.resume(instance)
    world.run()
    assert max(ended.values()) <= 100
    silent = [300, 400] if late else [300, 400, 450]
    assert [place for place, call in enumerate(waiting) if not call.calls] == silent
    assert {type(found) for call in waiting for found in call.errors} == {error}
    assert (first.calls, again.values, told) == (1, [4], [True])
    assert (sequences.waiting, world.share.requests) == (0, 0)


def test_the_next_worker_runs_no_requests_of_the_last() -> None:
    world = World()
    call = world.send(1, 1, "s")
    world.clock.settle()
    world.fail(NotStarted(), lost=True)
    assert isinstance(call.errors[0], SequenceLost)
    assert not world.instances[0].busy


def test_a_batch_that_is_handed_back_runs_again() -> None:
    world = World()
    call = world.send(1, 1, "s")
    world.clock.settle()
    world.fail(NotStarted())
    world.run()
    assert call.values == [2]


def test_an_instance_leaves_after_its_last_sequence() -> None:
    world = World(2, seats=1)
    world.send(1, 1, "s")
    world.send(2, 2, "s")
    world.run()
    gone: list[Instance] = []
    first, second = world.instances
    world.sequences.remove_instance(first, lambda: gone.append(first))
    waiting = world.send(3, 3, "s")
    last = world.send(4, 1, "e")
    world.run()
    assert (last.values, gone) == ([8], [first])
    assert not waiting.calls
    world.send(5, 2, "e")
    world.run()
    assert waiting.values == [6]
    world.sequences.remove_instance(second, lambda: gone.append(second))
    world.clock.advance(IDLE)
    world.clock.settle()
    assert gone == [first, second]


def test_no_instance_is_left() -> None:
    world = World()
    world.sequences.lose(world.instances[0])
    waiting = world.send(1, 1, "s")
    error: ServerError = ModelNotReady("gone")
    assert world.sequences.fail_waiting(error)
    assert waiting.errors == [error]
    assert not world.batcher.busy


def test_states_are_carried_on() -> None:
    world = World(states=[STATE])
    first, other = world.send(1, 1, "s"), world.send(10, 2, "s")
    second = world.send(2, 1)
    world.run()
    assert (first.values, second.values, other.values) == ([6], [8], [15])
    world.send(99, 1)  # fails, and so leaves the state as it was
    world.run()
    third, fourth = world.send(3, 1), world.send(4, 1, "s")
    world.run()
    assert (third.values, fourth.values) == ([11], [9])


def part(x: int) -> Part:
    return Part({"y": np.array([[x]])}, {})


def test_requests_that_their_model_runs_again() -> None:
    """Such requests share batches, are no start any more, and keep their turn."""
    world = World()
    first, second = world.send(1, 11, "s"), world.send(2, 11)
    world.clock.settle()
    (instance,) = world.instances
    instance.report(parts=[Deferral.AGAIN])
    third = world.send(3, 13, "s")
    world.clock.settle()
    assert instance.running == ["1", "3"]
    instance.report(parts=[Deferral.AGAIN, part(7)])
    world.clock.settle()
    assert instance.running == ["1"]
    assert not first.options.sequence_start
    assert np.asarray(first.inputs["start"].array).item() == 0
    instance.report(parts=[part(5)])
    world.run()
    assert (first.values, third.values, second.values) == ([5], [7], [4])
    assert world.statistics.success_count == 3


def test_requests_without_an_id_of_an_iterative_model() -> None:
    """Each is a sequence of its own."""
    world = World(iterative=True)
    calls = [world.send(x, 0) for x in (1, 2)]
    world.run()
    ((one, other),) = world.given
    assert (one[:2], other[:2]) == ([1, 1], [2, 1])
    assert one[3] != other[3]
    assert min(one[3], other[3]) > 2**62
    assert [call.values for call in calls] == [[2], [4]]
    assert all(
        call.options.sequence_id == row[3] for call, row in zip(calls, (one, other), strict=True)
    )
    assert world.sequences.series.seated == 0


def test_delayed_schedulers() -> None:
    """The first requests wait for one another, and for those of the backlog, as in Triton."""
    world = World(seats=1, delay=(2, 2))
    first, second = world.send(1, 1, "s"), world.send(2, 1)
    other = world.send(3, 2, "s")
    world.run()
    assert not world.given
    assert world.batcher.busy
    world.send(5, 2, "e")
    world.run()
    assert [batch[0][0] for batch in world.given] == [1, 2]
    world.send(6, 1, "e")
    world.run()
    assert [batch[0][0] for batch in world.given] == [1, 2, 6, 3, 5]
    assert (first.values, second.values, other.values) == ([2], [4], [6])


def test_variables_of_delayed_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    world = World()
    world.send(1, 1, "s")
    world.run()
    assert not world.given
    world.send(2, 2, "s")
    world.run()
    assert [row[0] for row in world.given[0]] == [1, 2]


def test_no_timer_is_left() -> None:
    world = World()
    world.send(1, 1, "s")
    world.run()
    world.sequences.close()
    assert world.clock.armed == []
