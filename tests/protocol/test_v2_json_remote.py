"""HTTP requests to upstreams as this server decodes them, and answers as it encodes them."""

import contextlib
from itertools import product

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor
from headrace.protocol.elements import array_of_json
from headrace.protocol.v2_json import (
    ResponseForm,
    decode_infer,
    error_text,
    read_answer,
    write_request,
)
from headrace.protocol.v2_protobuf import RemoteInput
from tests.protocol.strategies import IN_JSON, response
from tests.support.remote import values


def rows(datatype: Datatype, count: int, text: bool = False) -> RemoteInput:
    """Inputs of `count` requests with two rows each."""
    part = values(datatype, (2, 3))
    if text and datatype is Datatype.BYTES:
        part = np.full((2, 3), "ä".encode(), object)
    return RemoteInput("A", datatype, (2 * count, 3), [part] * count)


def sized(size: int | None) -> dict[bytes, bytes]:
    """The headers of a body with so many bytes of JSON."""
    return {} if size is None else {b"inference-header-content-length": b"%d" % size}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", Datatype)
def test_the_server_reads_the_requests(datatype: Datatype, binary: bool) -> None:
    for item in [rows(datatype, count, not binary) for count in (1, 3)]:
        body, size = write_request(
            [item], ["X", "Y"], {"a": 1}, "id", binary=binary, only_binary={"Y"}
        )
        request, form = decode_infer("m", "", b"".join(body), size)
        found = request.inputs["A"]
        assert (found.datatype, found.array.shape) == (datatype, item.shape)
        assert found.array.tolist() == np.concatenate(item.parts).tolist()
        assert (request.id, request.parameters) == ("id", {"a": 1})
        assert form.named == {"X": binary, "Y": True}


def test_requests_without_inputs_and_with_several() -> None:
    one = RemoteInput("B", Datatype.INT8, (1,), [np.ones(1, np.int8)])
    for inputs in ([], [one, rows(Datatype.BYTES, 2)]):
        body, size = write_request(inputs, [], {})
        request, _ = decode_infer("m", "", b"".join(body), size)
        assert list(request.inputs) == [item.name for item in inputs]


def test_bytes_that_are_not_utf8_have_no_json_form() -> None:
    with pytest.raises(InvalidRequest, match="'A' holds bytes that are not UTF-8"):
        write_request([rows(Datatype.BYTES, 1)], [], {}, binary=False)


@pytest.mark.parametrize(
    ("datatype", "binary"), [*product(Datatype, [True]), *product(IN_JSON, [False])]
)
def test_the_servers_answers_are_read(datatype: Datatype, binary: bool) -> None:
    (part,) = rows(datatype, 1, not binary).parts
    given = response(Tensor("A", datatype, part), parameters={"p": "q"})
    body, size = ResponseForm(binary).encode(given)
    answer = read_answer(sized(size), b"".join(body))
    (found,) = answer.outputs
    assert (found.name, found.datatype, found.array.dtype) == ("A", datatype, part.dtype)
    assert found.array.tolist() == part.tolist()
    assert (answer.model_name, answer.model_version) == ("m", "1")
    assert answer.parameters == {"p": "q"}


def test_null_is_not_a_number() -> None:
    found = array_of_json("A", Datatype.FP32, [2, 1], [[None], [1]])
    np.testing.assert_array_equal(found, np.array([[np.nan], [1]], np.float32))
    assert array_of_json("A", Datatype.FP16, [1], [0.5]).dtype == np.float16
    with pytest.raises(InvalidRequest):
        array_of_json("A", Datatype.INT32, [1], [None])


@pytest.mark.parametrize(("document", "text"), [
    ([], "not an inference response"), ({"outputs": {}}, "expected an array, got an object"),
    ({"outputs": [{}]}, "the answer has no member 'name'"),
    ({"outputs": [{"name": "A", "datatype": "FP8", "shape": []}]}, "the unknown datatype 'FP8'"),
    ({"outputs": [{"name": "A", "datatype": ["FP32"], "shape": []}]}, "expected a string"),
    ({"outputs": [{"name": "A", "datatype": "FP32"}]}, "no member 'shape'"),
    ({"outputs": [{"name": "A", "datatype": "FP32", "shape": [1]}]}, "no member 'data'"),
    ({"outputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": [1, 2]}]},
     "needs 1 elements"),
    ({"outputs": [{"name": "A", "datatype": "FP32", "shape": [1],
     "parameters": {"binary_data_size": 4}}]}, "expecting 4 additional bytes"),
])  # fmt: skip
def test_invalid_answers(document: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_answer({}, orjson.dumps(document))


@given(st.binary(), st.none() | st.integers(0, 100))
def test_any_body_is_an_answer_or_refused(body: bytes, size: int | None) -> None:
    with contextlib.suppress(InvalidRequest):
        read_answer(sized(size), body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), inner
        )
    ),
)


@given(JSON, JSON, JSON)
def test_any_document_is_an_answer_or_refused(first: object, second: object, third: object) -> None:
    tensor = {"name": "A", "datatype": "FP32", "shape": first, "data": second}
    for outputs in (first, [first, second], [tensor], [{**tensor, "parameters": third}]):
        body = orjson.dumps({"outputs": outputs, "inputs": outputs, "parameters": third})
        for read in (lambda b: read_answer({}, b), error_text):
            with contextlib.suppress(InvalidRequest):
                read(body)


@pytest.mark.parametrize(("body", "text"), [
    (b'{"error": "why"}', "why"),
    (b'{"code": 404, "type": "ModelNotFoundException", "message": "why"}', "why"),
    (b'{"message": "why"}', ""), (b'{"error": 1}', ""), (b"[]", ""), (b"<html>", ""), (b"", ""),
])  # fmt: skip
def test_errors(body: bytes, text: str) -> None:
    assert error_text(body) == text
