"""Tables of every kind, with columns of every type, through models."""

from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Runner
from headrace.client import InputError
from headrace.core.datatypes import NUMPY, Datatype
from headrace.runner.schemas import arrow_type
from headrace.runner.tables import TableCall, Wanted

VALUES: dict[Datatype, list[Any]] = {
    datatype: [True, False, True] if datatype is Datatype.BOOL
    else ["a", "", "\u00e9"] if datatype is Datatype.BYTES else [1, 0, 3]
    for datatype in Datatype
}  # fmt: skip
KINDS = ("dict", "numpy", "pandas", "arrow", "batch", "polars")


@pytest.fixture(scope="module")
def keeper(models: Path) -> Runner:
    """A runner that keeps the engine of all tests of this file."""
    runner = Runner(models, "matrix")
    runner(np.ones((1, 2), np.float32))
    return runner


def as_kind(kind: str, columns: dict[str, Any]) -> Any:
    """Columns as a table; skips without the library."""
    if kind == "dict":
        return columns
    if kind == "numpy":
        arrays = {name: np.array(column) for name, column in columns.items()}
        made = np.empty(len(next(iter(arrays.values()))), [(n, a.dtype) for n, a in arrays.items()])
        for name, array in arrays.items():
            made[name] = array
        return made
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(columns)
    if kind == "polars":
        return pytest.importorskip("polars").DataFrame(columns)
    table = pytest.importorskip("pyarrow").table(columns)
    return table if kind == "arrow" else table.to_batches()[0]


