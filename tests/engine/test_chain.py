"""Stages before a scheduler: division of requests, and counting of responses."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray, bytes_array
from headrace.core.call import Call, CallOptions, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, ModelNotReady, Overloaded, QueueFull, ServerError
from headrace.core.limits import Payer
from headrace.core.tensors import Tensor
from headrace.engine.admission import Admission
from headrace.engine.chain import count_responses, divide, joined
from headrace.engine.workbench import Workbench
from headrace.ipc.elements import join
from headrace.observability.statistics import MOST_ORDINALS, ResponseCounters
from headrace.scheduling.batch import Deferral
from tests.engine.counted import Counted
from tests.scheduling.fakes import Bench, FakeCall, ManyCall, part, request, signature, submitted


class QueuedPart:
    """A queued or running part of a request, and its owner."""

    def __init__(self, request: Call) -> None:
        self.request = request
        self.rows = request.rows
        self.cancelled = False
        request.owner = self

    def cancel(self, call: Call) -> None:
        self.cancelled = True

    def hold(self, call: Call, held: bool) -> None:
        raise AssertionError("there is nothing to hold")

    def answer(self, final: bool = True) -> None:
        """Answer with the rows of the part, also as text."""
        x = self.request.inputs["x"].array
        texts = [str(value).encode() for value in np.asarray(x).ravel().tolist()]
        outputs = [
            Tensor("y", Datatype.INT64, x),
            Tensor("text", Datatype.BYTES, BytesArray(join(texts), x.shape)),
        ]
        timing = Timing(10, 5, self.rows)
        response = InferResponse("m", "1", self.request.id, outputs, timing, {"of": len(texts)})
        self.request.respond(response, final)


class PaidCall(FakeCall):
    """A call with a client."""

    account = Admission(0, 0).connect("http", "192.0.2.1")

    @property
    def payer(self) -> Payer | None:
        return self.account


class Model:
    """Queues parts, at most `room` at a time."""

    def __init__(self, room: int = 100) -> None:
        self.parts: list[QueuedPart] = []
        self.open: list[QueuedPart] = []
        self.expected = 0
        self.room = room
        self.refusal: Exception = QueueFull("full")

    def expect(self, count: int) -> None:
        self.expected += count

    def submit(self, request: Call) -> None:
        if len([part for part in self.open if not part.cancelled]) >= self.room:
            raise self.refusal
        part = QueuedPart(request)
        self.parts.append(part)
        self.open.append(part)

    def divide(self, rows: int, part_rows: int, timeout: int = 0) -> FakeCall:
        """Submit a request of `rows` for batches of `part_rows`."""
        x = Tensor("x", Datatype.INT64, np.arange(2 * rows).reshape(rows, 2))
        asked = Call(
            "m", "", "name", {"x": x}, ("y", "text"), {"own": 1},
            CallOptions(3, timeout, 7, True, True), 100 * rows,
        )  # fmt: skip
        stage = divide(part_rows, self.submit, self.expect, Workbench(), lambda model, nbytes: None)
        return submitted(stage, asked, PaidCall(), rows)


@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 10), st.randoms())
def test_rows_are_joined_in_order_of_the_request(
    rows: int, part_rows: int, room: int, random: Random
) -> None:
    assume(rows > part_rows)
    model = Model(room)
    call = model.divide(rows, part_rows)
    while model.open:
        assert len(model.open) <= min(room, 8)
        assert model.expected == 1
        assert not call.calls
        random.shuffle(model.open)
        model.open.pop().answer()
    [response] = call.responses
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "name")
    expected = np.arange(2 * rows).reshape(rows, 2)
    y, text = response.outputs
    assert np.asarray(y.array).tolist() == expected.tolist()
    assert np.asarray(text.array).tolist() == [[b"%d" % n for n in row] for row in expected]
    assert all(part.rows <= part_rows for part in model.parts)
    assert sum(part.rows for part in model.parts) == rows
    assert sum(part.request.nbytes for part in model.parts) == 100 * rows
    assert model.expected == 0


def test_a_part_has_the_properties_of_its_request() -> None:
    model = Model()
    whole = model.divide(5, 2)
    for one_part in model.parts:
        asked = one_part.request
        assert asked.payer is whole.payer is not None
        assert (asked.model_name, asked.id, asked.outputs) == ("m", "name", ("y", "text"))
        assert (asked.parameters, asked.options.priority, asked.options.timeout) == (
            {"own": 1},
            3,
            0,
        )
    assert model.parts[0].request.parameters is not model.parts[1].request.parameters
    # A sequence starts with the first part and ends with the last.
    model = Model()
    model.divide(9, 4)
    requests = [part.request for part in model.parts]
    assert [one.options.sequence_id for one in requests] == [7, 7, 7]
    assert [one.options.sequence_start for one in requests] == [True, False, False]
    assert [one.options.sequence_end for one in requests] == [False, False, True]


def test_parts_have_the_remaining_timeout() -> None:
    model = Model(room=1)
    model.divide(4, 1, timeout=60_000_000)
    for _ in range(3):
        model.open.pop().answer()
    left = [part.request.options.timeout for part in model.parts]
    assert left == sorted(left, reverse=True)
    assert 0 < left[-1] < left[0] <= 60_000_000


def test_the_first_failure_ends_it_and_cancels_the_others() -> None:
    model = Model()
    call = model.divide(30, 1)
    first, second, third, *others = list(model.parts)
    second.answer()
    third.request.fail(ExecutionFailed("poisoned"))
    assert [str(error) for error in call.errors] == ["poisoned"]
    assert first.cancelled
    assert all(part.cancelled for part in others)
    first.answer()  # they may still arrive
    others[0].request.fail(ExecutionFailed("late"))
    assert call.calls == 1
    assert model.expected == 0


def test_cancelling_ends_running_parts_and_begins_no_more() -> None:
    model = Model()
    call = model.divide(30, 1)
    call.cancel()
    call.cancel()
    assert [part.cancelled for part in model.parts] == [True] * 8
    model.parts[0].answer()
    assert (len(model.parts), call.calls, model.expected) == (8, 0, 0)


def test_a_queue_that_is_full_at_once() -> None:
    model = Model(room=0)
    with pytest.raises(QueueFull):
        model.divide(4, 1)
    assert model.expected == 0


@pytest.mark.parametrize("error", [Overloaded("no share"), ModelNotReady("unloaded")])
def test_a_part_that_cannot_be_queued_when_none_is_left(error: ServerError) -> None:
    model = Model(room=1)
    call = model.divide(4, 1)
    model.room, model.refusal = 0, error
    model.open.pop().answer()
    assert call.errors == [error]
    assert model.expected == 0


def test_a_bug_while_later_parts_are_queued_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(room=1)
    call = model.divide(4, 1)
    model.room, model.refusal = 0, ZeroDivisionError()
    model.open.pop().answer()
    assert [str(error) for error in call.errors] == ["internal error"]
    assert "bug in a request that is divided" in caplog.text
    assert model.expected == 0


def test_a_part_that_ends_without_a_response_and_one_that_answers_before_its_end() -> None:
    model = Model(room=2)
    call = model.divide(3, 1)
    model.parts[0].answer(final=False)
    model.parts[0].request.finish()
    assert not call.calls
    model.open.remove(model.parts[0])
    model.parts[1].request.finish()
    [error] = call.errors
    assert "ended the request without a response" in str(error)


@pytest.mark.parametrize("answered", [0, 1])
def test_a_request_has_begun_with_the_first_of_its_parts(answered: int) -> None:
    model = Model(room=1)
    call = model.divide(3, 1)
    if answered:
        model.open.pop().answer()
    model.parts[-1].request.fail(QueueFull("full"))
    assert [str(error) for error in call.errors] == ["full"]
    assert call.started is bool(answered)


def response_of(*outputs: Tensor) -> InferResponse:
    return InferResponse("m", "1", "", list(outputs), Timing(1, 2, 3))


def test_many_parts_are_joined() -> None:
    first = InferResponse("m", "1", "", [], Timing(10, 5, 8), {"a": 1, "b": 1})
    second = InferResponse("m", "1", "", [], Timing(90, 7, 9), {"b": 2})
    whole = joined([first, second])
    assert whole.timing == Timing(10, 12, 9)
    assert whole.parameters == {"a": 1, "b": 2}
    narrow, wide = (Tensor("y", Datatype.FP32, np.zeros((2, n), np.float32)) for n in (3, 4))
    with pytest.raises(ExecutionFailed, match=r"output 'y' .* different shapes .* \[3\] and \[4\]"):
        joined([response_of(narrow), response_of(wide)])
    texts = [Tensor("y", Datatype.BYTES, bytes_array([b"a"] * n, (1, n))) for n in (1, 2)]
    with pytest.raises(ExecutionFailed, match=r"\[1\] and \[2\]"):
        joined([response_of(text) for text in texts])
    with pytest.raises(ExecutionFailed, match="different outputs for the batches of one request"):
        joined([response_of(narrow), response_of()])


LATER = Deferral.LATER


def zero(counters: ResponseCounters) -> set[str]:
    """Names of the counters at zero."""
    return {name for name in counters.__slots__ if not getattr(counters, name).count}


def test_responses_are_counted_by_ordinal() -> None:
    counted = Counted()
    counted.open()
    counted.answer(10, part(1))
    counted.answer(20, part(2))
    counted.answer(30, None, True)
    assert (counted.call.finals, counted.call.finished) == ([False, False], True)
    assert counted.told(0, "success") == counted.told(0, "compute_infer") == (1, 10)
    assert counted.told(0, "compute_output") == (1, 0)
    assert counted.told(1, "success") == (1, 20)
    assert counted.told(2, "empty_response") == (1, 30)
    assert zero(counted.responses.ordinals[0]) == {"fail", "empty_response", "cancel"}
    assert len(zero(counted.responses.ordinals[2])) == 5
    assert counted.responses.first is not None
    assert sum(counted.responses.first.counts) == 1
    assert counted.responses.first.total_ns == 15
    assert counted.bench.statistics.success_count == 1


def test_time_in_the_door_counts_as_output() -> None:
    counted = Counted()
    counted.open()
    counted.bench.clock.advance(10)
    plain = counted.call.respond

    def slow(*given: object) -> None:
        counted.bench.clock.advance(3)
        plain(*given)  # type: ignore[arg-type]

    counted.call.respond = slow  # type: ignore[method-assign, assignment]
    counted.answer(0, part(1), True)
    assert counted.told(0, "compute_infer") == (1, 10)
    assert counted.told(0, "compute_output") == (1, 3)
    assert counted.told(0, "success") == (1, 13)


def test_an_error_or_a_disconnect_after_a_response() -> None:
    counted = Counted()
    counted.open()
    counted.answer(10, part(1))
    counted.bench.clock.advance(7)
    counted.bench.batcher.answer(counted.call, ExecutionFailed("no"), True)
    assert counted.told(1, "fail") == (1, 7)
    assert counted.told(0, "fail") == (0, 0)
    counted = Counted()
    ticket = counted.open()
    counted.answer(10, part(1))
    counted.bench.clock.advance(4)
    ticket.cancel()
    ticket.cancel()
    assert counted.told(1, "cancel") == (1, 4)


def test_an_unbegun_request_counts_no_response() -> None:
    counted = Counted(Bench(instances=0))
    submitted(counted.submit, request("a", 1), ManyCall(), 1).cancel()
    submitted(counted.submit, request("b", 1), counted.call, 1)
    counted.bench.batcher.fail_waiting(ModelNotReady("none"))
    assert not counted.responses.ordinals
    assert len(counted.call.errors) == 1


def test_a_ticket_holds_the_model() -> None:
    counted = Counted()
    counted.open().hold(True)
    assert counted.call.held


def test_a_batch_with_the_only_responses() -> None:
    bench = Bench(shape=replace(signature(), decoupled=True))
    counted = Counted(bench)
    submitted(counted.submit, request("a", 1), counted.call, 1)
    bench.clock.settle()
    bench.clock.advance(8)
    bench.instances[0].finish()
    assert counted.told(0, "success") == (1, 8)


def test_a_long_stream_takes_little_memory() -> None:
    counted = Counted()
    counted.open()
    for _ in range(3 * MOST_ORDINALS):
        counted.answer(1, part(1))
    counted.answer(1, None, True)
    assert sorted(counted.responses.ordinals) == list(range(MOST_ORDINALS + 1))
    assert counted.told(MOST_ORDINALS, "success") == (2 * MOST_ORDINALS, 2 * MOST_ORDINALS)
    assert counted.told(MOST_ORDINALS, "empty_response") == (1, 1)


def test_changed_buckets_restart_and_counters_continue() -> None:
    counted = Counted()
    counted.open()
    counted.answer(1, part(1), True)
    first = counted.responses.first
    count_responses(counted.responses, counted.bench.batcher.submit)
    assert counted.responses.first is first
    count_responses(counted.responses, counted.bench.batcher.submit, (1.0, 2.0))
    assert counted.responses.first is not first
    assert counted.told(0, "success")[0] == 1
