"""Flat and nested JSON arrays to tensors and back, per datatype."""

import contextlib
import json
from math import prod
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor
from headrace.protocol.elements import (
    MAX_DEPTH,
    array_of_nested,
    json_elements,
    json_name,
    nested_json,
    tensor_from_json,
)
from headrace.protocol.json_text import parse_json
from tests.protocol.strategies import (
    IN_JSON,
    PROPERTY,
    assert_same,
    object_array,
    outcome,
    refused,
    tensors,
)
from tests.support.remote import values

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("datatype", "data", "values"), [
    ("BOOL", [True, False], [True, False]), ("UINT8", [0, 255], [0, 255]),
    ("UINT16", [65535], [65535]), ("UINT32", [2**32 - 1], [2**32 - 1]),
    ("UINT64", [2**64 - 1], [2**64 - 1]), ("INT8", [-128, 127], [-128, 127]),
    ("INT16", [-32768], [-32768]), ("INT32", [-(2**31)], [-(2**31)]),
    ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
    ("FP32", [1, 0.5, -2], [1.0, 0.5, -2.0]), ("FP32", [INF, -INF], [INF, -INF]),
    ("FP32", [1e-300], [0.0]), ("FP64", [0.1, 2**63], [0.1, 2.0**63]),
    ("BYTES", ["a", "", "é", "\0"], [b"a", b"", "é".encode(), b"\0"]),
])  # fmt: skip
def test_elements(datatype: str, data: list[Any], values: list[Any]) -> None:
    tensor = tensor_from_json("x", Datatype(datatype), [len(data)], data)
    assert tensor.array.dtype == NUMPY[Datatype(datatype)]
    assert tensor.array.tolist() == values


