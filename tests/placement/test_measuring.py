"""What is run to find out what a model costs."""

from collections.abc import Mapping, Sequence
from time import sleep

import pytest

from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array
from headrace.placement.choice import largest_batch, measure
from headrace.placement.local.instances import LoadedModel

FP32, TEXT = Datatype.FP32, Datatype.BYTES


def signature(max_batch_size: int, *dims: int, datatype: Datatype = FP32) -> Signature:
    """One input of these dims, and one output of a number a row."""
    inputs = (TensorSpec("x", datatype, dims),)
    return Signature("m", max_batch_size, inputs, (TensorSpec("y", FP32, (1,)),))


class Recorder(LoadedModel):
    """A model that notes the shapes that it was run with, and fails from `limit` rows on.

    Its first run takes so many seconds.
    """

    def __init__(self, limit: float = float("inf"), first: float = 0) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._limit = limit
        self._first = first

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        if not self.shapes:
            sleep(self._first)
        self.shapes.append(inputs["x"].shape)
        if inputs["x"].shape[0] >= self._limit:
            raise MemoryError
        return []


@pytest.mark.parametrize(
    ("declared", "rows"),
    [
        (signature(0, 4), 1),
        (signature(1, 4), 1),
        (signature(64, 4), 64),
        (signature(64, -1, 224, 224, 3), 64),
        (signature(4096, 4), 4096),
        (signature(2**31 - 1, 4), 4096),
        (signature(2**31 - 1, 1 << 20), 15),  # 64 MiB by 4 MiB and an output
        (signature(2**31 - 1, 1 << 20, datatype=TEXT), 1),
        (signature(64, 1 << 24), 1),  # 64 MiB alone
        (signature(64, 1 << 24, 2), 0),
        (signature(0, 2**62, 2**62), 0),
    ],
)
def test_how_many_rows_are_measured(declared: Signature, rows: int) -> None:
    assert largest_batch(declared) == rows


def test_one_row_and_the_largest_batch_are_run() -> None:
    model = Recorder()
    assert measure(model.infer, signature(8, -1, 2)) < float("inf")
    assert set(model.shapes) == {(1, 1, 2), (8, 1, 2)}


def test_a_slow_first_run_says_nothing_yet() -> None:
    model = Recorder(first=0.1)
    assert measure(model.infer, signature(8, 2)) < 100_000_000
    assert (8, 2) in model.shapes


@pytest.mark.slow
def test_one_run_that_takes_a_second_is_enough() -> None:
    model = Recorder(first=1.1)
    assert measure(model.infer, signature(8, 2)) > 1_000_000_000
    assert model.shapes == [(1, 2)]


def test_a_model_that_is_too_large_to_be_measured_is_too_heavy() -> None:
    model = Recorder()
    assert measure(model.infer, signature(0, 2**62, 2**62)) == float("inf")
    assert model.shapes == []


def test_a_model_that_fails_on_zeros_is_too_heavy() -> None:
    model = Recorder(limit=8)
    assert measure(model.infer, signature(8, 2)) == float("inf")
    assert model.shapes[-1] == (8, 2)
