"""Quarantine: which inputs are suspected, cleared, refused and forgotten."""

import numpy as np
import pytest

from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest, Quarantined, WorkerDied
from headrace.core.tensors import Array, Tensor
from headrace.scheduling.batch import Batch, Deferral, NotStarted, Outcome, Part
from headrace.scheduling.quarantine import Quarantine
from tests.scheduling.fakes import Bench, entered, request, signature

HOUR = 3_600 * 10**9
_OWNER = Bench().batcher


def call(asked: Call) -> Call:
    return entered(asked, 1, None, 0, _OWNER)


def texts(*elements: bytes) -> Call:
    array = np.empty(len(elements), object)
    array[:] = elements
    return of(array, Datatype.BYTES)


def of(array: Array, datatype: Datatype = Datatype.FP32) -> Call:
    return Call("m", "", "", {"x": Tensor("x", datatype, array)})


def ended(found: Quarantine, error: Exception | None, *asked: Call, now: int = 1) -> None:
    """Report the end of a batch of these requests."""
    batch = Batch(signature(), [call(one) for one in asked])
    found.learn_batch(batch, Outcome((), error, now, now, now), now)


def death() -> WorkerDied:
    return WorkerDied("it ended")


def died(*asked: Call, deaths: int = 2, times: int = 1) -> Quarantine:
    """A quarantine that has seen `deaths` with these requests, at time 0."""
    found = Quarantine("m", deaths)
    for _ in range(times):
        ended(found, death(), *asked, now=0)
    return found


def verdict(found: Quarantine, asked: Call, now: int = 1) -> str:
    screened = zip(("clear", "suspects", "refused"), found.screen([call(asked)], now), strict=True)
    [name] = [name for name, calls in screened if calls]
    return name


A, B = request("a", 1, 2), request("b", 3, 4)


def test_an_input_is_suspected_and_then_refused() -> None:
    found = died(A)
    assert len(found.cases) == 1
    assert verdict(found, A) == "suspects"
    assert verdict(found, B) == "clear"
    ended(found, death(), A, now=2)
    assert verdict(found, A) == "refused"
    assert found.refused == 1
    assert "2 worker processes of model 'm'" in str(found.error())


def test_a_surviving_input_is_cleared_by_an_answer_or_an_error() -> None:
    found = died(A, B)
    ended(found, NotStarted(), A, now=1)
    assert verdict(found, A) == "suspects"
    ended(found, None, A, now=1)
    ended(found, ExecutionFailed("raised"), B, now=1)
    assert not found.cases


@pytest.mark.parametrize("error", [NotStarted(), None, InvalidRequest("no")])
def test_without_a_death_no_input_is_suspected(error: Exception | None) -> None:
    found = Quarantine("m")
    ended(found, error, A, now=0)
    assert not found.cases


def test_the_same_input_several_times_at_one_death_counts_once() -> None:
    assert verdict(died(A, request("other id", 1, 2)), A) == "suspects"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (of(np.zeros(4, np.float32)), of(np.zeros((2, 2), np.float32))),
        (of(np.zeros(4, np.float32)), of(np.zeros(4, np.int32), Datatype.INT32)),
        (of(np.zeros(99, np.float32)), of(np.eye(1, 99, 50, dtype=np.float32)[0])),
        (texts(b"a", b"bc"), texts(b"ab", b"c")),
        (texts(b"x" * 100), texts(b"x" * 99 + b"y")),
        (A, A.like(parameters={"seed": 1})),
        (A.like(parameters={"seed": True}), A.like(parameters={"seed": 1})),
        (A, A.like(inputs={**A.inputs, "y": A.inputs["x"]})),
        (A, A.like(inputs={"y": A.inputs["x"]})),
    ],
)
def test_inputs_that_differ(one: Call, other: Call) -> None:
    assert verdict(died(one), one) == "suspects"
    assert verdict(died(one), other) == "clear"
    found = died(one)
    ended(found, None, other, now=1)
    assert len(found.cases) == 1


def test_inputs_are_identified_by_value_not_by_memory_layout() -> None:
    square = np.arange(36, dtype=np.float32).reshape(6, 6)
    assert verdict(died(of(square.T)), of(square.T.copy())) == "suspects"


def test_after_an_hour_suspects_are_forgotten_and_refused_inputs_are_suspects() -> None:
    found = died(A)
    ended(found, death(), B, now=5)
    ended(found, death(), B, now=5)
    ended(found, death(), later := request("later", 9), now=6)
    assert verdict(found, A, HOUR - 1) == "suspects"
    assert verdict(found, A, HOUR) == "clear"
    assert verdict(found, B, HOUR + 4) == "refused"
    assert verdict(found, B, HOUR + 5) == "suspects"
    assert verdict(found, later, HOUR + 6) == "clear"  # though older ones are kept
    ended(found, death(), B, now=HOUR + 6)
    assert verdict(found, B, HOUR + 7) == "refused"


