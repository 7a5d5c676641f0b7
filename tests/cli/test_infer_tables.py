"""Tables of `headrace infer`: kinds of files, their headers, and the columns of models."""

import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.commands.infer import FORMATS
from headrace.cli.commands.infer_inputs import Reader
from headrace.cli.commands.infer_tables import KINDS
from headrace.cli.remote import CommandFailed
from headrace.client.values import Declared
from headrace.core.datatypes import Datatype
from tests.cli.conftest import Headrace

Read = Callable[..., dict[str, list[Any]]]
MATRIX = Declared("x", Datatype.FP32, (-1, 3), True, False, ("a b", "b", "c"))
PEOPLE = [
    Declared("name", Datatype.BYTES, (-1, 1), True),
    Declared("age", Datatype.INT64, (-1, 1), True),
    Declared("age.null", Datatype.BOOL, (-1, 1), True, True),
    Declared("size", Datatype.FP64, (-1, 1), True),
]


@pytest.fixture(params=["pyarrow", "csv"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Read:
    """Read a table for a model, with pyarrow and without it."""
    if request.param == "csv":
        for name in ("pyarrow", "pyarrow.csv"):
            monkeypatch.setitem(sys.modules, name, None)

    def found(*inputs: Declared, text: str, named: bool = False) -> dict[str, list[Any]]:
        path = tmp_path / "table.csv"
        path.write_text(text)
        reader = Reader("m", {declared.name: declared for declared in inputs})
        words = [("x", str(path))] if named else []
        given = reader.read(None if named else str(path), words)
        return {name: np.asarray(t.array).tolist() for name, t in given.tensors.items()}

    return found


@pytest.mark.parametrize("named", [False, True])
def test_a_matrix_in_the_order_of_the_training(read: Read, named: bool) -> None:
    expected = {"x": [[1, 2, 3], [4, 5, 6]]}
    for text in ("c,a_b,b\n3,1,2\n6,4,5\n", "b, c ,a b\n2,3,1\n5,6,4\n", "1,2,3\n4,5,6"):
        assert read(MATRIX, text=text, named=named) == expected
    for text, problem in (
        ("b,c,d\n1,2,3\n", "lacks column 'a b' and has the further column 'd'"),
        ("x,y,z\n1,2,3\n", "lacks columns 'a b', 'b', 'c' and has"),
        ("b,b,c\n1,2,3\n", "there are several columns 'b'"),
        ("b,c\n1,2\n", "lacks column 'a b'"),
        ("1,2\n", r"expected shape \[-1,3\]"),
    ):
        with pytest.raises(CommandFailed, match=problem):
            read(MATRIX, text=text, named=named)


def test_a_first_row_with_values_that_are_names_too(read: Read) -> None:
    model = Declared("x", Datatype.FP32, (-1, 3), True, False, ("0", "1", "2"))
    assert read(model, text="1,5,0\n3,4,5\n") == {"x": [[1, 5, 0], [3, 4, 5]]}
    assert read(model, text="2,1,0\n3,4,5\n") == {"x": [[5, 4, 3]]}


def test_integers_keep_their_digits(read: Read) -> None:
    most = Declared("x", Datatype.UINT64, (-1, 1), True)
    assert read(most, text="18446744073709551615\n9223372036854775809\n") == {
        "x": [[2**64 - 1], [2**63 + 1]]
    }
    assert read(most, text="1.0\n2\n") == {"x": [[1], [2]]}
    for datatype, text in ((Datatype.INT64, 2**63), (Datatype.UINT64, 2**64)):
        with pytest.raises(CommandFailed, match=f"expected numbers.* for {datatype}"):
            read(Declared("x", datatype, (-1, 1), True), text=f"{text}\n")


def test_a_first_cell_that_is_too_long(read: Read) -> None:
    text = Declared("x", Datatype.BYTES, (-1, 1), True)
    with pytest.raises(CommandFailed, match=r"table\.csv: field larger than field limit"):
        read(text, text="a" * 200_000 + "\nb\n")


def test_columns_as_inputs(read: Read) -> None:
    rows = 'size,name,age\n1.5,007,36\n,"a,\nb",\n2,é,9007199254740993\n'
    found = read(*PEOPLE, text=rows)
    assert found["name"] == [[b"007"], [b"a,\nb"], ["é".encode()]]
    assert np.isnan(found["size"][1])
    if "age.null" in found:
        assert (found["age"][::2], found["age.null"]) == (
            [[36], [9007199254740993]], [[False], [True], [False]],
        )  # fmt: skip
    with pytest.raises(CommandFailed, match="m has no input 'years'"):
        read(*PEOPLE, text="size,name,years\n1,a,2\n")
    with pytest.raises(CommandFailed, match="nothing is given for age INT64"):
        read(*PEOPLE, text="size,name\n1,a\n")
    with pytest.raises(CommandFailed, match=r"it is empty"):
        read(*PEOPLE, text="\n")


def written(kind: str) -> bytes:
    """A table of three columns in a file of this kind."""
    arrow = import_module("pyarrow")
    table = arrow.table({"c": [3.0, 6.0], "a b": [1.0, 4.0], "b": [2, 5]})
    if kind == "jsonl":
        return b'{"c": 3, "a b": 1, "b": 2}\n{"c": 6, "a b": 4, "b": 5}\n'
    file = io.BytesIO()
    if kind in ("csv", "tsv"):
        option = import_module("pyarrow.csv").WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        import_module("pyarrow.csv").write_csv(table, file, option)
    elif kind == "parquet":
        import_module("pyarrow.parquet").write_table(table, file)
    elif kind == "orc":
        import_module("pyarrow.orc").write_table(table, file)
    else:
        import_module("pyarrow.feather").write_feather(table, file)
    return file.getvalue()


def test_the_option_has_all_kinds() -> None:
    assert FORMATS == KINDS


@pytest.mark.parametrize("kind", FORMATS)
def test_kinds_of_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, path = written(kind), tmp_path / f"table.{kind}"
    path.write_bytes(content)
    plain = tmp_path / "table"
    plain.write_bytes(content)
    for form, word in (("", str(path)), (kind, f"@{plain}"), (kind, "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        given = Reader("m", {"x": MATRIX}, form=form).read(word, [])
        assert np.asarray(given.tensors["x"].array).tolist() == [[1, 2, 3], [4, 5, 6]]
    if kind not in ("csv", "tsv"):
        path.write_bytes(b"other")
        with pytest.raises(CommandFailed, match="not a table that can be read"):
            Reader("m", {"x": MATRIX}).read(str(path), [])
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(CommandFailed, match=r"needs pyarrow: pip install 'headrace\[tables\]'"):
            Reader("m", {"x": MATRIX}).read(str(path), [])


def test_standard_input(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of any kind, where it is not the text for a model of text."""
    arrow, file = import_module("pyarrow"), io.BytesIO()
    table = arrow.table({str(place): [1] for place in range(64)})
    import_module("pyarrow.parquet").write_table(table, file)
    rows = [["INPUT0"] * 16 + ["INPUT1"] * 16, ["1"] * 32]
    for model, content, shapes in (
        ("simple", "\n".join(map(",".join, rows)).encode(), [[1, 16], [1, 16]]),
        ("digits", ",".join(["1"] * 64).encode(), [[1, 10], [1, 1]]),
        ("digits", file.getvalue(), [[1, 10], [1, 1]]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        ended = headrace("infer", model, "-", "--json")
        assert (ended.status, ended.err) == (0, "")
        assert [output["shape"] for output in ended.document["outputs"]] == shapes
