from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Tensor
from headrace.protocol.classification import (
    MAX_CLASSES,
    check_class_count,
    classify,
    classify_outputs,
)
from tests.protocol.strategies import object_array, refused


def tensor(values: Any, datatype: Datatype = Datatype.FP32, name: str = "y") -> Tensor:
    return Tensor(name, datatype, np.array(values, NUMPY[datatype]))


@pytest.mark.parametrize(("given", "count", "labels", "batches", "classes"), [
    (tensor([0.5, 2, -1]), 2, [], False, ["2.000000:1", "0.500000:0"]),
    (tensor([0.5, 2, -1]), 9, [], False, ["2.000000:1", "0.500000:0", "-1.000000:2"]),
    (tensor([3, 7], Datatype.INT8), 1, [], False, ["7:1"]),
    (tensor([2**64 - 1], Datatype.UINT64), 1, [], False, ["18446744073709551615:0"]),
    (tensor([1, 2, 3]), 2, ["a", "b"], False, ["3.000000:2", "2.000000:1:b"]),
    (tensor([4, 4, 4]), 2, [], False, ["4.000000:0", "4.000000:1"]),  # first of equals
    (tensor([[1, 2], [4, 3]]), 1, [], True, [["2.000000:1"], ["4.000000:0"]]),
    (tensor([[1, 2], [4, 3]]), 1, [], False, ["4.000000:2"]),  # one row
    (tensor([[[1, 2], [4, 3]]]), 1, [], True, [["4.000000:2"]]),
    (tensor(5.0), 1, [], False, ["5.000000:0"]),
    (tensor([5.0, 6.0]), 1, [], True, [["5.000000:0"], ["6.000000:0"]]),
    (tensor([float("-inf"), float("inf")]), 2, [], False, ["inf:1", "-inf:0"]),
    (tensor([]), 1, [], False, []), (tensor([[], []]), 1, [], True, [[], []]),
    (tensor(np.zeros((0, 3))), 1, [], True, np.zeros((0, 1)).tolist()),
])  # fmt: skip
def test_classes(
    given: Tensor, count: int, labels: Sequence[str], batches: bool, classes: list[Any]
) -> None:
    result = classify(given, count, labels, batches)
    assert (result.name, result.datatype) == ("y", Datatype.BYTES)
    assert np.asarray(result.array).astype(np.str_).tolist() == classes


def test_empty_rows_stay_rows() -> None:
    assert classify(tensor(np.zeros((2, 0))), 3, [], batches=True).array.shape == (2, 0)
    assert classify(tensor(np.zeros((0, 4))), 3, [], batches=True).array.shape == (0, 3)


@pytest.mark.parametrize("given", [
    tensor([1], Datatype.FP16), tensor([1], Datatype.BF16), tensor([True], Datatype.BOOL),
    Tensor("y", Datatype.BYTES, object_array([b"a"], [1])),
])  # fmt: skip
def test_datatypes_without_classes(given: Tensor) -> None:
    text = f"class result not available for output due to unsupported type '{given.datatype}'"
    with pytest.raises(InvalidRequest, match=text):
        classify(given, 1, [], batches=False)


def test_too_many_elements() -> None:
    with pytest.raises(InvalidRequest, match=r"^classification output tensor too large: 'y' has"):
        classify(tensor(np.zeros(1_000_001)), 1, [], batches=False)


def test_only_outputs_that_were_asked_for_are_replaced() -> None:
    response = InferResponse("m", "1", "", [tensor([1, 2]), tensor([3], name="z")], Timing(0, 0, 1))
    classify_outputs(response, {"y": 1}, {"y": ["a", "b"]}, batches=False)
    assert [output.array.tolist() for output in response.outputs] == [[b"2.000000:1:b"], [3.0]]


def test_counts() -> None:
    assert check_class_count("y", 3) == 3
    for count in (0, -1, True, 1.0, "1", None, MAX_CLASSES + 1):
        with refused("'classification' of output 'y' must be"):
            check_class_count("y", count)


@pytest.mark.parametrize("count", [1, 7, 4999, 5000, 9000])
@pytest.mark.parametrize("special", [(), (np.nan,), (np.nan, np.inf, -np.inf)], ids=str)
def test_wide_rows_are_sorted_as_narrow_ones(count: int, special: tuple[float, ...]) -> None:
    """Only the highest are sorted there; the first of equal values come first."""
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 50, (3, 5000)).astype(np.float32)
    for value in special:
        rows[rng.random(rows.shape) < 0.01] = value
    found = classify(tensor(rows), count, [], True)
    expected = [
        [f"{value:f}:{index}" for index, value in ordered[:count]]
        for ordered in (
            sorted(enumerate(row.tolist()), key=lambda pair: (pair[1] == pair[1], -pair[1]))
            for row in rows
        )
    ]
    assert [[text.decode() for text in row] for row in found.array.tolist()] == expected
