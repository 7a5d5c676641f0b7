"""The bucket of a request, padded inputs and cut outputs, against a slow, obvious reference."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array, Tensor
from headrace.ipc.elements import join
from headrace.plugins.padding.decisions import (
    FilledInput,
    PaddedAxis,
    PaddedDim,
    PaddedSize,
    added_bytes,
    cut,
    decide,
    padded,
)

MASK, LENGTHS = FilledInput("M", Datatype.BOOL), FilledInput("N", Datatype.INT64)
# Images of variable height and width, with a text for each column, and captions of words.
HEIGHT = PaddedDim("height", (2, 5), {"I": PaddedAxis(0, 9)}, {"O": 0})
WIDTH = PaddedDim(
    "width", (3, 4), {"I": PaddedAxis(1, 9), "T": PaddedAxis(0, b"-")}, {"O": 2, "P": 0}, MASK,
    LENGTHS,
)  # fmt: skip
DIMS = (HEIGHT, WIDTH)
DATATYPES = {
    "I": Datatype.INT16, "T": Datatype.BYTES, "M": Datatype.BOOL, "N": Datatype.INT64,
    "F": Datatype.FP32, "O": Datatype.INT16, "P": Datatype.BYTES,
}  # fmt: skip


def tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {name: Tensor(name, DATATYPES[name], array) for name, array in arrays.items()}


def element(array: Array, place: tuple[int, ...], otherwise: object) -> Any:
    """The element at a place, or another value beyond the array."""
    inside = all(at < size for at, size in zip(place, array.shape, strict=True))
    return array[place] if inside else otherwise


def reference(array: Array, shape: Sequence[int], value: object) -> list[Any]:
    """All elements of an array in a larger shape, one by one."""
    return [element(array, place, value) for place in product(*map(range, shape))]


def bucket(dim: PaddedDim, length: int) -> int:
    return min(size for size in dim.buckets if size >= length)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Array]:
    rows, height, width = (draw(st.integers(low, high)) for low, high in ((1, 3), (0, 5), (0, 4)))
    texts = np.empty((rows, width), object)
    texts[...] = [[b"%d" % (row * 7 + n) for n in range(width)] for row in range(rows)]
    found: dict[str, Array] = {
        "I": np.arange(rows * height * width, dtype=np.int16).reshape(rows, height, width),
        "F": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2),
    }
    if draw(st.booleans()):
        found["T"] = texts
    if draw(st.booleans()):
        found["M"] = np.array(draw(st.lists(
            st.booleans(), min_size=rows * width, max_size=rows * width
        )), bool).reshape(rows, width)  # fmt: skip
    if draw(st.booleans()):
        found["N"] = np.full((rows, 1), 77, np.int64)
    return found


@given(requests())
def test_padded_inputs(arrays: Mapping[str, Array]) -> None:
    rows, height, width = arrays["I"].shape
    inputs = tensors(arrays)
    sizes = decide(DIMS, {name: array.shape for name, array in arrays.items()})
    tall, wide = bucket(HEIGHT, height), bucket(WIDTH, width)
    assert sizes == (PaddedSize(HEIGHT, height, tall), PaddedSize(WIDTH, width, wide))
    found = padded(sizes, inputs, rows)

    mask = arrays.get("M", np.ones((rows, width), bool))
    expected: dict[str, tuple[list[Any], tuple[int, ...]]] = {}
    for name, array, shape, value in (
        ("I", arrays["I"], (rows, tall, wide), 9),
        ("F", arrays["F"], (rows, 2), None),
        ("T", arrays.get("T"), (rows, wide), b"-"),
        ("M", mask, (rows, wide), False),
        ("N", arrays.get("N", np.full((rows, 1), width)), (rows, 1), None),
    ):
        if array is not None:
            expected[name] = reference(array, shape, value), shape
    assert {n: (t.array.reshape((-1,)).tolist(), t.array.shape) for n, t in found.items()} == (
        expected
    )
    for name, tensor in found.items():
        assert tensor.name == name
        assert np.asarray(tensor.array).dtype == NUMPY[DATATYPES[name]]
        if name in arrays and tensor.array.shape == arrays[name].shape:
            assert tensor.array is arrays[name]  # nothing is copied that needs no padding
    made = [t for name, t in found.items() if t.array is not arrays.get(name)]
    assert added_bytes(sizes, inputs, rows) == sum(np.asarray(t.array).nbytes for t in made)
    assert {name: tensor.array for name, tensor in inputs.items()} == dict(arrays)


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3))
def test_cut_outputs(height: int, width: int, rows: int) -> None:
    sizes = decide(DIMS, {"I": (rows, height, width)})
    tall, wide = bucket(HEIGHT, height), bucket(WIDTH, width)
    whole: Array = np.arange(rows * tall * 2 * wide, dtype=np.int16).reshape(rows, tall, 2, wide)
    texts = BytesArray(join([b"%d" % n for n in range(rows * wide)]), (rows, wide))
    other: Array = np.arange(rows * wide, dtype=np.float32).reshape(rows, wide)
    outputs = [
        Tensor("O", Datatype.INT16, whole), Tensor("P", Datatype.BYTES, texts),
        Tensor("F", Datatype.FP32, other),
    ]  # fmt: skip
    found = cut(sizes, "m", outputs)
    assert [(t.name, t.datatype) for t in found] == [(t.name, t.datatype) for t in outputs]
    assert found[0].array.tolist() == [
        [[[int(whole[r, h, c, w]) for w in range(width)] for c in range(2)] for h in range(height)]
        for r in range(rows)
    ]
    assert found[1].array.tolist() == [
        [b"%d" % (r * wide + w) for w in range(width)] for r in range(rows)
    ]
    assert found[2].array is other


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"I": (1, 6, 1)}, "input 'I' has 6 elements in dimension 'height', whose largest"),
        (
            {"I": (1, 1, 2), "T": (1, 3)},
            "input 'T' has 3 elements in dimension 'width', and input 'I' has 2",
        ),
        (
            {"I": (1, 1, 2), "M": (1, 1)},
            "input 'M' has 1 elements in dimension 'width', and input 'I' has 2",
        ),
    ],
)
def test_requests_without_a_bucket(shapes: Mapping[str, tuple[int, ...]], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        decide(DIMS, shapes)


@pytest.mark.parametrize("shape", [(1, 2, 2, 4), (1, 2, 2), (1, 1, 2, 3)])
def test_outputs_of_other_sizes(shape: tuple[int, ...]) -> None:
    sizes = decide(DIMS, {"I": (1, 1, 1)})
    with pytest.raises(ExecutionFailed, match=r"model 'm' gave output 'O' of shape \[1,"):
        cut(sizes, "m", [Tensor("O", Datatype.INT16, np.zeros(shape, np.int16))])
