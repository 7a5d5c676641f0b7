"""Tensors as nested arrays of JSON."""

import contextlib
from math import prod

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from headrace.protocol.elements import array_of_nested, nested_json
from headrace.protocol.json_text import parse_json
from tests.support.remote import values

SHAPES = [(), (3,), (2, 3), (1, 2, 1), (2, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("datatype", Datatype)
def test_both_ways(datatype: Datatype, shape: tuple[int, ...]) -> None:
    array = values(datatype, shape)
    found = array_of_nested("A", datatype, parse_json(nested_json(datatype, array)))
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert found.tolist() == array.tolist()


def test_what_is_no_number_is_a_bare_word() -> None:
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
def test_what_is_no_tensor(datatype: Datatype, value: object) -> None:
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
