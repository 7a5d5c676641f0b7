"""The signature of an exported PyTorch program, read from a stand-in: PyTorch is not required."""

from enum import Enum
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from headrace.plugins.loaders.pytorch import export_parts


class Infinite:
    """An upper bound as PyTorch has it, which is greater than any number, and none itself."""

    def __ge__(self, other: object) -> bool:
        return True

    def __int__(self) -> int:
        raise AttributeError("'Infinity' object has no attribute '_mpf_'")


class Torch(Enum):
    """PyTorch's datatypes."""

    bool = uint8 = int8 = int16 = int32 = int64 = "whole"
    float16 = float32 = float64 = "real"


def program(lower: Any, upper: Any) -> Fake:
    """A program from one matrix to another, whose number of rows has these bounds."""
    rows = Fake(node=Fake(expr="n"))
    node = {"val": Fake(dtype=Torch.float32, shape=(rows, 4))}
    return Fake(
        graph_signature=Fake(user_inputs=["x"], user_outputs=["y"]),
        graph=Fake(nodes=[Fake(name="x", meta=node), Fake(name="y", meta=node)]),
        call_spec=Fake(in_spec=Fake(children_specs=(None, Fake(context=None)))),
        range_constraints={"n": Fake(lower=lower, upper=upper)},
    )


@pytest.mark.parametrize(("lower", "upper", "rows"), [
    (0, 32, 32), (1, 2**40, 2**31 - 1), (2, 32, 0), (0, Infinite(), 2**31 - 1),
])  # fmt: skip
def test_the_number_of_rows_that_a_program_takes(lower: int, upper: Any, rows: int) -> None:
    """`Dim("n")` without bounds, the usual export, takes any number."""
    parts = export_parts(Torch, program(lower, upper))
    assert parts.most_rows == rows
    assert [(one.name, one.dims) for one in parts.inputs] == [("INPUT__0", (-1, 4))]
