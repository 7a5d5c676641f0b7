"""Requests and answers of inference, held against the server's own reading and writing of them."""

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.cli.client.address import BadAnswer
from headrace.cli.client.connection import Answer
from headrace.cli.client.inference import Question, cast, decode, elements, encode
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.tensors import Array, Tensor
from headrace.protocol.v2_json import JSON_SIZE, decode_infer
from tests.protocol.strategies import PROPERTY

FIXED = [datatype for datatype in Datatype if datatype not in (Datatype.BYTES, Datatype.BF16)]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    found = []
    for index in range(draw(st.integers(1, 4))):
        datatype = draw(st.sampled_from(FIXED))
        array = draw(arrays.arrays(NUMPY[datatype], arrays.array_shapes(min_dims=0, min_side=0)))
        found.append(Tensor(f"input {index} ü", datatype, array))
    texts = np.array(draw(st.lists(st.binary())), object)
    return [*found, Tensor("texts", Datatype.BYTES, texts)]


@PROPERTY
@given(tensors(), st.text(), st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9)))
def test_the_server_reads_what_was_asked(
    inputs: list[Tensor], request_id: str, parameters: dict[str, int]
) -> None:
    question = Question(inputs, ["x", "y"], {"y": 3}, parameters, request_id)
    pieces, headers = encode(question)
    request, form = decode_infer("m", "", b"".join(pieces), int(headers[JSON_SIZE]))
    assert (request.id, request.parameters) == (request_id, parameters)
    assert (form.named, request.classes) == ({"x": True, "y": False}, {"y": 3})
    for tensor in inputs:
        found = request.inputs[tensor.name]
        assert found.datatype is tensor.datatype
        np.testing.assert_array_equal(found.array, tensor.array)


@PROPERTY
@given(tensors())
def test_answers(outputs: list[Tensor]) -> None:
    pieces, headers = encode(Question(outputs))
    document = json.loads(bytes(pieces[0]))
    document |= {"outputs": document.pop("inputs"), "model_name": "m", "model_version": "3"}
    text = json.dumps(document).encode()
    body = text + b"".join(pieces[1:])
    reply = decode(Answer(headers | {JSON_SIZE: str(len(text))}, body))
    assert (reply.model_name, reply.model_version, reply.id) == ("m", "3", "")
    for tensor, found in zip(outputs, reply.outputs, strict=True):
        assert (found.name, found.datatype) == (tensor.name, tensor.datatype)
        np.testing.assert_array_equal(found.array, tensor.array)


def test_an_answer_without_binary_data() -> None:
    outputs = [
        {"name": "a", "datatype": "FP32", "shape": [2, 1], "data": [1, 2.5]},
        {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["ü"]},
    ]
    reply = decode(Answer({}, json.dumps({"model_name": "m", "outputs": outputs}).encode()))
    assert reply.outputs[0].array.tolist() == [[1], [2.5]]
    assert reply.outputs[1].array.tolist() == ["ü".encode()]


@PROPERTY
@given(st.binary() | st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["FP32", "BYTES"]),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["outputs", "name", "datatype", "shape", "data", "model_name"]), inner
    ),
).map(lambda document: json.dumps(document).encode()))  # fmt: skip
def test_nonsense(body: bytes) -> None:
    with suppress(BadAnswer):
        decode(Answer({}, body))


@pytest.mark.parametrize("size", ["x", "-1", "99999"])
def test_a_size_that_cannot_be(size: str) -> None:
    with pytest.raises(BadAnswer):
        decode(Answer({JSON_SIZE: size}, b"{}"))


@pytest.mark.parametrize(("data", "datatype", "expected"), [
    ([[1, 2], [3, 4]], "FP32", [[1, 2], [3, 4]]), (3, "INT64", 3), ([2.0, -1e0], "INT8", [2, -1]),
    ([True, 0, 1.0], "BOOL", [True, False, True]), (["a", "ü"], "BYTES", [b"a", "ü".encode()]),
    ("a", "BYTES", b"a"), ([], "INT32", []), ([1e300], "FP32", [float("inf")]),
    (2**63, "UINT64", 2**63),
])  # fmt: skip
def test_values(data: object, datatype: str, expected: object) -> None:
    array = elements(data, BY_NAME[datatype])
    assert array.dtype == NUMPY[BY_NAME[datatype]]
    assert array.tolist() == expected


@pytest.mark.parametrize(("data", "datatype", "text"), [
    ([[1], [2, 3]], "FP32", "differ in length"),
    ([1.5], "INT64", "expected whole numbers for INT64"),
    ([300], "UINT8", "expected numbers from 0 to 255 for UINT8"),
    ([-1], "UINT64", "expected numbers from 0 to 18446744073709551615"),
    (["1"], "FP32", "expected numbers for FP32"), ([None], "FP32", "expected numbers for FP32"),
    ([2], "BOOL", "expected true, false, 1 or 0"),
    ([1], "BYTES", "expected texts for BYTES, got 1"),
    ([None], "BYTES", "expected texts for BYTES, got null"),
    ([float("nan")], "INT32", "expected whole numbers"),
])  # fmt: skip
def test_values_that_do_not_fit(data: object, datatype: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        elements(data, BY_NAME[datatype])


@PROPERTY
@given(arrays.arrays(np.float64, 3), st.sampled_from(FIXED))
def test_casting_raises_nothing_else(array: Array, datatype: Datatype) -> None:
    with suppress(ValueError):
        assert cast(array, datatype).dtype == NUMPY[datatype]
