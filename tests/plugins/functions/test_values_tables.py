"""Data frames as inputs and outputs, with and without missing values."""

from typing import Any, TypedDict

import numpy as np
import pytest

from headrace import Frame, ResultError, Table, model
from headrace.plugins.functions.signature import Columns, read
from headrace.plugins.functions.values import from_frame, to_frame
from tests.plugins.functions.requests import Request, started, values


class Row(TypedDict):
    age: int | None
    height: np.float32 | None
    name: str | None
    member: bool | None
    city: str
    debt: float


class Small(TypedDict):
    count: int
    name: str


def columns(hint: Any) -> Columns:
    """Declared columns of a frame."""
    found, _ = read(hint)
    assert isinstance(found, Columns)
    return found


def objects(*values: Any) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


ARRAYS = {
    "age": np.array([30, 0, 2**62 + 1]), "age.null": np.array([False, True, False]),
    "height": np.array([1.5, 0, 0], np.float32), "height.null": np.array([False, False, True]),
    "name": objects("ä", "", "c"), "name.null": np.array([False, True, False]),
    "member": np.array([True, False, True]), "member.null": np.array([True, False, False]),
    "city": objects("x", "", "z"), "debt": np.array([1.0, np.nan, 3.0]),
}  # fmt: skip
KINDS = [pytest.param("pandas", Frame[Row]), pytest.param("pyarrow", Table[Row])]


@pytest.mark.parametrize(("library", "hint"), KINDS)
def test_frames_round_trip(library: str, hint: Any) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    declared = columns(hint)
    back = from_frame(declared, to_frame(declared, ARRAYS), "output")
    assert set(back) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert back[name].dtype == array.dtype, name
        present = ~back.get(f"{name}.null", np.zeros(3, np.bool_))
        np.testing.assert_array_equal(back[name][present], array[present], name)
    assert back["age"].tolist()[1] == 0
    assert np.isnan(back["height"][2])
    assert back["name"].tolist() == ["ä", "", "c"]


@pytest.mark.parametrize(("library", "hint"), KINDS)
def test_nothing_is_missing(library: str, hint: Any) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    declared = columns(hint)
    given = {name: array for name, array in ARRAYS.items() if not name.endswith(".null")}
    back = from_frame(declared, to_frame(declared, given), "output")
    for name, array in given.items():
        np.testing.assert_array_equal(back[name], array, name)
        assert not back.get(f"{name}.null", np.zeros(1)).any()


@pytest.mark.parametrize(("library", "hint"), KINDS)
def test_no_rows_and_nothing_but_nulls(library: str, hint: Any) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    declared = columns(hint)
    for rows in (0, 2):
        given = {
            name: np.ones(rows, np.bool_) if name.endswith(".null") else array[:rows]
            for name, array in ARRAYS.items()
        }
        back = from_frame(declared, to_frame(declared, given), "output")
        assert {len(array) for array in back.values()} == {rows}
        assert {name: back[name].dtype for name in back} == {
            name: array.dtype for name, array in ARRAYS.items()
        }
        assert all(back[name].all() for name in back if name.endswith(".null"))


@pytest.mark.parametrize(("library", "hint"), KINDS)
def test_empty_lists_as_columns(library: str, hint: Any) -> None:
    """A column without rows has no type that could be wrong."""
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    make = module.DataFrame if library == "pandas" else module.table
    back = from_frame(columns(hint), make({name: [] for name in Row.__annotations__}), "output")
    assert {name: array.dtype for name, array in back.items()} == {
        name: array.dtype for name, array in ARRAYS.items()
    }  # fmt: skip


def test_frames_in_pandas() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = to_frame(columns(Frame[Row]), ARRAYS)
    assert list(map(str, frame.dtypes)) == [
        "Int64", "float32", "object", "boolean", "object", "float64"
    ]  # fmt: skip
    assert frame["age"].tolist()[2] == 2**62 + 1  # which a float could not hold
    assert frame["age"][1] is pandas.NA
    assert np.isnan(frame["height"][2])
    assert frame["name"].tolist() == ["ä", None, "c"]
    frame.loc[0, "city"] = "may be written to"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda pd: pd.DataFrame({"count": [1]}), r"Frame\[count, name\], got the columns count"),
        (lambda pd: [1], "got a list of int"),
        (lambda pd: pd.DataFrame({"count": pd.array([1, None], "Int64"), "name": ["a", "b"]}),
         r"column 'count' has 1 missing values; declare it with `\| None`"),
        (lambda pd: pd.DataFrame({"count": [1, 2], "name": ["a", None]}),
         "column 'name' has 1 missing values"),
        (lambda pd: pd.DataFrame({"count": [1.5], "name": ["a"]}),
         r"column 'count' is declared as int\[rows\], got an array of float64"),
        (lambda pd: pd.DataFrame({"count": [1], "name": [2]}), "elements of str, got int"),
    ],
)  # fmt: skip
def test_a_frame_that_differs_from_the_declaration(make: Any, says: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.raises(ResultError, match=says):
        from_frame(columns(Frame[Small]), make(pandas), "output 'output'")


def test_columns_of_other_types_and_more_columns() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({
        "count": pandas.array([1, 2], "Int8"), "name": pandas.Categorical(["b", "a"]), "more": 0,
    })  # fmt: skip
    back = from_frame(columns(Frame[Small]), frame, "output")
    assert {name: array.tolist() for name, array in back.items()} == {
        "count": [1, 2], "name": ["b", "a"]
    }  # fmt: skip


@model(max_batch_size=8)
def grown(people: Frame[Row]) -> Frame[Row]:
    people["age"] += 1
    return people.sort_values("city")


def test_a_batch_of_frames() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    sent = {name.replace(".", "__"): array for name, array in ARRAYS.items()}
    sent["name"] = objects("ä".encode(), b"", b"c")
    sent["city"] = objects(b"a", b"b", b"c")
    one = Request(**{name: array[:1] for name, array in sent.items()})
    two = Request(**{name: array[1:] for name, array in sent.items()})
    first, second = (values(response) for response in started(grown).execute([one, two]))
    assert first["age"] == [31]
    assert first["member.null"] == [True]
    assert (second["age"], second["age.null"]) == ([0, 2**62 + 2], [True, False])
    assert second["name"] == ["", "c"]


def test_rows_of_a_request_s_columns_agree() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")

    @model
    def names(people: Frame[Small]) -> list[str]:
        found: list[str] = people["name"].tolist()
        return found

    ready = started(names)
    good, bad = (Request(name=["a"], count=np.arange(size)) for size in (1, 2))
    assert values(ready.execute([good])[0]) == {"output": ["a"]}
    error = values(ready.execute([bad])[0])["error"]
    assert error[1] == "input 'name': dimension people.rows is 2, got 1 in shape [1]"


def test_a_frame_of_another_length_than_the_batch() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")

    @model(max_batch_size=8)
    def short(people: Frame[Small]) -> Frame[Small]:
        return people[:1]

    request = Request(name=["a", "b"], count=np.array([1, 2]))
    with pytest.raises(ResultError, match="'output' has 1 rows for the 2 rows"):
        started(short).execute([request])
