"""Tables of results, of the same kind as the tables of inputs: pandas, polars, Arrow, numpy, dicts.

`found` are the outputs' columns by name, with the table's rows first: masked where values are
missing, an object array of `str` for texts, and one of arrays for rows of different shapes.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.client import AnswerError, InputError
from headrace.client.tables import pyarrow
from headrace.client.values import Declared
from headrace.core.tensors import Array
from headrace.runner.schemas import table_schema, type_of


def keep_and_add(
    given: Any,
    keep: Sequence[str] | Mapping[str, Any],
    found: Mapping[str, Array],
    outputs: Mapping[str, Declared],
) -> Any:
    """A table like `given` of its columns `keep` and the ones `found`, of the declared outputs."""
    if isinstance(given, Mapping):
        return {name: given[name] for name in keep} | dict(found)
    if isinstance(given, np.ndarray):
        return _structured(np.atleast_1d(given), list(keep), found)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        frame: Any = given
        labels = [str(label) for label in frame.columns]
        kept = frame.iloc[:, [labels.index(name) for name in keep]]
        made = {name: _pandas_column(pandas, array) for name, array in found.items()}
        return kept.assign(**made) if keep else pandas.DataFrame(made, index=frame.index)
    return _arrow_table(given, keep, found, outputs)


def _arrow_table(
    given: Any,
    keep: Sequence[str] | Mapping[str, Any],
    found: Mapping[str, Array],
    outputs: Mapping[str, Declared],
) -> Any:
    arrow = pyarrow()
    batch = isinstance(given, arrow.RecordBatch)
    table = given if batch or isinstance(given, arrow.Table) else arrow.table(given)
    fields = [table.schema.field(name) for name in keep]
    columns = [table.column(name) for name in keep]
    if isinstance(keep, Mapping):
        fields = [arrow.field(name, type_of(kind)) for name, kind in keep.items()]
        columns = [one.cast(field.type) for one, field in zip(columns, fields, strict=True)]
    schema = table_schema(outputs, {})
    columns += [_arrow_column(name, found[name], schema.field(name).type) for name in found]
    whole = arrow.schema([*fields, *schema])
    if batch:
        return arrow.RecordBatch.from_arrays(columns, schema=whole)
    made = arrow.Table.from_arrays(columns, schema=whole)
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(given, polars.DataFrame):
        return polars.from_arrow(made)
    return made


def _arrow_column(name: str, array: Array, kind: Any) -> Any:
    """A column of an Arrow type: of values, or of lists for each further dimension."""
    arrow = pyarrow()
    if not arrow.types.is_list(kind) or array.ndim == 1:
        mask = np.ma.getmaskarray(array) if isinstance(array, np.ma.MaskedArray) else None
        values: Any = np.asarray(array)
        if arrow.types.is_list(kind):  # rows of different shapes
            values = [one.tolist() for one in array]
        try:
            return arrow.array(values, kind, mask=mask)
        except UnicodeEncodeError:
            raise AnswerError(f"output '{name}' has a text that is not UTF-8") from None
    rows, each = array.shape[:2]
    if rows * each >= 2**31:
        raise InputError(
            f"output '{name}' has {rows * each} values in all, more than Arrow's lists"
        )
    starts = np.arange(rows + 1, dtype=np.int32) * np.int32(each)
    items = array.reshape(rows * each, *array.shape[2:])
    return arrow.ListArray.from_arrays(starts, _arrow_column(name, items, kind.value_type))


def _pandas_column(pandas: Any, array: Array) -> Any:
    if array.ndim > 1:
        rows = np.empty(len(array), object)
        rows[:] = list(array)
        return rows
    if not isinstance(array, np.ma.MaskedArray):
        return array
    data, mask = np.asarray(array), np.ma.getmaskarray(array)
    if data.dtype.kind == "b":
        return pandas.arrays.BooleanArray(data.copy(), mask)
    if data.dtype.kind in "iu":
        return pandas.arrays.IntegerArray(data.copy(), mask)
    gap: Any = None if data.dtype == object else np.nan
    return np.where(mask, gap, data)


def _structured(given: Array, keep: Sequence[str], found: Mapping[str, Array]) -> Array:
    fields: list[Any] = [(name, given.dtype[name]) for name in keep]
    fields += [(name, array.dtype, array.shape[1:]) for name, array in found.items()]
    made = np.empty(len(given), fields)
    for name, column in [*((name, given[name]) for name in keep), *found.items()]:
        made[name] = column
    return made
