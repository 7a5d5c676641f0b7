"""Flat JSON to requests and back, by the rules of the generate extension."""

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import MAX_TENSORS, Call
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Tensor
from headrace.protocol.generate import decode_generate, encode_generate, event
from tests.protocol.strategies import (
    IN_JSON,
    PROPERTY,
    any_text,
    mutations,
    object_array,
    refused,
    response,
    tensors,
)

_INPUTS = (
    TensorSpec("text_input", Datatype.BYTES, (1,)),
    TensorSpec("max_tokens", Datatype.INT32, (1,), optional=True),
    TensorSpec("stop", Datatype.BYTES, (-1,), optional=True),
    TensorSpec("sampled", Datatype.BOOL, (1,), optional=True),
)
TEXT = Signature("llm", 8, _INPUTS, (TensorSpec("text_output", Datatype.BYTES, (-1,)),))


def decode(document: object, signature: Signature = TEXT) -> Call:
    """Decode a document into a request."""
    return decode_generate(signature, "llm", "3", orjson.dumps(document))


def shaped(dims: tuple[int, ...], batch: int = 0, datatype: Datatype = Datatype.FP32) -> Signature:
    """A model with the input `x`."""
    return Signature("m", batch, (TensorSpec("x", datatype, dims),), ())


def test_a_request_of_a_text_generation_client() -> None:
    request = decode(
        {"text_input": "hi \u00e4", "max_tokens": 5, "stop": ["a", "b"], "sampled": True,
         "temperature": 0.5, "stream": True, "n": 3, "name": "x"}
    )  # fmt: skip
    assert (request.model_name, request.model_version, request.id) == ("llm", "3", "")
    found = {n: (t.datatype, t.array.tolist()) for n, t in request.inputs.items()}
    assert found == {
        "text_input": (Datatype.BYTES, [["hi \u00e4".encode()]]),
        "max_tokens": (Datatype.INT32, [[5]]),
        "stop": (Datatype.BYTES, [[b"a", b"b"]]),
        "sampled": (Datatype.BOOL, [[True]]),
    }
    assert request.parameters == {"temperature": 0.5, "stream": True, "n": 3, "name": "x"}
    assert request.outputs == ()
    assert TEXT.check(request) == 1


def test_long_texts_are_charged_and_limited() -> None:
    text, charged = "a" * (3 << 20), list[int]()
    call = decode_generate(TEXT, "m", "", orjson.dumps({"text_input": text}), charged.append)
    assert call.inputs["text_input"].array.tolist() == [[text.encode()]]
    assert len(text) < charged[0] < len(text) + 1000
    longer = b'{"text_input":"%b"}' % (b"a" * (33 << 20))
    with pytest.raises(InvalidRequest, match="bytes beside long arrays, at most 33554432"):
        decode_generate(TEXT, "m", "", longer)


def test_reserved_members() -> None:
    request = decode({"id": "seven", "text_input": "x"})
    assert (request.id, request.parameters) == ("seven", {"id": "seven"})
    nested = {"max_tokens": 2, "top_k": 4, "id": "p"}
    request = decode({"text_input": "x", "parameters": nested})
    assert request.inputs["max_tokens"].array.tolist() == [[2]]
    assert (request.id, request.parameters) == ("", {"top_k": 4, "id": "p"})
    request = decode({"text_input": "x", "id": None, "parameters": None})
    assert (request.id, request.parameters) == ("", {})
    request = decode({"text_input": "x", "priority": 2, "parameters": {"timeout": 5_000}})
    assert (request.options.priority, request.options.timeout, request.parameters) == (2, 5_000, {})
    signature = Signature("m", 0, (TensorSpec("id", Datatype.INT64, (1,)),), ())
    request = decode({"id": 5}, signature)  # an input may have that name
    assert (request.id, request.inputs["id"].array.tolist()) == ("", [5])
    body = orjson.dumps({"text_input": "x"})
    assert decode_generate(TEXT, "llm", "", memoryview(body)).nbytes == len(body)


