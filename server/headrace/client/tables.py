"""Tables and columns as values of inputs: data frames of pandas, of Arrow, structured arrays.

The libraries are never imported for values of other kinds. Whatever offers the Arrow stream
interface (pyarrow, polars and others) is read by pyarrow. A column with missing values is an array
and a mask; pandas' NaN counts as missing, Arrow's does not, as in those libraries. Lists of equal
length are further dimensions, dictionaries and categories their values, moments in UTC.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace.client import InputError
from headrace.core.errors import Unsupported
from headrace.core.tensors import Array
from headrace.protocol import arrow

_SHOWN = 5  # names in an error


@runtime_checkable
class ArrowStream(Protocol):
    """The Arrow PyCapsule interface of tables and columns."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


@runtime_checkable
class ArrowArray(Protocol):
    """The Arrow PyCapsule interface of a column in one piece."""

    def __arrow_c_array__(self, requested_schema: object = None) -> object: ...


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Columns of equal length by name, in order; each is something that `column_of` reads.

    Unless `named`, the names are positions, and the order is the model's.
    """

    columns: Mapping[str, Any]
    rows: int
    named: bool = True

    def arranged(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        """The columns with their names in the order of `names`, as they are if that is empty.

        Raises `InputError` with the missing and further names. Names that differ only in white
        space and underscores match, because LightGBM's files have the latter. A model whose names
        are the positions "0", "1" was trained without names: columns with others keep their order.
        """
        given = [*self.columns]
        if not (names and self.named) or given == [*names]:
            return [*self.columns.items()]
        known = dict(self.columns)
        if set(given) != set(names):
            if not set(given) & set(names) and [*names] == [*map(str, range(len(given)))]:
                return [*self.columns.items()]
            underscored = {_underscored(name): column for name, column in self.columns.items()}
            if len(underscored) == len(given):
                wanted = {_underscored(name): name for name in names}
                known = {wanted.get(name, name): column for name, column in underscored.items()}
        missing = [name for name in names if name not in known]
        further = [name for name in known if name not in set(names)]
        if missing or further:
            texts = (("lacks", missing), ("has the further", further))
            found = " and ".join(f"{verb} {_columns(which)}" for verb, which in texts if which)
            raise InputError(f"the table {found}; the model was trained with {_columns(names)}")
        return [(name, known[name]) for name in names]


def table_of(value: object) -> ColumnTable | None:
    """A table, data frame or structured array as a table; None for anything else.

    Raises `InputError` for columns with one name, for what can be read only once, and if pyarrow is
    needed and missing.
    """
    if isinstance(value, ColumnTable):
        return value
    if isinstance(value, list | tuple | str | bytes | int | float):  # without slower checks
        return None
    if isinstance(value, np.ndarray):
        names = value.dtype.names
        if names is None:
            return None
        items = np.atleast_1d(value)
        return ColumnTable({name: items[name] for name in names}, len(items))
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        frame: Any = value
        columns = [frame.iloc[:, place] for place in range(frame.shape[1])]
        return _table([str(name) for name in frame.columns], columns, len(frame))
    if isinstance(value, ArrowStream) and not _is_pandas(value):
        library = pyarrow()
        if isinstance(value, library.RecordBatchReader):
            raise InputError("a RecordBatchReader can be read once: its read_all() gives a table")
        stream = library.chunked_array(value)
        if library.types.is_struct(stream.type):
            table = library.table(value)
            return _table(table.column_names, table.columns, table.num_rows)
    return None


def is_labelled(value: object) -> bool:
    """True for a row of a pandas frame, or a list of such: series with texts as labels."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    first: Any = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, pandas.Series) and all(isinstance(one, str) for one in first.index)


def rows_of(value: object, names: Sequence[str]) -> ColumnTable | None:
    """Rows of a pandas frame as a table, if one of the labels is among several `names`.

    Raises `InputError` for rows with different labels.
    """
    if len(names) < 2 or not is_labelled(value):
        return None
    rows: Any = value if isinstance(value, list | tuple) else [value]
    labels = [*rows[0].index]
    if not {*map(_underscored, labels)} & {*map(_underscored, names)}:
        return None
    if not all(_is_pandas(row) and [*row.index] == labels for row in rows):
        raise InputError("the rows in it have different labels")
    cells = [
        [None if gap else one for one, gap in zip(row, row.isna(), strict=True)] for row in rows
    ]
    return _table(labels, [*zip(*cells, strict=True)], len(rows))


