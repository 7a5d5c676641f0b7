"""Conversion of Python values to a model's declared datatypes and shapes."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.client import AnswerError, InputError
from headrace.client.values import (
    Declared,
    ModelSignature,
    cast,
    elements,
    fit,
    read_value,
    tensor_of,
)
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.tensors import Array
from tests.protocol.strategies import PROPERTY

_OTHERS = (Datatype.BYTES, Datatype.BF16)
_METADATA = {
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": ["-1", 2]},
        {"name": "b", "datatype": "BYTES", "shape": [-1, 1]},
    ],
    "outputs": [{"name": "c", "datatype": "INT8", "shape": [-1]}],
}


def test_documents() -> None:
    config = {
        "max_batch_size": 4,
        "input": [{"name": "a"}, {"name": "b", "optional": True}],
        "model_transaction_policy": {"decoupled": True},
    }
    found = ModelSignature.of(_METADATA, config)
    assert found.inputs["a"] == Declared("a", Datatype.FP32, (-1, 2), True)
    assert found.inputs["b"].optional
    assert found.decoupled
    assert str(found.outputs["c"]) == "c INT8 [-1]"
    assert not ModelSignature.of(_METADATA, {"max_batch_size": 0}).inputs["a"].rows
    assert ModelSignature.of(_METADATA, {}).inputs["a"].rows  # by its elements


def test_invalid_documents() -> None:
    with pytest.raises(AnswerError):
        ModelSignature.of({"inputs": [{"name": "a"}], "outputs": []}, {})


@pytest.mark.parametrize(("shape", "declared", "rows", "expected"), [
    ((3, 2), (-1, 2), True, (3, 2)),  # unchanged
    ((2,), (-1, 2), True, (1, 2)),  # one row
    ((), (-1, 1), True, (1, 1)), ((), (1,), False, (1,)), ((), (-1, -1), True, (1, 1)),
    ((5,), (-1, -1), True, (1, 5)),
    ((6,), (-1, 2), True, (3, 2)),  # flat
    ((64,), (-1, 8, 8), True, (1, 8, 8)), ((128,), (-1, 8, 8), True, (2, 8, 8)),
    ((3, 64), (-1, 8, 8), True, (3, 8, 8)),  # a table
    ((3, 1), (-1,), True, (3,)), ((0,), (-1, 2), True, (0, 2)), ((4,), (2, 2), False, (2, 2)),
    ((2, 3), (2, 3), False, (2, 3)),
])  # fmt: skip
def test_fitting(
    shape: tuple[int, ...], declared: tuple[int, ...], rows: bool, expected: tuple[int, ...]
) -> None:
    wanted = Declared("x", Datatype.FP32, declared, rows)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = fit(array, wanted)
    assert found.shape == expected
    assert found.ravel().tolist() == array.ravel().tolist()


@pytest.mark.parametrize(("shape", "declared", "rows"), [
    ((3,), (-1, 2), True), ((2, 3), (-1, 2), True), ((2, 2), (4,), False),
    ((1, 2, 2), (2, 2), False), ((5,), (-1, 0), True),
])  # fmt: skip
def test_values_of_other_shapes(
    shape: tuple[int, ...], declared: tuple[int, ...], rows: bool
) -> None:
    with pytest.raises(ValueError, match=r"^expected shape \[.*\].*, got \["):
        fit(np.zeros(shape), Declared("x", Datatype.FP32, declared, rows))


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
    ([2.0**63], "INT64", "expected numbers from -9223372036854775808 to 9223372036854775807"),
    ([2.0**64], "UINT64", "to 18446744073709551615 for UINT64"),
    ([2], "BOOL", "expected true, false, 1 or 0"),
    ([1], "BYTES", "expected texts for BYTES, got 1"),
    ([None], "BYTES", "expected texts for BYTES, got null"),
    ([float("nan")], "INT32", "expected whole numbers"),
])  # fmt: skip
def test_values_that_do_not_fit(data: object, datatype: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        elements(data, BY_NAME[datatype])


@PROPERTY
@given(
    arrays.arrays(np.float64, 3),
    st.sampled_from([datatype for datatype in Datatype if datatype not in _OTHERS]),
)
def test_casting_raises_nothing_else(array: Array, datatype: Datatype) -> None:
    with suppress(ValueError):
        assert cast(array, datatype).dtype == NUMPY[datatype]


SIGNATURE = ModelSignature.of(
    _METADATA, {"max_batch_size": 4, "input": [{"name": "b", "optional": True}]}
)


@pytest.mark.parametrize(("given", "shapes"), [
    ({"a": [1, 2], "b": "x"}, [(1, 2), (1, 1)]), ({"a": np.zeros((3, 2)), "b": None}, [(3, 2)]),
    ({"a": ((1, 2), (3, 4)), "b": ["x", b"\xff"]}, [(2, 2), (2, 1)]),
    ({"a": [1, 2], "b": np.array(["x"])}, [(1, 2), (1, 1)]),
])  # fmt: skip
def test_inputs_by_their_signature(given: dict[str, object], shapes: list[tuple[int, ...]]) -> None:
    tensors = SIGNATURE.tensors("m", given)
    assert [tensor.array.shape for tensor in tensors] == shapes
    assert [tensor.datatype for tensor in tensors] == [Datatype.FP32, Datatype.BYTES][: len(shapes)]


@pytest.mark.parametrize(("given", "text"), [
    ({"b": "x"}, r"^model 'm' needs the input a FP32 \[-1,2\]$"),
    ({"a": [1, 2], "c": 1}, "^model 'm' has no input 'c', only a, b$"),
    (
        {"a": np.zeros((3, 3))},
        r"^input 'a' of model 'm': expected FP32 \[-1,2\], got float64 \[3,3\]: expected shape",
    ),
    ({"a": "x"}, r"expected FP32 \[-1,2\], got str: expected numbers for FP32$"),
    ({"a": [1, 2], "b": 3}, "got int: expected texts for BYTES, got 3$"),
])  # fmt: skip
def test_inputs_that_do_not_fit(given: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        SIGNATURE.tensors("m", given)


@pytest.mark.parametrize(("value", "datatype", "shape"), [
    (np.ones((2, 3), np.float16), "FP16", (2, 3)), (np.ones(2, ">i4"), "INT32", (2,)),
    ([1, 2], "INT64", (2,)), (1.5, "FP64", ()), (True, "BOOL", ()), (["a", "b"], "BYTES", (2,)),
    (b"ends with\0", "BYTES", ()), (np.array([["a"]], object), "BYTES", (1, 1)),
])  # fmt: skip
def test_values_of_their_own_datatype(value: object, datatype: str, shape: tuple[int, ...]) -> None:
    tensor = tensor_of("x", value)
    assert (tensor.datatype, tensor.array.shape) == (datatype, shape)
    if isinstance(value, bytes):
        assert tensor.array.tolist() == value


BEYOND = 2**63 + 1


@pytest.mark.parametrize("value", [
    [BEYOND, 1], [[BEYOND], [1]], [np.uint64(BEYOND), 1], [np.array([BEYOND], np.uint64), [1]],
])  # fmt: skip
def test_integers_beyond_int64_are_exact(value: list[object]) -> None:
    """Numpy makes floats of them beside smaller ones."""
    expected = np.ravel([np.uint64(BEYOND), np.uint64(1)]).tolist()
    assert np.ravel(elements(value, Datatype.UINT64)).tolist() == expected
    tensor = tensor_of("x", value)
    assert (tensor.datatype, np.ravel(np.asarray(tensor.array)).tolist()) == ("UINT64", expected)
    gaps, _ = read_value([*value, None], Declared("x", Datatype.UINT64, (-1,)), nullable=True)
    assert np.ravel(gaps).tolist() == [*expected, 0]
    with pytest.raises(ValueError, match="expected numbers from"):
        elements([BEYOND, -1], Datatype.UINT64)
    assert elements([BEYOND, 0.5], Datatype.FP64).tolist() == [float(BEYOND), 0.5]


def test_bfloat16_as_other_floats() -> None:
    given = np.array([1.5, np.nan], NUMPY[Datatype.BF16])
    for datatype in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        np.testing.assert_array_equal(cast(given, datatype), [1.5, np.nan])
    with pytest.raises(ValueError, match="expected whole numbers for INT32"):
        cast(given, Datatype.INT32)


@pytest.mark.parametrize(("value", "text"), [
    (1j, "no datatype of the protocol is numpy's complex128"),
    (np.array([1], "m8[s]"), "timedelta64"), ([None], "expected texts for BYTES"),
    ([[1], [2, 3]], "input 'x': the arrays in it differ in length"),
])  # fmt: skip
def test_values_of_no_datatype(value: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        tensor_of("x", value)
