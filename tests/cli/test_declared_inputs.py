"""Bringing data into the shape that a model takes."""

import numpy as np
import pytest

from headrace.cli.client.address import BadAnswer
from headrace.core.datatypes import NUMPY, Datatype
from headrace.plugins.commands.infer_inputs import Declared, fit, random, taken

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
    found = taken(_METADATA, config)
    assert found.inputs["a"] == Declared("a", Datatype.FP32, (-1, 2), True)
    assert found.inputs["b"].optional
    assert found.decoupled
    assert str(found.outputs["c"]) == "c INT8 [-1]"
    assert not taken(_METADATA, {"max_batch_size": 0}).inputs["a"].rows
    assert taken(_METADATA, {}).inputs["a"].rows  # as far as one can tell


def test_documents_that_make_no_sense() -> None:
    with pytest.raises(BadAnswer):
        taken({"inputs": [{"name": "a"}], "outputs": []}, {})


@pytest.mark.parametrize(("given", "declared", "rows", "expected"), [
    ((3, 2), (-1, 2), True, (3, 2)),  # as it is
    ((2,), (-1, 2), True, (1, 2)),  # one row
    ((), (-1, 1), True, (1, 1)), ((), (1,), False, (1,)), ((), (-1, -1), True, (1, 1)),
    ((5,), (-1, -1), True, (1, 5)), ((6,), (-1, 2), True, (3, 2)),  # flat
    ((64,), (-1, 8, 8), True, (1, 8, 8)), ((128,), (-1, 8, 8), True, (2, 8, 8)),
    ((3, 64), (-1, 8, 8), True, (3, 8, 8)),  # a table
    ((3, 1), (-1,), True, (3,)), ((0,), (-1, 2), True, (0, 2)), ((4,), (2, 2), False, (2, 2)),
    ((2, 3), (2, 3), False, (2, 3)),
])  # fmt: skip
def test_fitting(
    given: tuple[int, ...], declared: tuple[int, ...], rows: bool, expected: tuple[int, ...]
) -> None:
    wanted = Declared("x", Datatype.FP32, declared, rows)
    array = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    found = fit(array, wanted)
    assert found.shape == expected
    assert found.ravel().tolist() == array.ravel().tolist()


@pytest.mark.parametrize(("given", "declared", "rows"), [
    ((3,), (-1, 2), True), ((2, 3), (-1, 2), True), ((2, 2), (4,), False),
    ((1, 2, 2), (2, 2), False), ((5,), (-1, 0), True),
])  # fmt: skip
def test_what_does_not_fit(given: tuple[int, ...], declared: tuple[int, ...], rows: bool) -> None:
    with pytest.raises(ValueError, match=r"^expected shape \[.*\].*, got \["):
        fit(np.zeros(given), Declared("x", Datatype.FP32, declared, rows))


@pytest.mark.parametrize("datatype", Datatype)
def test_made_up_values(datatype: Datatype) -> None:
    declared = Declared("x", datatype, (-1, 3, -1), True)
    array = random(declared, np.random.default_rng(1), 2, None)
    again = random(declared, np.random.default_rng(1), 2, None)
    assert (array.shape, array.dtype) == ((2, 3, 1), NUMPY[datatype])
    assert array.tolist() == again.tolist()
    assert random(declared, np.random.default_rng(1), 2, (1, 3, 4)).shape == (1, 3, 4)
    alone = Declared("x", datatype, (-1, 3))
    assert random(alone, np.random.default_rng(1), 2, None).shape == (1, 3)
