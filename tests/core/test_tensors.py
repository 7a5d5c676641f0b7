"""Tensors of raw bytes, of fixed-size datatypes and BYTES."""

import math
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import MAX_RANK, Tensor, brackets, element_count, raw_bytes
from headrace.ipc.elements import join
from headrace.protocol.elements import charge_objects
from tests.protocol.strategies import (
    PROPERTY,
    assert_same,
    memory_within,
    mutations,
    object_array,
    outcome,
    refused,
    tensors,
)


@pytest.mark.parametrize("datatype", list(ITEM_SIZES))
def test_from_bytes(datatype: Datatype) -> None:
    for shape in ([], [0], [3], [2, 3], [2, 0, 3], [1, 1, 1, 1], [2**59, 0]):
        raw = bytes(math.prod(shape) * ITEM_SIZES[datatype])
        tensor = Tensor.from_bytes("x", datatype, shape, raw)
        assert (tensor.name, tensor.datatype) == ("x", datatype)
        assert tensor.array.dtype == NUMPY[datatype]
        assert tensor.array.shape == tuple(shape)


def test_values_are_row_major_and_little_endian() -> None:
    tensor = Tensor.from_bytes("x", Datatype.INT16, [2, 2], b"\1\0\2\0\3\0\0\1")
    assert tensor.array.tolist() == [[1, 2], [3, 256]]


def test_from_bytes_copies_nothing() -> None:
    body = bytearray(24)
    tensor = Tensor.from_bytes("x", Datatype.INT32, [2], memoryview(body)[5:13])
    body[5] = 7
    assert tensor.array.tolist() == [7, 0]


@pytest.mark.parametrize(("shape", "size", "parts"), [
    ([2, 3], 23, ["input byte size mismatch for input 'x'", "[2,3]", "Expected 24, got 23"]),
    ([2, 3], 25, ["input byte size mismatch for input 'x'", "Expected 24, got 25"]),
    ([], 0, ["Expected 4, got 0"]), ([0], 4, ["Expected 0, got 4"]),
    ([2, -3], 24, ["input 'x'", "not negative", "[2,-3]"]),
    ([-1, -6], 24, ["not negative", "[-1,-6]"]),
    ([2**31, 2**31], 24, ["byte size overflow for input 'x'"]),
    ([2**62, 4], 0, ["total element count to exceed maximum size of"]),
    ([2**32, 2**32], 0, ["total element count to exceed maximum size of"]),
    ([0, 2**60], 0, ["byte size overflow for input 'x'"]),
    ([0, 2**40, 2**40], 0, ["total element count to exceed maximum size of"]),
    ([2**40], 8, ["Expected 4398046511104, got 8"]),
    ([10**4000], 8, ["total element count to exceed maximum size of"]),
    ([1] * (MAX_RANK + 1), 4, ["33 dimensions, at most 32"]),
    ([-1] * 100_000, 4, ["100000 dimensions, at most 32"]),
])  # fmt: skip
def test_shapes_that_do_not_fit(shape: list[int], size: int, parts: list[str]) -> None:
    with (
        memory_within(100_000),
        pytest.raises(InvalidRequest) as raised,
    ):  # nothing of the asked size
        Tensor.from_bytes("x", Datatype.FP32, shape, bytes(size))
    for part in parts:
        assert part in str(raised.value)
    assert len(str(raised.value)) < 10_000


def test_element_count() -> None:
    for shape, count in (
        ([], 1), ([7], 7), ([2, 3, 4], 24), ([5, 0], 0), ([0, 2**59], 0), ([2**59], 2**59),
    ):  # fmt: skip
        assert element_count("x", shape) == count


def test_brackets() -> None:
    assert [brackets(shape) for shape in ((), (4,), [-1, 16])] == ["[]", "[4]", "[-1,16]"]


# --- BYTES


ONE = b"\x03\0\0\0abc"
EMPTY = b"\0\0\0\0"


@pytest.mark.parametrize(("shape", "raw", "elements"), [
    ([], ONE, [b"abc"]), ([1], ONE, [b"abc"]), ([2, 1], ONE + EMPTY, [b"abc", b""]),
    ([1, 3], EMPTY + EMPTY + EMPTY, [b"", b"", b""]), ([0], b"", []), ([3, 0], b"", []),
    ([1], b"\x00\x01\0\0" + bytes(256), [bytes(256)]),
])  # fmt: skip
def test_form(shape: list[int], raw: bytes, elements: list[bytes]) -> None:
    tensor = Tensor.from_bytes("x", Datatype.BYTES, shape, raw)
    assert tensor.datatype is Datatype.BYTES
    assert tensor.array.shape == tuple(shape)
    assert tensor.array.ravel().tolist() == elements
    assert raw_bytes(tensor.array) == raw


