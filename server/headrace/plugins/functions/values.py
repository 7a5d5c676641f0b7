"""Conversion between the protocol's arrays and functions' values: Python values, data frames.

A function's result is converted to the declared type: numbers are converted if no information is
lost, and refused otherwise.

Data frames are pandas' or pyarrow's, which are imported by name on first use: a worker without them
runs all other models. The protocol has no nulls. A nullable column is two tensors: its values, and
`<column>.null`, a BOOL per row that is true if the value is missing. A request may omit the latter.
A missing value is represented by NaN, 0, False or "".
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from headrace.ipc.elements import DTYPES, Array
from headrace.plugins.functions.signature import (
    Columns,
    Dim,
    Element,
    TableColumn,
    Tensor,
    TensorForm,
)

_FLOAT32 = np.dtype("<f4")


class ResultError(TypeError):
    """A function has returned something other than declared."""

    __module__ = "headrace"


class InvalidInput(ValueError):
    """An invalid input: raised by a model, it becomes 400 or INVALID_ARGUMENT."""

    __module__ = "headrace"


def dtype_of(element: Element) -> np.dtype[Any]:
    """The numpy type in which a function sees these elements."""
    return _FLOAT32 if element.datatype == "BF16" else DTYPES[element.datatype]


def received(array: Array, element: Element, name: str) -> Array:
    """An input in functions' form; raises `InvalidInput` for text that is not UTF-8."""
    if element.datatype == "BF16":
        return (array.astype("<u4") << 16).view(_FLOAT32)
    if not element.text:
        return array
    elements: list[bytes] = array.ravel().tolist()
    texts = np.empty(len(elements), object)
    try:
        texts[:] = [one.decode() for one in elements]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}': {error.object!r:.80} is not UTF-8") from None
    return texts.reshape(array.shape)


def sent(array: Array, element: Element) -> Array:
    """A converted output in the protocol's form."""
    if element.datatype != "BF16":
        return array
    bits = np.ascontiguousarray(array).view("<u4")
    # To the nearest value, ties to even; NaN stays NaN.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    whole = np.where(np.isnan(array), (bits >> 16) | 0x40, rounded)
    return whole.astype("<u2").reshape(array.shape)


def given(array: Array, tensor: Tensor) -> Any:
    """A function's argument for a whole array."""
    if tensor.form is TensorForm.ARRAY:
        return array
    if tensor.form is TensorForm.LIST:
        return array.tolist()
    return each(array, tensor)[0]


def each(array: Array, tensor: Tensor) -> list[Any]:
    """A function's arguments for the rows of an array."""
    if tensor.form is TensorForm.ARRAY or issubclass(tensor.single, np.generic):
        return list(array)
    rows: list[Any] = array.tolist()
    return rows


def fitted(value: object, tensor: Tensor, where: str) -> Array:
    """Convert a function's result to an array of the declared type.

    Raises `ResultError`; the shape is not checked.
    """
    if tensor.element.datatype == "BYTES":
        return _strings(value, tensor, where)
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ResultError(
            f"{_declared(where, tensor)}, got {_given(value, tensor)}: {error}"
        ) from None
    wanted = dtype_of(tensor.element)
    if array.dtype == wanted:
        return array
    if not array.size and not isinstance(value, np.ndarray):
        return array.astype(wanted)  # an empty list has no type
    if (problem := _loss(array, wanted)) is not None:
        raise ResultError(f"{_declared(where, tensor)}, got {_given(value, tensor)}{problem}")
    with np.errstate(over="ignore"):
        cast: Array = array.astype(wanted)
    if wanted.kind == "f" and np.isinf(cast).sum() > np.isinf(array).sum():
        raise ResultError(f"{_declared(where, tensor)}, got numbers that are too large for it")
    return cast


def check_shape(
    shape: Sequence[int], dims: Sequence[Dim], sizes: dict[str, int], where: str
) -> None:
    """Check a shape against dimensions; sizes of named ones are compared with or added to `sizes`.

    Raises `ValueError`.
    """
    if len(shape) != len(dims):
        text = f"[{', '.join(map(str, dims))}]"
        raise ValueError(f"{where} has {len(dims)} dimensions, {text}, got shape {list(shape)}")
    for size, dim in zip(shape, dims, strict=True):
        expected = dim.size if dim.size >= 0 else sizes.setdefault(dim.name, size)
        if size != expected and (dim.name or dim.size >= 0):
            what = f"dimension {dim.name}" if dim.name else "a dimension"
            raise ValueError(f"{where}: {what} is {expected}, got {size} in shape {list(shape)}")


