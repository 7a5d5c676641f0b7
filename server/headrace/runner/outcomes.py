"""Tables of a runner's results, of the kind that its inputs came in."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.client.tables import pyarrow
from headrace.core.tensors import Array


def table_like(given: Any, keep: Sequence[str], found: Mapping[str, Array], schema: Any) -> Any:
    """A table of the kind of `given`: columns `keep` of it, and the outputs `found` by name.

    Outputs have the table's rows first; `schema()` is the schema of their columns in Arrow.
    """
    if isinstance(given, Mapping):
        return {name: given[name] for name in keep} | dict(found)
    if isinstance(given, np.ndarray):
        return _structured(given, keep, found)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        columns = {name: _pandas_column(pandas, array) for name, array in found.items()}
        return given[list(keep)].assign(**columns) if keep else pandas.DataFrame(
            columns, index=given.index
        )  # fmt: skip
    arrow = pyarrow()
    table = given if isinstance(given, arrow.Table | arrow.RecordBatch) else arrow.table(given)
    arrays = [table.column(name) for name in keep]
    kinds = [field.type for field in schema()][-len(found) :] if found else []
    arrays += [arrow_array(array, kind) for array, kind in zip(found.values(), kinds, strict=True)]
    names = [*keep, *found]
    if isinstance(given, arrow.RecordBatch):
        return arrow.RecordBatch.from_arrays(arrays, names)
    made = arrow.Table.from_arrays(arrays, names)
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(given, polars.DataFrame):
        return polars.from_arrow(made)
    return made


def arrow_array(array: Array, kind: Any) -> Any:
    """An array as Arrow's of a type of `schemas`: of rows, or nested lists of them."""
    arrow = pyarrow()
    if not arrow.types.is_list(kind):
        mask = np.ma.getmaskarray(array).reshape(-1) if np.ma.isMaskedArray(array) else None
        flat = np.asarray(array).reshape(-1)
        if flat.dtype == object or str(flat.dtype) != "bfloat16":
            return arrow.array(flat, kind, mask=mask)
        return arrow.array(flat.astype(np.float32), kind, mask=mask)
    rows, each = array.shape[0], array.shape[1]
    inner = arrow_array(array.reshape(rows * each, *array.shape[2:]), kind.value_type)
    starts = np.arange(0, rows * each + 1, each, np.int32) if each else np.zeros(rows + 1, np.int32)
    return arrow.ListArray.from_arrays(starts, inner)


def _pandas_column(pandas: Any, array: Array) -> Any:
    if array.ndim > 1:
        return pandas.Series(list(array), dtype=object).array
    if not isinstance(array, np.ma.MaskedArray):
        return array
    data, mask = np.asarray(array), np.ma.getmaskarray(array)
    kinds = {"b": "BooleanArray", "i": "IntegerArray", "u": "IntegerArray"}
    if (made := kinds.get(data.dtype.kind)) is not None:
        return getattr(pandas.arrays, made)(data.copy(), mask)
    gap: Any = None if data.dtype == object else np.nan
    return np.where(mask, gap, data)


def _structured(given: Array, keep: Sequence[str], found: Mapping[str, Array]) -> Array:
    fields = [(name, given.dtype[name]) for name in keep]
    fields += [(name, array.dtype, array.shape[1:]) for name, array in found.items()]  # type: ignore[misc]
    made = np.empty(len(np.atleast_1d(given)), fields)
    for name in keep:
        made[name] = given[name]
    for name, array in found.items():
        made[name] = array
    return made