def listed(table: Any) -> dict[str, Any]:
    """The columns of any kind of table as lists."""
    if isinstance(table, dict):
        return {name: np.asarray(column).tolist() for name, column in table.items()}
    if isinstance(table, np.ndarray):
        return {name: table[name].tolist() for name in table.dtype.names or ()}
    if hasattr(table, "to_pydict"):
        found: dict[str, Any] = table.to_pydict()
        return found
    if hasattr(table, "to_dicts"):
        return dict(table.to_dict(as_series=False))
    return {
        str(name): [getattr(item, "tolist", lambda item=item: item)() for item in column]
        for name, column in table.items()
    }


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tables(kind: str, models: Path) -> None:
    given = as_kind(kind, {"id": ["x", "y", "z"], "a": [1.5, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    found = Runner(models, "matrix", keep=["id"])(given)
    assert type(found) is type(given)
    assert listed(found) == {"id": ["x", "y", "z"], "OUTPUT0": [[1.5, 4], [2, 5], [3, 6]]}
    several = Runner(models, "add_sub", columns={"INPUT0": "a", "INPUT1": "b"}, rows=2)
    with pytest.raises(InputError, match="expected whole numbers for INT32"):
        several(given)
    given = as_kind(kind, {"b": [4, 5, 6], "further": [0, 0, 0], "a": [1, 2, 3]})
    assert listed(several(given)) == {"OUTPUT0": [5, 7, 9], "OUTPUT1": [-3, -3, -3]}


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("datatype", list(Datatype))
def test_each_datatype_in_and_out(datatype: Datatype, models: Path) -> None:
    runner = Runner(models, f"one_{datatype}")
    for kind in KINDS[:5]:
        array = np.array(VALUES[datatype], object if datatype is Datatype.BYTES else None)
        if kind == "numpy" and datatype is Datatype.BYTES:
            continue
        found = runner(as_kind(kind, {"INPUT0": array}))
        assert listed(found) == {"OUTPUT0": VALUES[datatype]}
        if kind == "arrow":
            assert found.schema.equals(runner.schema)
            assert found.schema.field(0).type == arrow_type(datatype)
        if kind == "pandas":
            assert dict(found.dtypes) == dict(runner.meta.dtypes)
        if kind == "dict":
            expected = object if datatype is Datatype.BYTES else NUMPY[datatype]
            assert found["OUTPUT0"].dtype == (np.float32 if datatype is Datatype.BF16 else expected)


def arrow_columns() -> list[tuple[str, Any, list[Any]]]:
    """Models, columns of Arrow and what comes back, in the order of the rules of docs/runner.md."""
    arrow = import_module("pyarrow")
    moments = arrow.array([0, 10**15], arrow.timestamp("us", "UTC"))
    chunks = arrow.chunked_array([arrow.array([1.5]), arrow.array([2.5])])
    return [
        ("one_FP32", chunks, [1.5, 2.5]),
        ("one_FP64", arrow.array([Decimal("0.1"), Decimal("2")]), [0.1, 2]),
        ("one_INT64", arrow.array([Decimal(2**60 + 1), Decimal(2)]), [2**60 + 1, 2]),
        ("one_BYTES", moments, ["1970-01-01T00:00:00.000000", "2001-09-09T01:46:40.000000"]),
        ("one_INT64", moments, [0, 10**18]),
        ("one_FP64", moments, [0, 1e9]),
        ("one_FP64", arrow.array([1, 1500], arrow.duration("ms")), [0.001, 1.5]),
        ("one_BYTES", arrow.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        ("one_INT64", arrow.array([7, 9]).dictionary_encode(), [7, 9]),
        ("one_INT64", arrow.array([True, False]), [1, 0]),
        ("one_BYTES", arrow.array(["x", "y"], arrow.large_string()), ["x", "y"]),
        ("one_BYTES", arrow.array(["x", "y"], arrow.string_view()), ["x", "y"]),
        ("one_BYTES", arrow.array([b"x", b"y"]), ["x", "y"]),
        ("matrix", arrow.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ("matrix", arrow.array([[1, 2], [3, 4]], arrow.large_list(arrow.float16())),
         [[1, 2], [3, 4]]),
        ("any_length", arrow.array([[1, 2, 3], [3, 4, 5]], arrow.list_(arrow.float32(), 3)),
         [[1, 2, 3], [3, 4, 5]]),
        ("images", arrow.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
         [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        ("images", arrow.array([[1, 2, 3, 4], [5, 6, 7, 8]]), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
    ]  # fmt: skip


@pytest.mark.usefixtures("keeper")
def test_columns_of_arrow_and_pandas(models: Path) -> None:
    arrow = import_module("pyarrow")
    for model, column, expected in arrow_columns():
        table = arrow.table({"INPUT0": column})
        assert listed(Runner(models, model)(table)) == {"OUTPUT0": expected}, (model, column.type)
        sliced = Runner(models, model, rows=1)(table.slice(1))
        assert listed(sliced) == {"OUTPUT0": expected[1:]}
        if "view" in str(column.type) or "2001" in str(expected) or column.type == "bool":
            continue
        frame = Runner(models, model)(table.to_pandas())
        assert listed(frame) == {"OUTPUT0": expected}, (model, column.type)


@pytest.mark.usefixtures("keeper")
def test_nulls_are_refused_with_their_row(models: Path) -> None:
    arrow, pandas = import_module("pyarrow"), import_module("pandas")
    rows: list[Any] = [1.0] * 20 + [None, 2.0, None]
    frame = pandas.DataFrame({"INPUT0": pandas.array(rows, "Float64")})
    for model in ("one_FP32", "one_INT32"):
        for given in (
            arrow.table({"INPUT0": rows}), frame, {"INPUT0": rows},
            {"INPUT0": np.ma.MaskedArray(np.ones(23), [one is None for one in rows])},
            pandas.DataFrame({"INPUT0": np.array(rows, object)}),
        ):  # fmt: skip
            with pytest.raises(InputError, match=r"row 20 is null, and .* no input 'INPUT0\.null'"):
                Runner(models, model)(given)
    nan = [float("nan") if one is None else one for one in rows]
    for given in (arrow.table({"INPUT0": nan}), pandas.DataFrame({"INPUT0": nan})):
        [found] = listed(Runner(models, "one_FP32")(given)).values()
        np.testing.assert_array_equal(found, nan)
        with pytest.raises(InputError, match="row 20 is null"):
            Runner(models, "one_INT32")(given)
    two = arrow.table({"a": [1.0, 2], "b": [1.0, None]})
    with pytest.raises(InputError, match="column 'b': row 1 is null"):
        Runner(models, "matrix")(two)
    for items, text in (
        ([[1.0, 2], None], "row 1 is null"), ([[1.0, 2], [3.0, None]], "row 1 has a list with a n"),
        ([[1.0, 2], [3.0]], "differ in length: 2 in row 0, 1 in row 1"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            Runner(models, "matrix")(arrow.table({"INPUT0": items}))


@pytest.mark.usefixtures("keeper")
def test_nulls_that_the_model_marks(models: Path) -> None:
    pandas = import_module("pandas")
    runner = Runner(models, "people", keep=["age"])
    ages, names = [36, None, 7, 2, None], ["a", "b", "c", "d", "e"]
    for kind in ("arrow", "batch", "dict", "polars"):
        found = runner(as_kind(kind, {"name": names, "age": ages}))
        if kind == "dict":
            assert found["adult"].tolist() == [True, None, False, False, None]
            continue
        assert listed(found) == {
            "age": ages, "name": names, "adult": [True, None, False, False, None],
        }  # fmt: skip
    frame = pandas.DataFrame({"name": names, "age": pandas.array(ages, "Int64")})
    found = Runner(models, "people", outputs=["adult"])(frame)
    assert found["adult"].isna().tolist() == [False, True, False, False, True]
    meta = Runner(models, "people", outputs=["adult"]).meta
    assert dict(found.dtypes) == dict(meta.dtypes) == {"adult": pandas.BooleanDtype()}
    assert Runner(models, "people").ddl == "`name` STRING, `adult` BOOLEAN"


@pytest.mark.usefixtures("keeper")
def test_pandas_keeps_index_labels_and_types(models: Path) -> None:
    pandas = import_module("pandas")
    moments = pandas.date_range("2026-01-01", periods=3, tz="Europe/Berlin")
    frame = pandas.DataFrame(
        {"a": [1.0, 2, 3], 7: moments, "b": [4.0, 5, 6]}, index=["x", "y", "z"]
    )
    found = Runner(models, "matrix", keep=["7"])(frame)
    assert list(found.columns) == [7, "OUTPUT0"]
    assert found.index.tolist() == ["x", "y", "z"]
    assert found[7].dtype == frame[7].dtype
    [seconds] = listed(Runner(models, "one_FP64", columns={"INPUT0": "7"})(frame)).values()
    assert seconds[0] == 1767222000  # midnight in Berlin
    category = pandas.DataFrame({"INPUT0": pandas.Categorical(["u", "v", "u"])})
    assert listed(Runner(models, "one_BYTES")(category)) == {"OUTPUT0": ["u", "v", "u"]}


@pytest.mark.usefixtures("keeper")
def test_the_order_of_columns(models: Path) -> None:
    given = {"b": [1.0, 2.0], "a": [3.0, 4.0], "id": [5, 6]}
    assert listed(Runner(models, "trained", keep=["id"])(given))["OUTPUT0"] == [[3, 1], [4, 2]]
    for names, expected in ((["b", "a"], [[3, 1], [4, 2]]), (["id", "a"], [[5, 3], [6, 4]])):
        runner = Runner(models, "trained", columns={"INPUT0": names})
        assert listed(runner(given))["OUTPUT0"] == expected
    with pytest.raises(InputError, match="further column 'id'"):
        Runner(models, "trained")(given)


@pytest.mark.usefixtures("keeper")
def test_tables_without_rows(models: Path) -> None:
    for kind in ("dict", "pandas", "arrow"):
        for model in ("matrix", "one_BYTES", "one_BF16", "any_length", "people"):
            runner = Runner(models, model)
            names = [*runner.signature.inputs][:1] if model != "people" else ["name", "age"]
            found = runner(as_kind(kind, {name: np.zeros(0) for name in names}))
            if kind == "arrow":
                assert found.schema.equals(runner.schema)
                assert found.num_rows == 0
            if kind == "pandas":
                assert dict(found.dtypes) == dict(runner.meta.dtypes)


@pytest.mark.usefixtures("keeper")
def test_models_without_batches(models: Path) -> None:
    given = {"INPUT0": np.arange(40, dtype=np.float32).reshape(20, 2)}
    found = Runner(models, "unbatched", rows=7)(given)
    np.testing.assert_array_equal(found["OUTPUT0"], given["INPUT0"])


def test_rows_of_several_lengths(models: Path, keeper: Runner) -> None:
    """Requests of one table whose outputs differ in shape."""
    assert keeper is not None
    signature = Runner(models, "any_length").signature
    arrow = import_module("pyarrow")
    wanted = Wanted("any_length", "", {}, [], None, 2)
    call = TableCall(wanted, signature, arrow.table({"INPUT0": [[1.0]] * 4}))
    assert len(list(call.requests())) == 2
    asked = Runner(models, "any_length")
    complete = []
    for rows in ([[1.0, 2], [3, 4]], [[5.0], [6]]):
        call.add(asked(INPUT0=rows))
        complete.append(call.complete)
    assert complete == [False, True]
    assert listed(call.made()) == {"OUTPUT0": [[1, 2], [3, 4], [5], [6]]}


class OfAnotherLibrary:
    """A tensor that offers DLPack alone."""

    def __init__(self, array: Any, device: int = 1) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


@pytest.mark.usefixtures("keeper")
def test_tensors_of_other_libraries(models: Path) -> None:
    runner = Runner(models, "matrix")
    ones = np.ones((3, 2), np.float32)
    assert runner(OfAnotherLibrary(ones))["OUTPUT0"].tolist() == [[1, 1]] * 3
    assert runner(INPUT0=OfAnotherLibrary(ones))["OUTPUT0"].tolist() == [[1, 1]] * 3
    with pytest.raises(InputError, match=r"on a device .* copy it to the CPU"):
        runner(OfAnotherLibrary(ones, device=2))