def describe(value: object) -> str:
    """A value described for an error."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(one).__name__ for one in value})
        return f"a {type(value).__name__} of {' and '.join(kinds) or 'nothing'}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def _given(value: object, tensor: Tensor) -> str:
    """A value described for an error; for single values, which come row by row, their types."""
    if tensor.form is TensorForm.SINGLE and isinstance(value, list):
        return " and ".join(sorted({type(one).__name__ for one in value}))
    return describe(value)


def _declared(where: str, tensor: Tensor) -> str:
    return f"{where} is declared as {tensor}"


def _loss(array: Array, wanted: np.dtype[Any]) -> str | None:
    """The reason why elements cannot be converted, "" if it is obvious; None if they can."""
    kind = array.dtype.kind
    allowed: Mapping[str, str] = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}
    if kind not in allowed[wanted.kind]:
        return ""
    if wanted.kind in "iu" and array.size and kind != "b":
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            return f", of which {wrong} is not between {limits.min} and {limits.max}"
    return None


def _strings(value: object, tensor: Tensor, where: str) -> Array:
    """An array of `str` or `bytes` objects."""
    wanted = str if tensor.element.text else bytes
    if isinstance(value, np.ndarray):
        array: Array = value.astype(object) if value.dtype.kind in "UST" else value
    else:
        # Without fixed-width numpy types, which would drop trailing zeros.
        try:
            array = np.array(value, object)
        except ValueError:
            raise ResultError(f"{_declared(where, tensor)}, got {describe(value)}") from None
    kinds = set(map(type, array.ravel().tolist())) if array.dtype == object else {array.dtype.type}
    wrong = sorted(kind.__name__ for kind in kinds if not issubclass(kind, wanted))
    if wrong:
        raise ResultError(
            f"{_declared(where, tensor)}, which has elements of {wanted.__name__},"
            f" got {', '.join(wrong)}"
        )
    return array


_PANDAS = {
    "BOOL": "boolean", "UINT8": "UInt8", "UINT16": "UInt16", "UINT32": "UInt32", "UINT64": "UInt64",
    "INT8": "Int8", "INT16": "Int16", "INT32": "Int32", "INT64": "Int64",
}  # fmt: skip


def to_frame(declared: Columns, arrays: Mapping[str, Array]) -> Any:
    """The data frame of these columns; the null masks are optional."""
    library = import_module(declared.library)
    make = _pandas_column if declared.library == "pandas" else _arrow_column
    columns = {
        column.name: make(library, column, arrays[column.name], arrays.get(f"{column.name}.null"))
        for column in declared.columns
    }
    return library.DataFrame(columns) if declared.library == "pandas" else library.table(columns)


def from_frame(declared: Columns, frame: Any, where: str) -> dict[str, Array]:
    """The tensors of a data frame; raises `ResultError` if it differs from the declaration.

    Undeclared columns are left out.
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
        tensor = Tensor(column.element, (Dim("rows"),), TensorForm.ARRAY, np.ndarray)
        if column.nullable:
            arrays[f"{column.name}.null"] = nulls
        elif nulls.any() and not _is_float(column):
            raise ResultError(
                f"{at} has {int(nulls.sum())} missing values; declare it with `| None`"
            )
        arrays[column.name] = fitted(values, tensor, at)
    return arrays


def _is_float(column: TableColumn) -> bool:
    return dtype_of(column.element).kind == "f"


def _blank(column: TableColumn) -> Any:
    """The placeholder of a missing value."""
    if column.element.datatype == "BYTES":
        return "" if column.element.text else b""
    return float("nan") if _is_float(column) else dtype_of(column.element).type(0)


def _pandas_column(pandas: Any, column: TableColumn, values: Array, nulls: Array | None) -> Any:
    """A pandas column; missing numbers are NaN, or NA, missing text is None."""
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


def _split_pandas(pandas: Any, column: TableColumn, series: Any) -> tuple[Any, Array]:
    nulls = np.asarray(series.isna(), np.bool_)
    present = np.asarray(series[~nulls] if nulls.any() else series)
    if not present.size:  # as of an empty list, which has no type
        present = np.empty(0, dtype_of(column.element))
    elif present.dtype == object and column.element.datatype != "BYTES":
        present = np.asarray(present.tolist())  # converts pandas' nullable types
    return _with_blanks(column, present, nulls), nulls


def _arrow_column(arrow: Any, column: TableColumn, values: Array, nulls: Array | None) -> Any:
    if column.element.datatype == "BYTES":
        kind = arrow.string() if column.element.text else arrow.binary()
    else:
        kind = arrow.from_numpy_dtype(values.dtype)
    return arrow.array(values, kind, mask=nulls)


def _split_arrow(arrow: Any, column: TableColumn, chunks: Any) -> tuple[Any, Array]:
    nulls = np.asarray(chunks.is_null(), np.bool_)
    chunks = chunks.drop_null()
    if column.element.datatype == "BYTES":
        present: Array = np.empty(len(chunks), object)
        present[:] = chunks.to_pylist()
    elif arrow.types.is_null(chunks.type):  # as of an empty list
        present = np.empty(0, dtype_of(column.element))
    else:
        present = np.asarray(chunks.to_numpy())
    return _with_blanks(column, present, nulls), nulls


def _with_blanks(column: TableColumn, present: Array, nulls: Array) -> Array:
    """All values, with placeholders for missing ones."""
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