def test_quarantine_is_bounded() -> None:
    found = Quarantine("m")
    for value in range(2_000):
        ended(found, death(), request("", value), now=value)
        ended(found, death(), request("", 0), request("", value), now=value)
    assert len(found.cases) == 1024
    assert verdict(found, request("", 1)) == "clear"
    assert verdict(found, request("", 1_999)) == "suspects"
    assert verdict(found, request("", 0)) == "refused"  # the most recent are dropped last


@pytest.mark.parametrize(("deaths", "times", "expected"), [(0, 9, "clear"), (3, 2, "suspects")])
def test_number_of_deaths_until_refusal(deaths: int, times: int, expected: str) -> None:
    assert verdict(died(A, deaths=deaths, times=times), A) == expected


def test_a_suspect_among_other_suspects_is_not_proven() -> None:
    found = died(A, B)
    c = request("c", 9)
    last = death()  # of a worker with several requests: reported one by one
    found.learn_answer(call(A), last, True, 1)
    ended(found, last, B, c)
    assert [verdict(found, one) for one in (A, B, c)] == ["suspects"] * 3
    ended(found, death(), A, request("d", 8))
    assert [verdict(found, one) for one in (A, B, c)] == ["refused", "suspects", "suspects"]


def test_one_death_reported_twice_counts_once() -> None:
    found, last = Quarantine("m"), death()
    found.learn_answer(call(A), last, True, 1)
    found.learn_answer(call(A), last, True, 1)
    ended(found, last, A)
    assert verdict(found, A) == "suspects"


def test_a_request_that_is_open_is_cleared_by_its_last_answer() -> None:
    found = died(A)
    batch = Batch(signature(), [call(A)])
    found.learn_batch(batch, Outcome((), None, 1, 1, 1, [Deferral.LATER]), 1)
    assert verdict(found, A) == "suspects"
    found.learn_answer(call(A), Part({}, {}), False, 2)
    assert verdict(found, A) == "suspects"
    found.learn_answer(call(A), None, True, 3)
    assert verdict(found, A) == "clear"


# --- in the batcher


def test_only_the_killing_input_dies_again_and_others_are_cleared() -> None:
    bench = Bench()
    [instance] = bench.instances
    for name, value in (("a", 1), ("guilty", 2), ("c", 3)):
        bench.submit(name, value)
    bench.clock.settle()
    instance.report(death())
    calls = [bench.submit(name, v) for name, v in (("a", 1), ("guilty", 2), ("c", 3), ("d", 4))]
    bench.clock.settle()
    while bench.instances[0].busy:
        if instance.running == ["guilty"]:
            instance.report(death())
        else:
            instance.finish()
        bench.clock.settle()
    assert instance.runs[1:] == [["d"], ["a"], ["guilty"], ["c"]]
    assert [len(call.responses) for call in calls] == [1, 0, 1, 1]
    refused = bench.submit("guilty", 2)
    other = bench.submit("a", 1)
    bench.finish_all()
    assert isinstance(refused.errors[0], Quarantined)
    assert other.values == [2]
    assert bench.statistics.failures["REJECTED"] == 1
    assert not bench.batcher.busy


def test_a_queue_full_of_one_killing_input_costs_two_deaths() -> None:
    bench = Bench()
    [instance] = bench.instances
    calls = [bench.submit(str(n), 7) for n in range(12)]
    bench.clock.settle()
    while instance.busy:
        instance.report(death())
        bench.clock.settle()
    assert instance.rows == [4, 1]
    assert [type(call.errors[0]) for call in calls].count(Quarantined) == 7
    assert not bench.batcher.busy


def test_an_unbegun_suspect_still_runs_alone() -> None:
    bench = Bench()
    [instance] = bench.instances
    bench.send("a", 1)
    instance.report(death())
    bench.send("a", 1)
    instance.report(NotStarted())
    bench.submit("b", 2)
    bench.finish_all()
    assert instance.runs == [["a"], ["a"], ["a"], ["b"]]


def test_a_suspect_is_cancelled_while_it_waits_to_run_alone() -> None:
    bench = Bench()
    [instance] = bench.instances
    bench.send("a", 1)
    instance.report(death())
    suspect = bench.submit("a", 1)
    bench.send("b", 2)
    assert instance.running == ["b"]
    suspect.cancel()
    bench.finish_all()
    assert instance.runs == [["a"], ["b"]]
    assert not bench.batcher.busy
