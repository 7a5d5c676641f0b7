"""Traces as Triton's tools read them."""

import json
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, Tensor, elsewhere
from headrace.observability.trace_settings import Sampler, TraceSettings
from headrace.observability.traces import BACKEND_OUTPUT, QUEUE_INPUT, Trace
from headrace.plugins.traces.files import addition, encode_trace, whole_file

TIMES, TENSORS = TraceSettings(timestamps=True), TraceSettings(tensors=True)


def a_trace(settings: TraceSettings = TIMES, number: int = 7, parent: int = 0) -> Trace:
    trace = Trace(number, parent, Sampler(settings), "HTTP", "simple", "abc", 0, 3)
    trace.time("REQUEST_START", 10)
    trace.time("REQUEST_END", 40)
    trace.time("QUEUE_START", 20)
    return trace


def objects(trace: Trace) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(whole_file([encode_trace(trace)]))
    return parsed


def test_the_model_first_and_then_times_in_their_order() -> None:
    assert objects(a_trace()) == [
        {"id": 7, "model_name": "simple", "model_version": 3, "request_id": "abc"},
        {"id": 7, "timestamps": [{"name": "REQUEST_START", "ns": 10}]},
        {"id": 7, "timestamps": [{"name": "QUEUE_START", "ns": 20}]},
        {"id": 7, "timestamps": [{"name": "REQUEST_END", "ns": 40}]},
    ]


def test_a_request_of_a_model_has_a_parent() -> None:
    trace = a_trace(number=8, parent=7)
    trace.request_id = ""
    head = {"id": 8, "model_name": "simple", "model_version": 3, "parent_id": 7}
    assert objects(trace)[0] == head


@pytest.mark.parametrize(
    ("datatype", "values", "text"),
    [
        (Datatype.FP32, [[0.1, 2]], "0.1,2.0"),
        (Datatype.FP64, [[0.1, np.nan]], "0.1,nan"),
        (Datatype.FP16, [[0.5, 2]], "0.5,2.0"),
        (Datatype.BF16, [[0.5, 2]], "0.5,2.0"),
        (Datatype.INT64, [[-1, 2**62]], f"-1,{2**62}"),
        (Datatype.UINT8, [[65, 66]], "65,66"),
        (Datatype.BOOL, [[True, False]], "1,0"),
        (Datatype.BYTES, [[b"a", b'"\xff']], '"a",""\ufffd"'),
    ],
)
def test_tensors_are_texts(datatype: Datatype, values: list[Any], text: str) -> None:
    trace = a_trace(TENSORS)
    array: Array = np.array(values, NUMPY[datatype])
    trace.keep(QUEUE_INPUT, [Tensor("INPUT0", datatype, array)])
    trace.keep(BACKEND_OUTPUT, [Tensor("OUTPUT0", datatype, array[:, :0])])
    _, given, made = objects(trace)
    tensor = {"name": "INPUT0", "data": text, "shape": "1,2", "dtype": datatype.value}
    assert given == {"id": 7, "activity": "TENSOR_QUEUE_INPUT", "tensor": tensor}
    assert made["activity"] == "TENSOR_BACKEND_OUTPUT"
    assert (made["tensor"]["data"], made["tensor"]["shape"]) == ("", "1,0")


@pytest.mark.parametrize("datatype", Datatype)
def test_tensors_that_went_into_shared_memory(datatype: Datatype) -> None:
    trace = a_trace()
    trace.keep(BACKEND_OUTPUT, [elsewhere("y", datatype, (1, 3))])
    assert objects(trace)[-1]["tensor"] == {
        "name": "y", "data": "", "shape": "1,3", "dtype": datatype.value
    }  # fmt: skip


def test_an_addition_takes_the_place_of_the_end() -> None:
    first, second = encode_trace(a_trace(number=1)), encode_trace(a_trace(number=2))
    file = whole_file([first])[:-1] + addition([second, second])
    assert [o["id"] for o in json.loads(file)] == [1] * 4 + [2] * 8


@pytest.mark.parametrize("text", ['a"\n', "\ud800", "ü"])
def test_an_id_may_be_any_text(text: str) -> None:
    trace = a_trace()
    trace.request_id = text
    assert objects(trace)[0]["request_id"] == text.encode(errors="replace").decode()


@pytest.mark.parametrize("datatype", [Datatype.FP64, Datatype.BYTES])
def test_large_tensors_are_written_with_pauses(datatype: Datatype) -> None:
    trace = a_trace(TENSORS)
    values = np.arange(300_000).reshape(3, -1)
    array: Array = values.astype(NUMPY[datatype])
    if datatype is Datatype.BYTES:
        array = np.array([b"%d" % value for value in values.flat], object).reshape(3, -1)
    trace.keep(QUEUE_INPUT, [Tensor("x", datatype, array)])
    pauses: list[None] = []
    text = encode_trace(trace, lambda: pauses.append(None))
    assert len(pauses) > 100
    elements = json.loads(whole_file([text]))[1]["tensor"]["data"].split(",")
    assert [int(float(element.strip('"'))) for element in elements] == list(range(300_000))
