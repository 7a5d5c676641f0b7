"""Tables, columns and missing values as inputs of a model, and columns of its results."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from headrace.client import ClientError, InputError
from headrace.client.tables import table_of
from headrace.client.transport import Result
from headrace.client.values import ModelSignature, needs_signature, tensor_of
from headrace.core.call import InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor

NAMES = ["sepal_length", "width", "height"]
KINDS = ("pandas", "pyarrow", "numpy")


def matrix_signature(names: list[str] | None = None, datatype: str = "FP32") -> ModelSignature:
    """A model whose only input is a matrix, trained with columns of these names."""
    text = "" if names is None else str({"x": names}).replace("'", '"')
    return ModelSignature.of(
        {
            "inputs": [{"name": "x", "datatype": datatype, "shape": [-1, 3]}],
            "outputs": [],
            "properties": {"columns": text},
        },
        {"max_batch_size": 8},
    )


def columns_signature() -> ModelSignature:
    """A model with an input for each column, of which some have one of missing values."""
    inputs = {
        "name": "BYTES", "age": "INT64", "age.null": "BOOL", "size": "FP32",
        "note": "BYTES", "note.null": "BOOL", "debt": "FP64", "debt.null": "BOOL",
    }  # fmt: skip
    return ModelSignature.of(
        {
            "inputs": [{"name": n, "datatype": d, "shape": [-1]} for n, d in inputs.items()],
            "outputs": [],
        },
        {
            "max_batch_size": 8,
            "input": [{"name": name, "optional": name.endswith(".null")} for name in inputs],
        },
    )


def frame(kind: str, columns: dict[str, list[Any]]) -> Any:
    """A table of some library."""
    if kind == "numpy":
        kinds = [(name, np.array(values).dtype) for name, values in columns.items()]
        return np.array([*zip(*columns.values(), strict=True)], kinds)
    library = import_module(kind)
    return library.DataFrame(columns) if kind == "pandas" else library.table(columns)


def sent(tensors: list[Tensor]) -> dict[str, list[Any]]:
    """Elements by tensor."""
    return {t.name: np.asarray(t.array).tolist() for t in tensors}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_columns_are_put_into_the_order_of_the_training(kind: str) -> None:
    values = {"height": [3, 6], "sepal_length": [1, 4], "width": [2, 5]}
    table = frame(kind, values)
    for given in (table, {"x": table}):
        assert matrix_signature(NAMES).arranges(given)
        found = sent(matrix_signature(NAMES).tensors("m", given))
        assert found == {"x": [[1, 2, 3], [4, 5, 6]]}
    spaced = frame(kind, {name.replace("_", " "): column for name, column in values.items()})
    assert sent(matrix_signature(NAMES).tensors("m", {"x": spaced}))["x"][0] == [1, 2, 3]


@pytest.mark.parametrize(("names", "text"), [
    (["height", "width", "length"],
     "the table lacks column 'sepal_length' and has the further column 'length'; the model was"
     " trained with columns 'sepal_length', 'width', 'height'"),
    (["height", "sepal_length"], "the table lacks column 'width'; the model"),
    ([*NAMES, "id"], "the table has the further column 'id'; the model was trained"),
])  # fmt: skip
def test_missing_and_further_columns_are_named(kind: str, names: list[str], text: str) -> None:
    table = frame(kind, {name: [1.5] for name in names})
    for given in (table, {"x": table}):
        with pytest.raises(InputError, match=text):
            matrix_signature(NAMES).tensors("m", given)


def test_a_model_without_names_takes_columns_as_they_are(kind: str) -> None:
    table = frame(kind, {"c": [3], "b": [2], "a": [1]})
    for signature in (matrix_signature(), matrix_signature(["0", "1", "2"])):
        assert sent(signature.tensors("m", {"x": table})) == {"x": [[3, 2, 1]]}
    numbered = frame(kind, {"2": [3], "1": [2], "0": [1]})
    assert sent(matrix_signature(["0", "1", "2"]).tensors("m", numbered)) == {"x": [[1, 2, 3]]}


def test_columns_twice() -> None:
    pandas = import_module("pandas")
    twice = pandas.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])
    with pytest.raises(InputError, match="the table has several columns 'a'"):
        matrix_signature(NAMES).tensors("m", {"x": twice})


def test_gaps_in_a_matrix_are_nan() -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    columns = {"sepal_length": [1.0, None], "width": [None, 2], "height": [True, False]}
    tables = [
        pandas.DataFrame(columns), arrow.table(columns),
        pandas.DataFrame({"height": columns["height"], "sepal_length": [1.0, np.nan],
                          "width": pandas.array(columns["width"], "Int64")}),
    ]  # fmt: skip
    for table in tables:
        found = np.asarray(matrix_signature(NAMES).tensors("m", table)[0].array)
        np.testing.assert_array_equal(found, [[1, np.nan, 1], [np.nan, 2, 0]])
        with pytest.raises(
            InputError, match=r"column '(sepal_length|width)': it has missing values \(1\)"
        ):
            matrix_signature(NAMES, "INT32").tensors("m", table)


def test_columns_without_any_value() -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    columns = {"sepal_length": [1.0, 2.0], "width": [None, None], "height": [3, 4]}
    for table in (pandas.DataFrame(columns), arrow.table(columns)):
        found = np.asarray(matrix_signature(NAMES).tensors("m", table)[0].array)
        np.testing.assert_array_equal(found, [[1, np.nan, 3], [2, np.nan, 4]])
    people = {**PEOPLE, "age": [None] * 3, "note": [None] * 3}
    for kind in ("pandas", "pyarrow"):
        got = sent(columns_signature().tensors("m", frame(kind, people)))
        assert (got["age"], got["age.null"]) == ([0] * 3, [True] * 3)
        assert (got["note"], got["note.null"]) == ([b""] * 3, [True] * 3)


def test_a_row_of_a_frame_is_put_into_the_order_of_the_training() -> None:
    pandas = import_module("pandas")
    table = pandas.DataFrame({"height": [3, 6], "sepal_length": [1.5, 4], "width": [2, None]})
    signature = matrix_signature(NAMES)
    assert signature.arranges({"x": table.iloc[0]})
    assert needs_signature(table.iloc[0])
    assert sent(signature.tensors("m", {"x": table.iloc[0]})) == {"x": [[1.5, 2, 3]]}
    rows = [row for _, row in table.iterrows()]
    assert signature.arranges({"x": rows})
    assert needs_signature(rows)
    both = np.asarray(signature.tensors("m", {"x": rows})[0].array)
    np.testing.assert_array_equal(both, [[1.5, 2, 3], [4, np.nan, 6]])
    with pytest.raises(InputError, match="the rows in it have different labels"):
        signature.tensors("m", {"x": [rows[0], rows[1].iloc[::-1]]})
    one = np.array([(3, 1, 2)], [(name, "f4") for name in ("height", *NAMES[:2])])
    assert sent(signature.tensors("m", {"x": one.reshape(())})) == {"x": [[1, 2, 3]]}
    with pytest.raises(InputError, match="the table lacks column 'width'"):
        signature.tensors("m", {"x": table.iloc[0].drop("width")})
    for labels in (None, ["r1", "r2", "r3"]):
        values = pandas.Series([1.0, 2.0, 3.0], labels)
        assert sent(signature.tensors("m", {"x": values})) == {"x": [[1, 2, 3]]}


PEOPLE: dict[str, Any] = {
    "name": ["Ada", "Bob", "Cy"], "age": [36, None, 2**62 + 1], "size": [1.5, None, 2],
    "note": ["x", None, "z"], "debt": [1.0, None, 3.0],
}  # fmt: skip


def test_missing_values_are_marked() -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    nullable = pandas.DataFrame({**PEOPLE, "age": pandas.array(PEOPLE["age"], "Int64")})
    masked = np.ma.MaskedArray([36, 0, 2**62 + 1], [False, True, False])
    given = [
        PEOPLE, nullable, arrow.table(PEOPLE), dict(nullable.items()), {**PEOPLE, "age": masked},
        {name: np.array(column, object) for name, column in PEOPLE.items()},
    ]  # fmt: skip
    for values in given:
        found = sent(columns_signature().tensors("m", values))
        gaps = [False, True, False]
        assert {name: found[name] for name in found if name.endswith(".null")} == {
            "age.null": gaps, "note.null": gaps, "debt.null": gaps,
        }  # fmt: skip
        assert (found["age"], found["note"]) == ([36, 0, 2**62 + 1], [b"x", b"", b"z"])
        assert np.isnan(found["debt"][1])
        assert np.isnan(found["size"][1])


def test_nan_is_missing_where_that_can_be_told() -> None:
    given = PEOPLE | {"age": np.array([36, np.nan, 7]), "debt": [1.0, float("nan"), 3.0]}
    found = sent(columns_signature().tensors("m", given))
    assert (found["age"], found["age.null"]) == ([36, 0, 7], [False, True, False])
    assert found["debt.null"] == [False, True, False]


def test_nothing_is_marked_without_need() -> None:
    given = {name: [column[0], column[2]] for name, column in PEOPLE.items()}
    assert not [name for name in sent(columns_signature().tensors("m", given)) if "null" in name]
    own = given | {"age.null": [True, False]}
    assert sent(columns_signature().tensors("m", own))["age.null"] == [True, False]
    empty = {name: [None, None] for name in PEOPLE} | {"name": ["a", "b"]}
    assert sent(columns_signature().tensors("m", empty))["note.null"] == [True, True]


@pytest.mark.parametrize(("given", "text"), [
    ({**PEOPLE, "name": ["Ada", None, "Cy"]},
     r"has missing values \(1\), and the model has no input 'name\.null' that would mark them"),
    ({**PEOPLE, "years": [1, 2, 3]}, "has no input 'years', only name, age"),
    ({n: c for n, c in PEOPLE.items() if n != "age"}, "needs the input age INT64"),
])  # fmt: skip
def test_tables_that_do_not_fit_the_inputs(given: dict[str, Any], text: str) -> None:
    for values in (given, frame("pandas", given), frame("pyarrow", given)):
        with pytest.raises(InputError, match=text):
            columns_signature().tensors("m", values)


def test_no_mapping_and_no_table() -> None:
    text = r"takes values by the names of its inputs, or a table, got list; its inputs: x FP32"
    with pytest.raises(InputError, match=text):
        matrix_signature(NAMES).tensors("m", [1, 2, 3])


def test_columns_without_a_model() -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    for column in (pandas.Series([1, 2], dtype="Int64"), arrow.chunked_array([[1], [2]])):
        assert not needs_signature(column)
        assert tensor_of("x", column).datatype is Datatype.INT64
    assert needs_signature(pandas.Series([1, None], dtype="Int64"))
    assert needs_signature([1, None])
    assert not needs_signature([1, 2])


def test_moments_are_texts() -> None:
    pandas = import_module("pandas")
    moments = pandas.to_datetime(["2026-01-02", "2026-01-03T04:05"], format="ISO8601")
    people = frame("pandas", {name: column[::2] for name, column in PEOPLE.items()})
    found = sent(columns_signature().tensors("m", people.assign(note=moments)))
    assert found["note"][1].startswith(b"2026-01-03T04:05:00")
    assert table_of(moments) is None


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_moments_that_are_missing(shape: tuple[int, ...]) -> None:
    moments = np.array(["2026-01-02", "NaT"], "M8[s]").reshape(shape)
    assert needs_signature(moments)
    given = {"x": moments.copy()}
    found = np.asarray(vector_signature("FP64", shape).tensors("m", given)[0].array)
    np.testing.assert_array_equal(found, np.reshape([1767312000, np.nan], shape))
    np.testing.assert_array_equal(given["x"], moments)
    for datatype in ("INT64", "BYTES"):
        with pytest.raises(InputError, match=r"it has missing values \(1\)"):
            vector_signature(datatype, shape).tensors("m", given)


def test_moments_that_are_missing_as_texts() -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    moments = pandas.Series(pandas.to_datetime(["2026-01-02", None, "2026-01-03"]))
    for unit in ("ns", "us", "s"):
        for note in (
            moments.astype(f"datetime64[{unit}]"),
            moments.astype(f"timestamp[{unit}][pyarrow]"),
        ):
            people = frame("pandas", PEOPLE).assign(note=note)
            found = sent(columns_signature().tensors("m", people))
            assert [text[:19] for text in found["note"]] == [
                b"2026-01-02T00:00:00", b"", b"2026-01-03T00:00:00",
            ]  # fmt: skip
            assert found["note.null"] == [False, True, False]
    zoned = moments.dt.tz_localize("Europe/Berlin")
    for given in (zoned, zoned.astype(pandas.ArrowDtype(arrow.timestamp("ns", "Europe/Berlin")))):
        tensor = vector_signature("FP64", (3,)).tensors("m", {"x": given})[0]
        np.testing.assert_array_equal(tensor.array, [1767308400, np.nan, 1767394800])


def test_moments_of_any_form() -> None:
    expected = [b"2026-01-02T00:00:00"]
    for given in (np.array(["2026-01-02"], ">M8[s]"), np.datetime64("2026-01-02", "s")):
        assert np.ravel(np.asarray(tensor_of("x", given).array)).tolist() == expected
    found = vector_signature("BYTES", (1,)).tensors("m", {"x": np.array(["2026-01-02"], ">M8[s]")})
    assert sent(found) == {"x": expected}


def test_arrow_arrays_are_columns() -> None:
    arrow = import_module("pyarrow")
    signature = columns_signature()
    batch = arrow.record_batch({**PEOPLE, "name": ["a", "b", "c"], "note": ["x", None, "z"]})
    given = {name: batch.column(name) for name in batch.schema.names}
    assert repr(sent(signature.tensors("m", given))) == repr(sent(signature.tensors("m", batch)))
    booleans = tensor_of("x", arrow.array([True, False]))
    assert (booleans.datatype, np.asarray(booleans.array).tolist()) == ("BOOL", [True, False])


def test_a_table_that_can_be_read_once() -> None:
    arrow = import_module("pyarrow")
    table = arrow.table({"x": [1, 2, 3]})
    signature = vector_signature("INT64", (-1,))
    for given in (table.to_reader(), {"x": table.to_reader()}):
        with pytest.raises(InputError, match=r"can be read once: its read_all\(\) gives a table"):
            signature.tensors("m", given)
    assert sent(signature.tensors("m", table.to_reader().read_all())) == {"x": [1, 2, 3]}


def vector_signature(datatype: str, shape: tuple[int, ...]) -> ModelSignature:
    tensor = {"name": "x", "datatype": datatype, "shape": shape}
    return ModelSignature.of({"inputs": [tensor], "outputs": []}, {})


def test_numbers_among_texts_are_no_texts() -> None:
    people = frame("pandas", PEOPLE).assign(note=[1, "b", "c"])
    with pytest.raises(InputError, match="expected texts for BYTES, got 1"):
        columns_signature().tensors("m", people)


def result(**outputs: Array) -> Result:
    """A response with these outputs."""
    names = {"O": Datatype.BYTES, "b": Datatype.BOOL, "i": Datatype.INT64, "f": Datatype.FP64}
    kinds = {name: names.get(array.dtype.kind, names["O"]) for name, array in outputs.items()}
    tensors = [Tensor(name.replace("_", "."), kinds[name], a) for name, a in outputs.items()]
    return Result(InferResponse("m", "1", "", tensors, Timing(0, 0, 2)))


def test_columns_of_a_result() -> None:
    pandas = import_module("pandas")
    mask = np.array([False, True])
    found = result(
        age=np.array([36, 0]), age_null=mask, name=np.array([b"\xc3\xa4", b""], object),
        name_null=mask, score=np.array([[0.5], [1.5]]), both=np.array([[1, 2], [3, 4]]),
    )  # fmt: skip
    assert list(found) == ["age", "name", "score", "both"]
    assert found["age"].tolist() == [36, None]
    assert found.texts("name") == ["ä", None]
    columns = {name: array.tolist() for name, array in found.columns().items()}
    assert columns == {
        "age": [36, None], "name": ["ä", None], "score": [0.5, 1.5], "both.0": [1, 3],
        "both.1": [2, 4],
    }  # fmt: skip
    table = pandas.DataFrame(found.columns())
    assert table["age"].isna().tolist() == [False, True]
    one = result(age=np.array([36, 0]), age_null=mask)
    assert pandas.DataFrame(dict(one))["age"].isna().tolist() == [False, True]
    none = result(both=np.zeros((0, 2)), score=np.zeros((0, 1)), name=np.zeros(0, object))
    assert {name: array.shape for name, array in none.columns().items()} == {
        "both.0": (0,), "both.1": (0,), "score": (0,), "name": (0,),
    }  # fmt: skip
    with pytest.raises(ClientError, match="are not columns of one table"):
        result(a=np.array([1]), b=np.array([1, 2])).columns()


def test_an_output_that_only_looks_like_a_mask() -> None:
    found = result(age=np.array([1, 2]), age_null=np.array([True]))
    assert list(found) == ["age", "age.null"]
