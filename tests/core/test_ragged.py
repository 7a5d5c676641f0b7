"""Ragged batches: computed inputs as in the examples of Triton's documents, and cut outputs."""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import Datatype
from headrace.core.ragged import BatchInput, BatchInputKind, Ragged, flattened, scattered
from headrace.core.tensors import TensorArray
from headrace.ipc.elements import join

K = BatchInputKind
Shapes = Sequence[tuple[int, ...]]
WIDTHS: Shapes = [(1, 3), (1, 4), (1, 5)]
ITEMS: Shapes = [(2, 2, 1), (1, 1, 2)]


@pytest.mark.parametrize(
    ("kind", "shapes", "value"),
    [
        (K.ELEMENT_COUNT, WIDTHS, [3, 4, 5]),
        (K.ELEMENT_COUNT, ITEMS, [4, 2]),
        (K.ACCUMULATED, WIDTHS, [3, 7, 12]),
        (K.ACCUMULATED_WITH_ZERO, WIDTHS, [0, 3, 7, 12]),
        (K.MAX_AS_SHAPE, WIDTHS, [0, 0, 0, 0, 0]),
        (K.ITEM_SHAPE, ITEMS, [[2, 1], [2, 1], [1, 2]]),
        (K.ITEM_SHAPE, WIDTHS, [[3], [4], [5]]),
        (K.ITEM_SHAPE_FLATTEN, ITEMS, [2, 1, 2, 1, 1, 2]),
        (K.ELEMENT_COUNT, [(1, 0)], [0]),
        (K.MAX_AS_SHAPE, [(1, 0)], []),
    ],
)
@pytest.mark.parametrize("datatype", [Datatype.INT32, Datatype.FP32])
def test_computed_inputs(
    kind: BatchInputKind, shapes: Shapes, value: Sequence[object], datatype: Datatype
) -> None:
    found = BatchInput(kind, "X", ("N",), datatype).value(shapes)
    np.testing.assert_array_equal(found, np.array(value, found.dtype))
    assert found.dtype == (np.int32 if datatype is Datatype.INT32 else np.float32)


def test_several_targets_and_sources() -> None:
    ragged = Ragged(
        frozenset({"X", "Y"}),
        (
            BatchInput(K.ELEMENT_COUNT, "X", ("A", "B"), Datatype.INT32),
            BatchInput(K.ACCUMULATED, "Y", ("C",), Datatype.INT32),
        ),
    )
    found = ragged.computed_from([{"X": (1, 2), "Y": (1, 1)}, {"X": (1, 3), "Y": (2, 2)}])
    assert {name: value.tolist() for name, value in found.items()} == {
        "A": [2, 3], "B": [2, 3], "C": [1, 5],
    }  # fmt: skip


def test_elements_are_one_axis() -> None:
    parts = [np.array([[1, 2]]), np.array([[3]]), np.array([[4, 5], [6, 7]])]
    assert np.asarray(flattened(parts)).tolist() == [1, 2, 3, 4, 5, 6, 7]
    texts: list[TensorArray] = [BytesArray(join([b"a", b"b"]), (1, 2)), np.array([[b"c"]], object)]
    assert np.asarray(flattened(texts)).tolist() == [b"a", b"b", b"c"]


def test_outputs_are_cut_by_the_shapes_of_their_source() -> None:
    pieces = scattered(np.arange(10), (-1,), [(1, 3), (2, 2), (1, 3)])
    assert [np.asarray(piece).tolist() for piece in pieces] == [
        [[0, 1, 2]], [[3, 4], [5, 6]], [[7, 8, 9]],
    ]  # fmt: skip
    pieces = scattered(np.arange(6), (-1, 2), [(1, 2, 9), (1, 1, 9)])
    assert [np.asarray(piece).tolist() for piece in pieces] == [[[[0, 1], [2, 3]]], [[[4, 5]]]]


@pytest.mark.parametrize("array", [np.zeros(4), np.zeros((1, 3)), np.zeros(2)])
def test_an_output_of_another_size(array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> (
    None
):  # fmt: skip
    problem = scattered(array, (-1,), [(1, 3)])
    assert problem == f"of shape {list(array.shape)}, the shapes of its source need [3]"
