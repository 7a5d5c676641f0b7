"""Meaning of annotations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from headrace import (
    BFloat16,
    Bool,
    Bytes,
    Float16,
    Float32,
    Float64,
    Frame,
    Int8,
    Int16,
    Int32,
    Int64,
    N,
    SignatureError,
    Strings,
    Table,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
)
from headrace.core.datatypes import Datatype
from headrace.plugins.functions.signature import Columns, TableColumn, Tensor, TensorForm, read

T = TypeVar("T")
Tokens = NewType("Tokens", int)
# Type checkers see aliases of types, but at run time they are classes.
EVERY: list[Any] = [
    Bool, UInt8, UInt16, UInt32, UInt64, Int8, Int16, Int32, Int64, Float16, Float32, Float64,
    Strings, BFloat16,
]  # fmt: skip
UNTYPED: Any = Float32


def tensor(hint: Any) -> Tensor:
    """The tensor of an annotation."""
    found, _ = read(hint)
    assert isinstance(found, Tensor)
    return found


def test_there_is_a_name_for_every_datatype() -> None:
    assert [tensor(one[N]).element.datatype for one in EVERY] == [str(one) for one in Datatype]
    assert [tensor(one[N]).element.text for one in (Strings, Bytes)] == [True, False]
    Scores = TypeAliasType("Scores", Float32[N])
    assert read(Scores) == (tensor(Float32[N]), False)


@pytest.mark.parametrize(
    ("hint", "dims"),
    [
        (Float32[N], [("N", -1)]),
        (Float32[N, Literal[4]], [("N", -1), ("", 4)]),
        (UNTYPED[N, int, Tokens, T], [("N", -1), ("", -1), ("Tokens", -1), ("T", -1)]),
        (UNTYPED["n", 4], [("n", -1), ("", 4)]),
        (UNTYPED[()], []),
        (np.ndarray[tuple[int, Literal[4]], np.dtype[np.float32]], [("", -1), ("", 4)]),
    ],
)
def test_dimensions(hint: Any, dims: list[tuple[str, int]]) -> None:
    found = tensor(hint)
    assert found.element.datatype == "FP32"
    assert found.form is TensorForm.ARRAY
    assert [(dim.name, dim.size) for dim in found.dims] == dims


@pytest.mark.parametrize(
    ("hint", "datatype", "form", "rank"),
    [
        (bool, "BOOL", TensorForm.SINGLE, 0), (int, "INT64", TensorForm.SINGLE, 0),
        (float, "FP64", TensorForm.SINGLE, 0), (str, "BYTES", TensorForm.SINGLE, 0),
        (bytes, "BYTES", TensorForm.SINGLE, 0), (np.float32, "FP32", TensorForm.SINGLE, 0),
        (np.uint8, "UINT8", TensorForm.SINGLE, 0), (list[str], "BYTES", TensorForm.LIST, 1),
        (Sequence[list[np.int16]], "INT16", TensorForm.LIST, 2),
        (Annotated[float, "in euros"], "FP64", TensorForm.SINGLE, 0),
    ],
)  # fmt: skip
def test_types_of_python_and_numpy(hint: Any, datatype: str, form: TensorForm, rank: int) -> None:
    found = tensor(hint)
    assert (found.element.datatype, found.form, len(found.dims)) == (datatype, form, rank)


@pytest.mark.parametrize("hint", [Float32[N] | None, Optional[Float32[N]], None | Float32[N]])  # noqa: UP045
def test_optional_values(hint: Any) -> None:
    assert read(hint) == (tensor(Float32[N]), True)


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (Float32, r"Float32 has no dimensions: Float32\[N\] has one value for each row"),
        (NDArray[np.float32], r"leaves open what it is: say its type and dimensions"),
        (np.ndarray[tuple[int], np.dtype[np.complex64]], "leaves open what it is"),
        (np.ndarray, "ndarray is no type of a tensor"),
        (np.floating, "floating is no type of a tensor"),
        (complex, "complex is no type of a tensor"),
        (dict[str, int], r"dict\[str, int\] is no type of a tensor"),
        (list[complex], r"list\[complex\] is no type of a tensor"),
        ([int], r"\[<class 'int'>\] is no type of a tensor"),
        (int | str, "may be several things"),
        (int | str | None, "may be several things"),
        (Any, "Any is no type of a tensor"),
    ],
)
def test_annotations_that_are_not_tensors(hint: Any, says: str) -> None:
    with pytest.raises(SignatureError, match=says):
        read(hint)


@pytest.mark.parametrize("dim", [0, -1, True, float, "two words", "", Literal[2, 3], None, ...])
def test_annotations_that_are_not_dimensions(dim: Any) -> None:
    with pytest.raises(SignatureError, match="is no dimension: expected N or another name"):
        UNTYPED[N, dim]


def test_a_data_frame_without_a_schema() -> None:
    class DataFrame:
        pass

    DataFrame.__module__ = "pandas.core.frame"
    with pytest.raises(SignatureError, match=r"or the columns, as in Frame\[Schema\]"):
        read(DataFrame)
    DataFrame.__module__ = "pyarrow.lib"
    with pytest.raises(SignatureError, match=r"or the columns, as in Table\[Schema\]"):
        read(DataFrame)


class Person(TypedDict):
    age: int | None
    name: str
    height: np.float32


@dataclass
class Address:
    street: str | None
    number: int


def columns(hint: Any) -> tuple[str, list[tuple[str, str, bool]]]:
    """A frame's library and columns."""
    found, missing = read(hint)
    assert isinstance(found, Columns)
    assert not missing
    assert all(isinstance(column, TableColumn) for column in found.columns)
    return found.library, [(c.name, c.element.datatype, c.nullable) for c in found.columns]


def test_frames() -> None:
    person = [("age", "INT64", True), ("name", "BYTES", False), ("height", "FP32", False)]
    assert columns(Frame[Person]) == ("pandas", person)
    assert columns(Table[Address]) == (
        "pyarrow", [("street", "BYTES", True), ("number", "INT64", False)]
    )  # fmt: skip
    frame: Any = Frame
    schema = {"marital-status": Strings, "score": EVERY[-3] | None}
    assert columns(frame[schema]) == (
        "pandas", [("marital-status", "BYTES", False), ("score", "FP64", True)]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({}, "has no columns"),
        ({"x": list[int]}, r"column 'x' is list\[int\], which no column can be"),
        ({"x": Float32[N]}, "column 'x'"),
        (3, "the schema 3 cannot be read"),
    ],
)
def test_annotations_that_are_not_schemas(schema: Any, says: str) -> None:
    frame: Any = Frame
    with pytest.raises(SignatureError, match=says):
        read(frame[schema])