@pytest.mark.parametrize(("datatype", "element", "parts"), [
    ("BOOL", 1, ["takes true or false", "an integer", "non-boolean as boolean"]),
    ("BOOL", "true", ["takes true or false", "a string"]),
    ("UINT8", True, ["takes integers", "a boolean"]),
    ("INT32", 1.0, ["takes integers", "a number with a fraction or exponent"]),
    ("INT32", "1", ["takes integers", "a string"]), ("INT64", NAN, ["takes integers"]),
    ("FP32", "1", ["takes numbers", "a string"]), ("FP32", True, ["takes numbers", "a boolean"]),
    ("FP32", None, ["takes numbers", "null"]), ("FP64", {}, ["takes numbers", "an object"]),
    ("BYTES", 1, ["takes strings", "an integer", "non-string as string"]),
    ("BYTES", None, ["takes strings", "null"]), ("UINT8", -1, ["out of the range of UINT8"]),
    ("UINT8", 256, ["out of the range of UINT8"]), ("UINT64", -1, ["out of the range of UINT64"]),
    ("UINT64", 2**64, ["out of the range of UINT64"]), ("INT8", 128, ["out of the range of INT8"]),
    ("INT64", 2**63, ["out of the range of INT64"]), ("FP32", 1e39, ["out of the range of FP32"]),
    ("FP32", 10**300, ["out of the range of FP32"]),
    ("FP64", 10**400, ["out of the range of FP64"]),
    ("FP16", 1, ["receiving FP16 data via JSON is not supported", "use the binary data format"]),
    ("BF16", 1, ["receiving BF16 data via JSON is not supported", "use the binary data format"]),
])  # fmt: skip
def test_elements_that_do_not_fit(datatype: str, element: Any, parts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tensor_from_json("x", Datatype(datatype), [1], [element])
    for part in ["'x'", *parts]:
        assert part in str(raised.value)


@pytest.mark.parametrize(("shape", "data", "values"), [
    ([], [7], [7]), ([2, 2], [1, 2, 3, 4], [1, 2, 3, 4]), ([2, 2], [[1, 2], [3, 4]], [1, 2, 3, 4]),
    ([4], [[1, 2], [3, 4]], [1, 2, 3, 4]),  # nesting is not compared with the shape
    ([2, 2], [[1], [2, 3, 4]], [1, 2, 3, 4]), ([0], [], []), ([2, 0], [[], []], []),
    ([3, 0, 5], [], []), ([1], json.loads("[" * 99 + "7" + "]" * 99), [7]),
])  # fmt: skip
def test_nesting(shape: list[int], data: list[Any], values: list[int]) -> None:
    tensor = tensor_from_json("x", Datatype.INT32, shape, data)
    assert tensor.array.shape == tuple(shape)
    assert tensor.array.ravel().tolist() == values


@pytest.mark.parametrize(("shape", "data", "text"), [
    ([3], [1, 2], "Failed to parse 'data' field: shape does not match true shape"),
    ([], [], "Failed to parse 'data' field: shape does not match true shape"),
    ([2**50], [1], "Failed to parse 'data' field: shape does not match true shape"),
    ([1], [1, 2], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ([0], [1], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ([2**62, 4], [1], "causes total element count to exceed maximum size of"),
    ([-1], [1], "not negative"), ([2], [1, [2]], "elements and arrays are mixed at depth 1"),
    ([2], [[1, [2]]], "elements and arrays are mixed at depth 2"),
])  # fmt: skip
def test_data_of_a_wrong_length(shape: list[int], data: list[Any], text: str) -> None:
    with refused(text):
        tensor_from_json("x", Datatype.INT32, shape, data)


def test_nesting_too_deep() -> None:
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 50_000):
        data: list[Any] = []
        for _ in range(depth - 1):
            data = [data]
        with refused("JSON nesting depth exceeds maximum allowed limit (100)"):
            tensor_from_json("x", Datatype.INT32, [0], data)


@pytest.mark.parametrize(("datatype", "values", "text"), [
    ("BOOL", [True, False], "[true,false]"), ("INT8", [-128, 0], "[-128,0]"),
    ("UINT64", [2**64 - 1], "[18446744073709551615]"),
    ("FP32", [1.0, 0.1, -0.0], "[1.0,0.1,-0.0]"),  # in the tensor's own precision
    ("FP64", [0.1], "[0.1]"),
    ("FP32", [NAN, 0.1, INF, -INF, 0.1], "[NaN,0.1,Infinity,-Infinity,0.1]"),
    ("FP64", [NAN], "[NaN]"), ("FP32", [], "[]"),
    ("FP32", [[1.0, 2.0], [3.0, 4.0]], "[1.0,2.0,3.0,4.0]"),  # always flat
    ("FP32", 5.0, "[5.0]"),
])  # fmt: skip
def test_json_of_numbers(datatype: str, values: Any, text: str) -> None:
    array = np.array(values, NUMPY[Datatype(datatype)])
    assert json_elements(Tensor("y", Datatype(datatype), array)) == text.encode()


def test_json_of_bytes() -> None:
    array = object_array([b"a", b"", "é\n".encode()], [3, 1])
    assert json_elements(Tensor("y", Datatype.BYTES, array)) == '["a","","é\\n"]'.encode()
    for raw in (b"\xff", b"\xed\xa0\x80"):
        with refused("'y' holds bytes that are not UTF-8"):
            json_elements(Tensor("y", Datatype.BYTES, object_array([raw], [1])))


def test_json_of_a_view_that_is_neither_contiguous_nor_aligned() -> None:
    columns = np.arange(6, dtype="<f8").reshape(2, 3).T
    assert json_elements(Tensor("y", Datatype.FP64, columns)) == b"[0.0,3.0,1.0,4.0,2.0,5.0]"
    odd = np.frombuffer(memoryview(bytes(1) + columns.tobytes())[1:], "<f8")
    assert json_elements(Tensor("y", Datatype.FP64, odd)) == b"[0.0,3.0,1.0,4.0,2.0,5.0]"


def test_half_precision_has_no_json() -> None:
    for datatype in (Datatype.FP16, Datatype.BF16):
        text = f"sending {datatype} data via JSON is not supported. Please use the binary data form"
        with refused(text):
            json_elements(Tensor("y", datatype, np.zeros(1, NUMPY[datatype])))


@PROPERTY
@given(tensors(IN_JSON, utf8=True))
def test_json_round_trip(tensor: Tensor) -> None:
    data = json.loads(json_elements(tensor))
    back = tensor_from_json("x", tensor.datatype, list(tensor.array.shape), data)
    assert_same(back, tensor, bits=False)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
nested: st.SearchStrategy[Any] = st.recursive(
    scalars | st.just({}), lambda inner: st.lists(inner, max_size=3)
)


@PROPERTY
@given(st.sampled_from(Datatype), st.lists(st.integers(-1, 3), max_size=3), st.lists(nested))
def test_any_data_is_a_tensor_or_refused(
    datatype: Datatype, shape: list[int], data: list[Any]
) -> None:
    result = outcome(tensor_from_json, "x", datatype, shape, data)
    assert isinstance(result, Tensor | InvalidRequest)


def test_json_name() -> None:
    names = {"an object": {}, "an array": [], "a string": "", "a boolean": True, "null": None}
    assert [json_name(type(value)) for value in names.values()] == list(names)


# --- nested arrays


SHAPES = [(), (3,), (2, 3), (1, 2, 1), (2, 0)]


@pytest.mark.parametrize("datatype", Datatype)
def test_nested_arrays_both_ways(datatype: Datatype) -> None:
    for shape in SHAPES:
        array = values(datatype, shape)
        found = array_of_nested("A", datatype, parse_json(nested_json(datatype, array)))
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert found.tolist() == array.tolist()


def test_nan_and_infinity_are_bare_words() -> None:
    array = np.array([[np.nan, -np.inf], [0.1, np.inf]], np.float32)
    text = nested_json(Datatype.FP32, array)
    assert text == b"[[NaN,-Infinity],[0.1,Infinity]]"
    found = array_of_nested("A", Datatype.FP32, parse_json(text))
    np.testing.assert_array_equal(found, array)
    assert nested_json(Datatype.FP64, np.array(np.nan)) == b"NaN"


@pytest.mark.parametrize(("datatype", "value"), [
    (Datatype.INT32, [[1], [2, 3]]), (Datatype.INT32, [[1, 2], [3], [4, 5, 6]]),
    (Datatype.INT32, [1, [2]]), (Datatype.INT32, [1.5]), (Datatype.INT32, {"a": 1}),
    (Datatype.UINT8, [256]), (Datatype.FP32, ["1"]), (Datatype.BYTES, [1]),
    (Datatype.BYTES, [{"b64": "?"}]), (Datatype.BYTES, [{"b64": "YQ==", "more": 1}]),
    (Datatype.BOOL, [1]),
])  # fmt: skip
def test_values_that_are_no_tensor(datatype: Datatype, value: object) -> None:
    with pytest.raises(InvalidRequest):
        array_of_nested("A", datatype, value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["b64", "a"]), inner)
    ),
)


@given(JSON, st.sampled_from(list(Datatype)))
def test_any_value_is_a_tensor_or_refused(value: object, datatype: Datatype) -> None:
    with contextlib.suppress(InvalidRequest):
        found = array_of_nested("A", datatype, value)
        assert found.size == prod(found.shape)


def test_arrays_that_are_nested_too_deeply() -> None:
    with pytest.raises(InvalidRequest):
        array_of_nested("A", Datatype.INT32, orjson.loads(b"[" * 200 + b"1" + b"]" * 200))