BOX = Signature(
    "box",
    0,
    (
        TensorSpec("width", Datatype.FP64, (1,)),
        TensorSpec("height", Datatype.FP64, (1,), optional=True),
    ),
    (),
    parameters=frozenset({"user"}),
)


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ({"hieght": 3}, "unknown member 'hieght' for model 'box', which has the inputs"
         " ['width','height']; did you mean 'height'?"),
        ({"HEIGHT": 3}, "unknown member 'HEIGHT' for model 'box', which has the inputs"
         " ['width','height']; did you mean 'height'?"),
        ({"hieght": [[3]]}, "unknown member 'hieght'"),
        ({"colour": 3}, "unknown member 'colour' for model 'box', which has the inputs"
         " ['width','height']"),
        ({"usr": 3}, "which has the inputs ['width','height']; did you mean 'user'?"),
        ({"parameters": {"hieght": 3}}, "keyword: 'parameters': unknown member 'hieght'"),
        ({"x" * 100_000: 1}, "unknown member 'xxx"),
    ],
)  # fmt: skip
def test_members_unknown_to_the_model_are_refused(member: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode({"width": 2, **member}, BOX)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("columns", [10, 1000])
def test_names_of_a_wide_table_are_not_compared_with_an_unknown_one(columns: int) -> None:
    """Each comparison takes long, on the event loop: up to a few dozen are made."""
    inputs = [TensorSpec(f"column {number}", Datatype.FP64, (1,)) for number in range(columns)]
    wide = Signature("wide", 0, tuple(inputs), (), parameters=frozenset())
    with pytest.raises(InvalidRequest, match="unknown member 'colum 7' for") as caught:
        decode({"colum 7": 1}, wide)
    assert ("did you mean 'column 7'?" in str(caught.value)) is (columns == 10)


def test_server_members_and_model_inputs() -> None:
    document = {"id": "seven", "priority": 1, "headrace_timing": True, "user": "ada"}
    request = decode({"width": 2, **document}, BOX)
    assert (request.id, request.options.priority) == ("seven", 1)
    assert request.parameters == {"headrace_timing": True, "user": "ada"}


@pytest.mark.parametrize(("dims", "batch", "value", "shape"), [
    ((1,), 8, 1, (1, 1)), ((1,), 8, [1], (1, 1)), ((1,), 8, [1, 2, 3], (3, 1)),  # rows
    ((-1,), 8, [1, 2, 3], (1, 3)),  # the innermost open size
    ((-1, -1), 8, [1, 2, 3], (1, 1, 3)), ((2, -1), 8, [1, 2, 3, 4], (1, 2, 2)),
    ((-1, 2), 8, [1, 2, 3, 4], (1, 2, 2)), ((2, 2), 8, [1, 2, 3, 4, 5, 6, 7, 8], (2, 2, 2)),
    ((-1,), 8, [], (1, 0)), ((4,), 0, [1, 2, 3, 4], (4,)), ((2, 2), 0, [1, 2, 3, 4], (2, 2)),
    ((-1,), 0, 7, (1,)), ((), 0, 7, ()), ((), 8, [7, 8], (2,)),
    ((-1,), 8, [[1], [2]], (1, 2)),  # nesting is ignored, as in infer requests
])  # fmt: skip
def test_shapes(dims: tuple[int, ...], batch: int, value: object, shape: tuple[int, ...]) -> None:
    request = decode({"x": value}, shaped(dims, batch))
    assert request.inputs["x"].array.shape == shape


def test_nested_arrays_of_no_valid_shape() -> None:
    text = (
        "^The schema can not .*: 1 elements do not fit .*; a value is one element or a flat array"
    )
    with pytest.raises(InvalidRequest, match=text):
        decode({"x": [[1, 2, 3]]}, shaped((3,)))


def test_a_missing_value_of_a_column() -> None:
    age = TensorSpec("age", Datatype.FP64, (-1,))
    missing = TensorSpec("age.null", Datatype.BOOL, (-1,), optional=True)
    table = Signature("m", 0, (age, missing), ())
    text = "data holds null; which values are missing is said by true in 'age.null', with any value"
    with pytest.raises(InvalidRequest, match=text):
        decode({"age": [1.5, None]}, table)
    request = decode({"age": [1.5, 0], "age.null": [False, True]}, table)
    assert table.check(request) == 1


@pytest.mark.parametrize(("dims", "batch", "value"), [
    ((3,), 8, [1, 2]), ((3,), 8, 1), ((4,), 0, [1, 2]), ((), 0, [1, 2]), ((), 0, []), ((2,), 0, []),
    ((2, -1), 8, [1, 2, 3]),
])  # fmt: skip
def test_values_that_fit_no_shape(dims: tuple[int, ...], batch: int, value: object) -> None:
    text = "^The schema can not convert input 'x' to tensor with proper shape"
    with pytest.raises(InvalidRequest, match=text):
        decode({"x": value}, shaped(dims, batch))


@pytest.mark.parametrize(("document", "text"), [
    ([], "the request must be a JSON object, got an array"),
    ("text", "the request must be a JSON object, got a string"),
    ({"id": 5}, "Unable to parse 'id': expected a string, got an integer"),
    ({"text_input": 5}, "input 'text_input' of datatype BYTES takes strings"),
    ({"text_input": None}, r"its data holds null \(attempt to access JSON non-string as string\)$"),
    ({"max_tokens": None}, "its data holds null; it is optional, and can be left out"),
    ({"stop": [["a", "b"], ["c"]]}, "^input 'stop': a value is one element or a flat array"),
    ({"text_input": [["a"], "b"]}, "^input 'text_input': a value is one element or a flat"),
    ({"text_input": {"a": 1}}, "its data holds an object"),
    ({"max_tokens": 1.5}, "INT32 takes integers, but its data holds a number with a fraction"),
    ({"max_tokens": "1"}, "its data holds a string"),
    ({"max_tokens": 2**40}, "out of the range of INT32"),
    ({"sampled": 1}, "BOOL takes true or false"),
    ({"text_input": list("abcdefghi")}, "batch-size must be <= 8"),
    ({"a": [1]}, "^parameter 'a' has invalid type. It should be either"),
    ({"a": {}}, "^parameter 'a' has invalid type"),
    ({"a": None}, "^parameter 'a' has invalid type"),
    ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
    ({"timeout": "1"}, "invalid value type for 'timeout' parameter"),
    ({"parameters": 5}, "^Expected JSON object for keyword: 'parameters'"),
    ({"parameters": [1]}, "^Expected JSON object for keyword: 'parameters'"),
    ({"parameters": ""}, "^Expected JSON object for keyword: 'parameters'"),
    ({"parameters": {"a": {"b": 1}}},
     "^Converting keyword: 'parameters': parameter 'a' has invalid type. It should be"),
    ({"parameters": {"parameters": {}}},
     "^Converting keyword: 'parameters': parameter 'parameters' has invalid type"),
    ({"parameters": {"text_input": 5}},
     "^Converting keyword: 'parameters': input 'text_input' of datatype BYTES"),
    ({"text_input": "x", "parameters": {"text_input": "y"}},
     "input 'text_input' already exists in request"),
    (dict.fromkeys(map(str, range(MAX_TENSORS + 1)), 1), "may have 4096 members, got 4097"),
])  # fmt: skip
def test_refused_documents(document: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        decode(document)


@pytest.mark.parametrize(("document", "text"), [
    ({"max_tokens": "1", "a": []}, "input 'max_tokens'"),
    ({"a": [], "max_tokens": "1"}, "parameter 'a'"),
    ({"parameters": {"a": []}, "max_tokens": "1"}, "Converting keyword"),
    ({"max_tokens": "1", "parameters": {"a": []}}, "^input 'max_tokens'"),
    ({"max_tokens": "1", "id": 5}, "^input 'max_tokens'"),
])  # fmt: skip
def test_the_first_wrong_member_is_reported(document: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        decode(document)


def test_half_precision_has_no_json() -> None:
    for datatype in (Datatype.FP16, Datatype.BF16):
        with refused(f"receiving {datatype} data via JSON"):
            decode({"x": 1}, shaped((1,), 8, datatype))
        with refused(f"sending {datatype} data via JSON"):
            encode_generate(response(Tensor("y", datatype, np.zeros(1, NUMPY[datatype]))))


def test_nan_and_infinity_in_json() -> None:
    request = decode_generate(shaped((-1,), 8), "m", "", b'{"x":[NaN,Infinity,-Infinity]}')
    assert str(request.inputs["x"].array.tolist()) == "[[nan, inf, -inf]]"


members = st.dictionaries(
    st.sampled_from(["text_input", "max_tokens", "stop", "sampled", "id", "parameters", "a", "b"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=5,
)


@PROPERTY
@given(members)
def test_any_document_is_a_request_or_is_refused(document: dict[str, Any]) -> None:
    try:
        body = orjson.dumps(document)
    except TypeError:  # integers and texts that are not JSON
        return
    expect_a_request_or_refusal(body)


@PROPERTY
@given(
    st.binary(max_size=60)
    | mutations(b'{"id":"x","text_input":["a"],"max_tokens":1,"parameters":{"a":1.5}}')
)
def test_any_body_is_a_request_or_is_refused(body: bytes) -> None:
    expect_a_request_or_refusal(body)


def expect_a_request_or_refusal(body: bytes) -> None:
    """Assert that decoding gives a valid request or raises `InvalidRequest`."""
    try:
        request = decode_generate(TEXT, "llm", "", body)
    except InvalidRequest:
        return
    assert all(type(value) in (str, int, float, bool) for value in request.parameters.values())
    assert set(request.inputs) <= {"text_input", "max_tokens", "stop", "sampled"}


# --- responses


def strings(name: str, *values: bytes) -> Tensor:
    """A BYTES tensor."""
    return Tensor(name, Datatype.BYTES, object_array(values, [1, len(values)]))


def test_the_exact_text_of_a_response() -> None:
    outputs = [
        strings("text_output", "ja, \u00e4\n".encode()),
        Tensor("Z", Datatype.INT64, np.array([[1, 2]])),
        Tensor("none", Datatype.FP32, np.zeros((1, 0), np.float32)),
        Tensor("score", Datatype.FP32, np.array([[0.1]], np.float32)),
        Tensor("sure", Datatype.BOOL, np.array(True)),
    ]
    parameters = {"stop": "eos", "n": 3, "a": True, "b": 0.5}
    assert encode_generate(response(*outputs, id="7", parameters=parameters)).decode() == (
        '{"Z":[1,2],"a":true,"b":0.5,"id":"7","model_name":"m","model_version":"1","n":3,'
        '"none":[],"score":0.1,"stop":"eos","sure":true,"text_output":"ja, \u00e4\\n"}'
    )
    assert encode_generate(response()) == b'{"model_name":"m","model_version":"1"}'
    with refused("'x' holds bytes that are not UTF-8"):
        encode_generate(response(strings("x", b"\xff")))


@pytest.mark.parametrize(("shape", "nested"), [
    ((2, 2), [[0, 1], [2, 3]]), ((1, 2, 2), [[0, 1], [2, 3]]), ((2, 1, 2), [[0, 1], [2, 3]]),
    ((2, 2, 1), [[0, 1], [2, 3]]), ((4, 1), [0, 1, 2, 3]), ((1, 4), [0, 1, 2, 3]),
    ((1, 1), 0), ((2, 0), []), ((0, 2), []),
    ((2, 3, 2), [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]),
])  # fmt: skip
def test_the_shape_of_an_output_is_kept(shape: tuple[int, ...], nested: Any) -> None:
    """Dimensions of one element, as of a single row, are left out."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    as_numbers = response(Tensor("x", Datatype.INT64, numbers))
    assert orjson.loads(encode_generate(as_numbers))["x"] == nested
    texts = object_array([b"%d" % n for n in numbers.ravel()], list(shape))
    as_texts = orjson.loads(encode_generate(response(Tensor("x", Datatype.BYTES, texts))))["x"]
    assert as_texts == orjson.loads(re.sub(rb"\d+", rb'"\g<0>"', orjson.dumps(nested)))


@pytest.mark.parametrize("shape", [(3, 50_000), (50_000, 3), (2, 3, 40_000), (1, 90_001, 2)])
def test_a_large_output_is_written_in_pieces_of_its_shape(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    array[0, 1] = np.nan
    text = encode_generate(response(Tensor("x", Datatype.FP32, array)))
    assert np.array_equal(json.loads(text)["x"], array.squeeze(), equal_nan=True)


def test_an_output_replaces_a_member_of_its_name() -> None:
    hiding = response(strings("id", b"x"), strings("a", b"y"), id="7", parameters={"a": 1})
    found = orjson.loads(encode_generate(hiding))
    assert found == {"a": "y", "id": "x", "model_name": "m", "model_version": "1"}


@PROPERTY
@given(tensors(IN_JSON, utf8=True))
def test_any_tensor_is_written_on_one_line(tensor: Tensor) -> None:
    text = encode_generate(response(tensor))
    assert b"\n" not in text
    if b"NaN" in text or b"Infinity" in text:
        return
    value = orjson.loads(text)["x"]
    assert (type(value) is list) == (tensor.array.size != 1)
    if type(value) is list:
        assert np.shape(value) == tuple(n for n in tensor.array.shape if n != 1) or not value


def test_a_server_sent_event() -> None:
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
