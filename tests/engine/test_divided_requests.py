"""Requests that are divided: all rows, in order, a few parts at a time, and one end."""

from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray, bytes_array
from headrace.core.call import Call, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import ExecutionFailed, ModelNotReady, Overloaded, QueueFull, ServerError
from headrace.core.tensors import Tensor
from headrace.engine.chain import divide, joined
from headrace.engine.workbench import Workbench
from headrace.workers.elements import join
from tests.scheduling.fakes import FakeCall, submitted


class Part:
    """A part of a request that is queued or run, and its owner."""

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
        """Answer with the rows of the part, and what they are as text."""
        x = self.request.inputs["x"].array
        texts = [str(value).encode() for value in np.asarray(x).ravel().tolist()]
        outputs = [
            Tensor("y", Datatype.INT64, x),
            Tensor("text", Datatype.BYTES, BytesArray(join(texts), x.shape)),
        ]
        timing = Timing(10, 5, self.rows)
        response = InferResponse("m", "1", self.request.id, outputs, timing, {"of": len(texts)})
        self.request.respond(response, final)


class Model:
    """Queues parts, of which it takes at most `room` at a time."""

    def __init__(self, room: int = 100) -> None:
        self.parts: list[Part] = []
        self.open: list[Part] = []
        self.expected = 0
        self.room = room
        self.refusal: ServerError = QueueFull("full")

    def expect(self, count: int) -> None:
        self.expected += count

    def submit(self, request: Call) -> None:
        if len([part for part in self.open if not part.cancelled]) >= self.room:
            raise self.refusal
        part = Part(request)
        self.parts.append(part)
        self.open.append(part)

    def divide(self, rows: int, part_rows: int, timeout: int = 0) -> FakeCall:
        """Begin a request of so many rows, for batches of that many."""
        x = Tensor("x", Datatype.INT64, np.arange(2 * rows).reshape(rows, 2))
        asked = Call(
            "m", "", "name", {"x": x}, ("y", "text"), {"own": 1}, 3, timeout, 7, True, True,
            nbytes=100 * rows,
        )  # fmt: skip
        stage = divide(part_rows, self.submit, self, Workbench())
        return submitted(stage, asked, FakeCall(), rows)


@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 10), st.randoms())
def test_all_rows_come_back_in_order_whatever_is_answered_first(
    rows: int, part_rows: int, room: int, random: Random
) -> None:
    assume(rows > part_rows)
    model = Model(room)
    sink = model.divide(rows, part_rows)
    while model.open:
        assert len(model.open) <= min(room, 8)
        assert model.expected == 1
        assert not sink.calls
        random.shuffle(model.open)
        model.open.pop().answer()
    [response] = sink.responses
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "name")
    expected = np.arange(2 * rows).reshape(rows, 2)
    y, text = response.outputs
    assert np.asarray(y.array).tolist() == expected.tolist()
    assert np.asarray(text.array).tolist() == [[b"%d" % n for n in row] for row in expected]
    assert all(part.rows <= part_rows for part in model.parts)
    assert sum(part.rows for part in model.parts) == rows
    assert sum(part.request.nbytes for part in model.parts) == 100 * rows
    assert model.expected == 0


def test_a_part_is_a_request_like_the_whole() -> None:
    model = Model()
    model.divide(5, 2)
    for part in model.parts:
        asked = part.request
        assert (asked.model_name, asked.id, asked.outputs) == ("m", "name", ("y", "text"))
        assert (asked.parameters, asked.priority, asked.timeout) == ({"own": 1}, 3, 0)
    assert model.parts[0].request.parameters is not model.parts[1].request.parameters


def test_what_is_left_of_a_timeout() -> None:
    model = Model(room=1)
    model.divide(4, 1, timeout=60_000_000)
    for _ in range(3):
        model.open.pop().answer()
    left = [part.request.timeout for part in model.parts]
    assert left == sorted(left, reverse=True)
    assert 0 < left[-1] < left[0] <= 60_000_000


def test_the_first_failure_ends_it_and_cancels_the_others() -> None:
    model = Model()
    sink = model.divide(30, 1)
    first, second, third, *others = list(model.parts)
    second.answer()
    third.request.fail(ExecutionFailed("poisoned"))
    assert [str(error) for error in sink.errors] == ["poisoned"]
    assert first.cancelled
    assert all(part.cancelled for part in others)
    first.answer()  # they may still come
    others[0].request.fail(ExecutionFailed("late"))
    assert sink.calls == 1
    assert model.expected == 0


def test_cancelling_cancels_what_is_under_way_and_begins_nothing_more() -> None:
    model = Model()
    sink = model.divide(30, 1)
    sink.cancel()
    sink.cancel()
    assert [part.cancelled for part in model.parts] == [True] * 8
    model.parts[0].answer()
    assert (len(model.parts), sink.calls, model.expected) == (8, 0, 0)


def test_a_queue_that_is_full_at_once() -> None:
    model = Model(room=0)
    with pytest.raises(QueueFull):
        model.divide(4, 1)
    assert model.expected == 0


@pytest.mark.parametrize("error", [Overloaded("no share"), ModelNotReady("unloaded")])
def test_a_part_that_cannot_be_queued_when_none_is_left(error: ServerError) -> None:
    model = Model(room=1)
    sink = model.divide(4, 1)
    model.room, model.refusal = 0, error
    model.open.pop().answer()
    assert sink.errors == [error]
    assert model.expected == 0


def test_a_part_that_ends_without_a_response_and_one_that_answers_before_its_end() -> None:
    model = Model(room=2)
    sink = model.divide(3, 1)
    model.parts[0].answer(final=False)
    model.parts[0].request.finish()
    assert not sink.calls
    model.open.remove(model.parts[0])
    model.parts[1].request.finish()
    [error] = sink.errors
    assert "ended the request without a response" in str(error)


def response_of(*outputs: Tensor) -> InferResponse:
    return InferResponse("m", "1", "", list(outputs), Timing(1, 2, 3))


def test_timings_and_parameters_of_all_parts() -> None:
    first = InferResponse("m", "1", "", [], Timing(10, 5, 8), {"a": 1, "b": 1})
    second = InferResponse("m", "1", "", [], Timing(90, 7, 9), {"b": 2})
    whole = joined([first, second])
    assert whole.timing == Timing(10, 12, 9)
    assert whole.parameters == {"a": 1, "b": 2}


def test_rows_that_do_not_go_together() -> None:
    narrow, wide = (Tensor("y", Datatype.FP32, np.zeros((2, n), np.float32)) for n in (3, 4))
    with pytest.raises(ExecutionFailed, match=r"output 'y' .* different shapes .* \[3\] and \[4\]"):
        joined([response_of(narrow), response_of(wide)])
    texts = [Tensor("y", Datatype.BYTES, bytes_array([b"a"] * n, (1, n))) for n in (1, 2)]
    with pytest.raises(ExecutionFailed, match=r"\[1\] and \[2\]"):
        joined([response_of(text) for text in texts])
    with pytest.raises(ExecutionFailed, match="different outputs for the batches of one request"):
        joined([response_of(narrow), response_of()])


def test_a_sequence_starts_with_the_first_part_and_ends_with_the_last() -> None:
    model = Model()
    model.divide(9, 4)
    asked = [part.request for part in model.parts]
    assert [one.sequence_id for one in asked] == [7, 7, 7]
    assert [one.sequence_start for one in asked] == [True, False, False]
    assert [one.sequence_end for one in asked] == [False, False, True]
