import tracemalloc

import numpy as np
import pytest

from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import MAX_RANK, Tensor, brackets, element_count

FIXED = list(ITEM_SIZES)


@pytest.mark.parametrize("datatype", FIXED)
@pytest.mark.parametrize("shape", [[], [0], [3], [2, 3], [2, 0, 3], [1, 1, 1, 1]])
def test_from_bytes(datatype: Datatype, shape: list[int]) -> None:
    raw = bytes(int(np.prod(shape)) * ITEM_SIZES[datatype])
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
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as raised:
            Tensor.from_bytes("x", Datatype.FP32, shape, bytes(size))
        assert tracemalloc.get_traced_memory()[1] < 100_000  # nothing of the asked size
    finally:
        tracemalloc.stop()
    for part in parts:
        assert part in str(raised.value)
    assert len(str(raised.value)) < 10_000


@pytest.mark.parametrize(
    ("shape", "count"),
    [([], 1), ([7], 7), ([2, 3, 4], 24), ([5, 0], 0), ([0, 2**59], 0), ([2**59], 2**59)],
)
def test_element_count(shape: list[int], count: int) -> None:
    assert element_count("x", shape) == count


@pytest.mark.parametrize("datatype", FIXED)
def test_the_largest_empty_tensor_can_be_made(datatype: Datatype) -> None:
    assert Tensor.from_bytes("x", datatype, [2**59, 0], b"").array.shape == (2**59, 0)


@pytest.mark.parametrize(("shape", "text"), [((), "[]"), ((4,), "[4]"), ([-1, 16], "[-1,16]")])
def test_brackets(shape: list[int], text: str) -> None:
    assert brackets(shape) == text