@pytest.mark.parametrize(("shape", "raw", "text"), [
    ([1], b"", "expected 1 string elements for inference input 'x', got 0"),
    ([2], ONE + b"\0", "incomplete string length indicator for inference input 'x'"),
    ([2], b"\x04\0\0\0\0\0\0\0", "expected 2 string elements for inference input 'x', got 1"),
    ([1], ONE[:-1], "incomplete string data for inference input 'x'"),
    ([1], b"\xff\xff\xff\xff",
     "expecting string of length 4294967295 but only 0 bytes available: element 0"),
    ([1], ONE + EMPTY,
     "unexpected number of string elements 2 for inference input 'x', expecting 1"),
    ([1], ONE + b"\0", "unexpected number of string elements 2"),
    ([0], EMPTY, "unexpected number of string elements 1 for inference input 'x', expecting 0"),
    ([-1], ONE, "not negative"), ([2**58], ONE, "expected 288230376151711744 string elements"),
    ([2**62, 4], ONE, "total element count to exceed maximum size of"),
    ([0, 2**62], b"", "byte size overflow for input"),
])  # fmt: skip
def test_lengths_that_do_not_fit(shape: list[int], raw: bytes, text: str) -> None:
    with memory_within(100_000), refused(text):
        Tensor.from_bytes("x", Datatype.BYTES, shape, raw)


@PROPERTY
@given(tensors([Datatype.BYTES]), st.sampled_from([bytes, memoryview]))
def test_encoding_round_trip(tensor: Tensor, kind: type[bytes | memoryview]) -> None:
    raw = kind(raw_bytes(tensor.array))
    assert_same(Tensor.from_bytes("x", Datatype.BYTES, list(tensor.array.shape), raw), tensor)


@PROPERTY
@given(tensors([Datatype.BYTES]), st.data())
def test_a_damaged_tensor_is_refused_or_another_one(tensor: Tensor, data: st.DataObject) -> None:
    raw = data.draw(mutations(bytes(raw_bytes(tensor.array))))
    result = outcome(Tensor.from_bytes, "x", Datatype.BYTES, list(tensor.array.shape), raw)
    if isinstance(result, Tensor):
        assert raw_bytes(result.array) == raw
    else:
        assert isinstance(result, InvalidRequest)


@PROPERTY
@given(tensors([Datatype.BYTES]))
def test_a_tensor_cut_anywhere_is_refused(tensor: Tensor) -> None:
    raw = raw_bytes(tensor.array)
    for size in range(len(raw)):
        with pytest.raises(InvalidRequest):
            Tensor.from_bytes("x", Datatype.BYTES, list(tensor.array.shape), raw[:size])


@PROPERTY
@given(st.lists(st.integers(), max_size=4), st.binary())
def test_any_shape_and_bytes_are_decoded_or_refused(shape: list[int], raw: bytes) -> None:
    result = outcome(Tensor.from_bytes, "x", Datatype.BYTES, shape, raw)
    assert isinstance(result, Tensor | InvalidRequest)


def test_a_view_that_is_not_contiguous_is_encoded_in_its_own_order() -> None:
    array = object_array([b"a", b"b", b"c", b"d"], [2, 2]).T
    assert raw_bytes(array) == b"\1\0\0\0a\1\0\0\0c\1\0\0\0b\1\0\0\0d"


def test_ten_thousand_long_elements() -> None:
    noise = random.Random(1).randbytes(20_000)
    elements = [noise[i : i + 900] for i in range(10_000)]
    raw = raw_bytes(object_array(elements, [10_000]))
    assert len(raw) == 10_000 * 904
    tensor = Tensor.from_bytes("x", Datatype.BYTES, [10_000], memoryview(raw))
    assert tensor.array.tolist() == elements


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_decoding_makes_no_objects_of_elements(kind: type[bytes | memoryview]) -> None:
    raw = kind(bytes(raw_bytes(object_array([b"", b"a", b"bcd", b""] * 50_000, [200_000]))))
    before = sys.getallocatedblocks()
    tensor = Tensor.from_bytes("x", Datatype.BYTES, [200_000], raw)
    assert raw_bytes(tensor.array) is raw
    assert sys.getallocatedblocks() - before < 1000


def test_an_error_after_many_elements() -> None:
    raw = bytearray(raw_bytes(object_array([b"\0"] * 200_000, [200_000])))
    raw[199_999 * 5] = 2
    with pytest.raises(InvalidRequest, match="length 2 but only 1 bytes available: element 199999"):
        Tensor.from_bytes("x", Datatype.BYTES, [200_000], bytes(raw))


@pytest.mark.parametrize(
    ("element", "count", "nbytes"), [(b"", 1000, 24_000), (b"a", 1000, 80_000), (b"abc", 1, 80)]
)
def test_elements_are_charged_at_their_decoded_size(
    element: bytes, count: int, nbytes: int
) -> None:
    charged: list[int] = []
    tensor = Tensor("x", Datatype.BYTES, BytesArray(join([element] * count), (count,)))
    others = Tensor("y", Datatype.INT8, np.zeros(5, np.int8))
    charge_objects([tensor, others], charged.append, nbytes)
    assert charged == [nbytes]


def test_elements_beyond_the_decoded_limit() -> None:
    tensor = Tensor("x", Datatype.BYTES, BytesArray(bytes(5 * 100), (100,)))
    with pytest.raises(InvalidRequest, match="8000 bytes as objects, at most 7999 are allowed"):
        charge_objects([tensor], lambda _: None, 7_999)
    charged: list[int] = []
    charge_objects([tensor], charged.append, 0)
    assert charged == [8_000]
