"""Data frames of pandas and pyarrow: columns from tensors, and tensors from columns.

The protocol has no nulls. A column that may have some is two tensors: its values, and under the
name `<column>.null` a BOOL for each row that says whether the value is missing. A request may leave
the second out. What stands in place of a missing value is NaN, 0, False or "".

The libraries are imported when they are first needed, by their names: a worker without them runs
all other models.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from headrace.workers.elements import Array
from headrace.workers.functions.annotations import Column, Columns, Dim, Form, Tensor
from headrace.workers.functions.values import ResultError, describe, dtype_of, fitted

_PANDAS = {
    "BOOL": "boolean", "UINT8": "UInt8", "UINT16": "UInt16", "UINT32": "UInt32", "UINT64": "UInt64",
    "INT8": "Int8", "INT16": "Int16", "INT32": "Int32", "INT64": "Int64",
}  # fmt: skip


def to_frame(declared: Columns, arrays: Mapping[str, Array]) -> Any:
    """The data frame of these columns; a mask of nulls need not be there."""
    library = import_module(declared.library)
    make = _pandas_column if declared.library == "pandas" else _arrow_column
    columns = {
        column.name: make(library, column, arrays[column.name], arrays.get(f"{column.name}.null"))
        for column in declared.columns
    }
    return library.DataFrame(columns) if declared.library == "pandas" else library.table(columns)


def from_frame(declared: Columns, frame: Any, where: str) -> dict[str, Array]:
    """The tensors of a data frame; raises `ResultError` for one that is not as declared.

    Columns that are not declared are left out.
    """
    library = import_module(declared.library)
    pandas = declared.library == "pandas"
    kind = library.DataFrame if pandas else library.Table
    if not isinstance(frame, kind):
        raise ResultError(f"{where} is declared as {declared}, got {describe(frame)}")
    names = list(frame.columns) if pandas else frame.column_names
    split = _split_pandas if pandas else _split_arrow
    arrays: dict[str, Array] = {}
    for column in declared.columns:
        if column.name not in names:
            raise ResultError(
                f"{where} is declared as {declared}, got the columns"
                f" {', '.join(map(str, names)) or 'of nothing'}"
            )
        values, nulls = split(library, column, frame[column.name])
        at = f"column '{column.name}'"
        tensor = Tensor(column.element, (Dim("rows"),), Form.ARRAY, np.ndarray)
        if column.nullable:
            arrays[f"{column.name}.null"] = nulls
        elif nulls.any() and not _is_float(column):
            raise ResultError(
                f"{at} has {int(nulls.sum())} missing values; declare it with `| None`"
            )
        arrays[column.name] = fitted(values, tensor, at)
    return arrays


def _is_float(column: Column) -> bool:
    return dtype_of(column.element).kind == "f"


def _blank(column: Column) -> Any:
    """What stands in place of a missing value."""
    if column.element.datatype == "BYTES":
        return "" if column.element.text else b""
    return float("nan") if _is_float(column) else dtype_of(column.element).type(0)


def _pandas_column(pandas: Any, column: Column, values: Array, nulls: Array | None) -> Any:
    """Missing numbers are NaN, as pandas has it, or NA; missing text is None."""
    if not column.nullable:
        return values
    if _is_float(column) or column.element.datatype == "BYTES":
        if nulls is None or not nulls.any():
            return values
        values = values.copy()
        values[nulls] = np.nan if _is_float(column) else None
        return values
    series = pandas.array(values, dtype=_PANDAS[column.element.datatype])
    if nulls is not None:
        series[nulls] = pandas.NA
    return series


def _split_pandas(pandas: Any, column: Column, series: Any) -> tuple[Any, Array]:
    nulls = np.asarray(series.isna(), np.bool_)
    present = np.asarray(series[~nulls] if nulls.any() else series)
    if present.dtype == object and column.element.datatype != "BYTES":
        present = np.asarray(present.tolist())  # its own types of nullable numbers become that
    return _with_blanks(column, present, nulls), nulls


def _arrow_column(arrow: Any, column: Column, values: Array, nulls: Array | None) -> Any:
    if column.element.datatype == "BYTES":
        kind = arrow.string() if column.element.text else arrow.binary()
    else:
        kind = arrow.from_numpy_dtype(values.dtype)
    return arrow.array(values, kind, mask=nulls)


def _split_arrow(arrow: Any, column: Column, chunks: Any) -> tuple[Any, Array]:
    nulls = np.asarray(chunks.is_null(), np.bool_)
    chunks = chunks.drop_null()
    if column.element.datatype == "BYTES":
        present: Array = np.empty(len(chunks), object)
        present[:] = chunks.to_pylist()
    else:
        present = np.asarray(chunks.to_numpy())
    return _with_blanks(column, present, nulls), nulls


def _with_blanks(column: Column, present: Array, nulls: Array) -> Array:
    """All values, with something in place of those that are missing."""
    if not nulls.any():
        return present
    kind = dtype_of(column.element) if not present.size else present.dtype
    if column.element.datatype == "BYTES":
        kind = np.dtype(object)
    elif _is_float(column) and kind.kind != "f":
        kind = np.dtype(np.float64)
    values: Array = np.empty(len(nulls), kind)
    values[nulls] = _blank(column)
    values[~nulls] = present
    return values