def column_of(value: object, nan_misses: bool = True) -> tuple[Array, Array | None] | None:
    """A column with its mask of missing values, None without any; None for other values.

    Missing values may have any placeholder; only those that are NaN in the column are NaN. Unless
    `nan_misses`, pandas' columns of numpy's floats have none, and are not searched.
    """
    if isinstance(value, np.ma.MaskedArray):
        return np.asarray(value.data), np.ma.getmaskarray(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "Mm":
            return _of_moments(value)
        gaps = value.dtype == object and any(item is None for item in value.flat)
        return _of_items(value.tolist()) if gaps and value.ndim == 1 else None
    if isinstance(value, list | tuple):
        return _of_items(value) if any(item is None for item in value) else None
    if isinstance(value, str | bytes | int | float):
        return None
    if _is_pandas(value):
        pandas: Any = sys.modules["pandas"]
        series = pandas.Series(value)
        if isinstance(series.dtype, pandas.ArrowDtype):
            return column_of(series.array.__arrow_array__())
        if isinstance(series.dtype, pandas.DatetimeTZDtype):
            series = series.dt.tz_convert(None)
        array = np.asarray(series)
        if array.dtype.kind == "f" and isinstance(series.dtype, np.dtype):
            return array, np.isnan(array) if nan_misses and series.hasnans else None
        if series.hasnans:
            missing = np.asarray(series.isna(), np.bool_)
            return _with_gaps(np.asarray(series[~missing]), missing)
        return _plain(array), None
    if isinstance(value, ArrowStream | ArrowArray):
        chunks = pyarrow().chunked_array(
            value if isinstance(value, ArrowStream) else [pyarrow().array(value)]
        )
        if not chunks.null_count:
            return _of_arrow(chunks), None
        return _with_gaps(_of_arrow(chunks.drop_null()), np.asarray(chunks.is_null(), np.bool_))
    return None


def _table(names: Sequence[str], columns: Sequence[Any], rows: int) -> ColumnTable:
    found = dict(zip(names, columns, strict=True))
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the table has several columns '{twice}'")
    return ColumnTable(found, rows)


def _is_pandas(value: object) -> bool:
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    kinds = (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)
    return isinstance(value, kinds)


def _of_arrow(column: Any) -> Array:
    """Arrow's values, none of them missing; raises `InputError` for lists that are no array."""
    types = pyarrow().types
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return _plain(np.asarray(column.to_numpy(zero_copy_only=False)))
    if isinstance(column, pyarrow().ChunkedArray):
        column = column.combine_chunks()
    rows = len(column)
    lengths = np.asarray(import_module("pyarrow.compute").list_value_length(column))
    if rows and (differ := lengths != lengths[0]).any():
        place = int(differ.argmax())
        raise InputError(
            f"the lists in it differ in length: {lengths[0]} in row 0, {lengths[place]} in row"
            f" {place}"
        )
    items = column.flatten()
    if items.null_count:
        place = int(np.asarray(items.is_null(), np.bool_).argmax())
        raise InputError(f"row {place // lengths[0]} has a list with a null in it")
    found = _of_arrow(items)
    return found.reshape(rows, int(lengths[0]) if rows else 0, *found.shape[1:])


def numbers(data: Any) -> Array:
    """Python's numbers, or lists of them, as an array; raises `ValueError` for a mismatch.

    Integers beyond INT64 are UINT64 beside smaller ones, too, which numpy would round to floats.
    """
    found: Array = np.array(data)
    if not (found.dtype.kind == "f" and found.size and found.max() >= 2.0**63):
        return found
    items = np.array(data, object)
    whole = all(isinstance(item, int | np.integer) for item in items.flat)
    return items.astype(np.uint64) if whole and items.min() >= 0 else found


def _of_items(items: Sequence[Any]) -> tuple[Array, Array | None]:
    missing = np.array([item is None for item in items], np.bool_)
    present = [item for item in items if item is not None]
    if any(isinstance(item, str | bytes) for item in present):
        return _with_gaps(np.array(present, object), missing)
    try:
        return _with_gaps(numbers(present), missing)
    except ValueError:
        raise InputError("the arrays in it differ in length") from None


def _of_moments(array: Array) -> tuple[Array, Array | None] | None:
    missing = np.isnat(array)
    if not missing.any():
        return None
    present = array.copy()
    present[missing] = np.zeros((), array.dtype)
    return present, missing


def _with_gaps(present: Array, missing: Array) -> tuple[Array, Array | None]:
    """Values with zeros in the gaps."""
    # Without any value, nothing is known of their type.
    present = _plain(present) if len(present) else np.zeros(0)
    values = np.zeros((len(missing), *present.shape[1:]), present.dtype)
    values[~missing] = present
    return values, missing


def _plain(array: Array) -> Array:
    """Python's numbers, lists of them and arrays as an array of numbers; raises `InputError`."""
    if array.dtype != object or not array.size or isinstance(array.flat[0], str | bytes):
        return array
    try:
        if isinstance(array.flat[0], np.ndarray):
            return np.stack([_plain(np.asarray(item)) for item in array])
        found = numbers(array.tolist())
        return array if found.dtype.kind in "SU" else found  # not numbers as texts
    except ValueError:
        raise InputError("the arrays in it differ in length") from None


def pyarrow() -> Any:
    """The module pyarrow; raises `InputError` without it."""
    try:
        return arrow.pyarrow()
    except Unsupported as error:
        raise InputError(str(error)) from None


def _underscored(name: str) -> str:
    return "_".join(name.split())


def _columns(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return f"column{'s' if len(names) > 1 else ''} {shown}{more}"
