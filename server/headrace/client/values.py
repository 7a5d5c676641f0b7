"""Conversion of Python values to tensors, with or without a model's signature.

Values are arrays, scalars, lists, strings and bytes, columns and tables (`tables.py`). The
signature determines datatype and shape; a value that does not fit is refused, never rounded or
truncated. Missing values become NaN, or are marked in the input `<name>.null` of a model that has
it. A table for one input has its columns put into the order of the model's training. Moments are
texts in ISO 8601, nanoseconds since 1970 as INT64, or seconds as FP64; decimals are numbers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from headrace.client import AnswerError, InputError
from headrace.client.tables import (
    ColumnTable,
    column_of,
    is_labelled,
    numbers,
    rows_of,
    table_of,
)
from headrace.core.columns import COLUMNS, columns_by_input
from headrace.core.datatypes import BY_NAME, BY_NUMPY, NUMPY, Datatype
from headrace.core.signature import fits
from headrace.core.tensors import Array, Tensor, TensorArray, brackets
from headrace.ipc.elements import object_array
from headrace.protocol.arrow import NULLS

_IN_MEMORY = (1, 3)  # DLPack's devices: the CPU, and memory that is pinned for CUDA


@runtime_checkable
class DLPackTensor(Protocol):
    """A tensor of another library."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared tensor; if `rows`, axis 0 of `shape` counts rows. -1 in `shape` is a variable
    dimension. `columns` are the names of its columns, in order, if the model knows them.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    rows: bool = False
    optional: bool = False
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {brackets(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A model's inputs and outputs by name; `decoupled` if it may answer more than once.

    A request may have `most_rows`; 0 if unknown, or without rows.
    """

    inputs: Mapping[str, Declared]
    outputs: Mapping[str, Declared]
    decoupled: bool = False
    most_rows: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """Parse a model's metadata and configuration; raises `AnswerError`.

        Without a configuration a model has rows if the first dimension of every input is variable.
        """
        try:
            shapes = [item.get("shape", ()) for item in metadata["inputs"]]
            rows = config.get("max_batch_size", 0) > 0
            if not config:
                rows = bool(shapes) and all(int(shape[0]) == -1 for shape in shapes if shape)
            optional = {item["name"] for item in config.get("input", ()) if item.get("optional")}
            policy = config.get("model_transaction_policy", {})
            columns = _columns(metadata, config)
            return cls(
                _declared(metadata["inputs"], rows, optional, columns),
                _declared(metadata["outputs"], rows, optional, {}),
                bool(policy.get("decoupled", False)),
                int(config.get("max_batch_size", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerError(f"the model's metadata make no sense: {error!r}") from error

    def tensors(self, model: str, given: object, first_row: int | None = None) -> list[Tensor]:
        """Convert values to the inputs of a request; raises `InputError` for the first mismatch.

        An optional input may be missing, or None. A table instead of values by name has a column
        for each input, or is the matrix that is the only input. With the number of the `first_row`
        in a larger table, missing values are refused, unless the model marks them or they are NaN.
        """
        named = self.named(model, given)
        named = {name: value for name, value in named.items() if value is not None}
        for name in named:
            if name not in self.inputs:
                known = ", ".join(self.inputs)
                raise InputError(f"model '{model}' has no input '{name}', only {known}")
        for declared in self.inputs.values():
            if declared.name not in named and not declared.optional:
                raise InputError(f"model '{model}' needs the input {declared}")
        found = []
        for name, value in named.items():
            nulls = None if name + NULLS in named else self.inputs.get(name + NULLS)
            found += _fitting(model, self.inputs[name], value, nulls, first_row)
        return found

    def arranges(self, given: object) -> bool:
        """True if the names of a table's columns decide where their values go in a tensor."""
        table = table_of(given)
        if table is not None:
            return self._is_matrix(table)
        values = given.values() if isinstance(given, Mapping) else ()
        return any(is_labelled(value) or table_of(value) is not None for value in values)

    def named(self, model: str, given: object) -> Mapping[str, Any]:
        """Values by the names of inputs; raises `InputError` for neither a mapping nor a table."""
        table = table_of(given)
        if table is not None:
            return {next(iter(self.inputs)): given} if self._is_matrix(table) else table.columns
        if isinstance(given, Mapping):
            return given
        known = ", ".join(map(str, self.inputs.values())) or "none"
        raise InputError(
            f"model '{model}' takes values by the names of its inputs, or a table,"
            f" got {type(given).__name__}; its inputs: {known}"
        )

    def _is_matrix(self, table: ColumnTable) -> bool:
        """True if a table is the only input itself, False if it has a column for each."""
        if len(self.inputs) != 1:
            return False
        [declared] = self.inputs.values()
        several = not table.named or bool(declared.columns) or len(table.columns) > 1
        return {*table.columns} != {declared.name} and several


def needs_signature(value: object) -> bool:
    """True for values whose form depends on the model: tables, and columns with missing values."""
    if type(value) is np.ndarray and value.dtype.kind in "biuf":  # as mostly
        return False
    if is_labelled(value) or table_of(value) is not None:
        return True
    column = column_of(value)
    return column is not None and column[1] is not None


def _columns(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The columns of inputs that a model was trained with, as far as it says so."""
    told = metadata.get("properties", {}).get(COLUMNS)
    if told is None:
        told = config.get("parameters", {}).get(COLUMNS, {}).get("string_value")
    return columns_by_input(told or "")


def _declared(
    items: Sequence[Mapping[str, Any]], rows: bool, optional: set[str],
    columns: Mapping[str, tuple[str, ...]],
) -> dict[str, Declared]:  # fmt: skip
    return {
        item["name"]: Declared(
            item["name"],
            BY_NAME[item["datatype"]],
            tuple(map(int, item["shape"])),
            rows,
            item["name"] in optional,
            columns.get(item["name"], ()),
        )
        for item in items
    }


def _fitting(
    model: str, declared: Declared, value: Any, nulls: Declared | None, first_row: int | None
) -> list[Tensor]:
    """The tensor of a value, and the one in `nulls` that marks its missing elements, if any."""
    try:
        array, missing = read_value(value, declared, nulls is not None, first_row)
        array = fit(array, declared)
        found = [Tensor(declared.name, declared.datatype, array)]
        if missing is not None and nulls is not None:
            found.append(Tensor(nulls.name, nulls.datatype, fit(missing, nulls)))
    except ValueError as error:
        got = type(value).__name__
        if isinstance(value, np.ndarray):
            got = f"{value.dtype} {brackets(value.shape)}"
        elif isinstance(value, ColumnTable):
            got = "a table"
        raise InputError(
            f"input '{declared.name}' of model '{model}': expected {declared.datatype}"
            f" {brackets(declared.shape)}, got {got}: {error}"
        ) from None
    return found


def read_value(
    value: Any, declared: Declared, nullable: bool = False, first_row: int | None = None
) -> tuple[Array, Array | None]:
    """A value as an array of the declared datatype, with the mask of missing elements.

    Unless `nullable`, missing elements are NaN; raises `ValueError` if the datatype has none. With
    a `first_row` only those that are NaN already may be missing.
    """
    datatype = declared.datatype
    table = table_of(value)
    if table is None:
        table = rows_of(value, declared.columns)
    if table is not None:
        columns = table.arranged(declared.columns)
        each = replace(declared, columns=())
        dtype = np.dtype(object) if datatype is Datatype.BYTES else NUMPY[datatype]
        matrix = np.empty((table.rows, len(columns)), dtype)
        for place, (name, column) in enumerate(columns):
            try:
                matrix[:, place] = read_value(column, each, first_row=first_row)[0]
            except ValueError as error:
                raise ValueError(f"column '{name}': {error}") from None
        return matrix, None
    column = column_of(value)
    if column is None:
        array = value if isinstance(value, np.ndarray) else elements(value, datatype)
        missing = None
        strict = first_row is not None and NUMPY[datatype].kind in "iub"
        if array.dtype.kind == "f" and (nullable or strict) and np.isnan(array).any():
            missing = np.isnan(array)
    else:
        array, missing = column
    if missing is None or not missing.any():
        return cast(array, datatype), None
    if first_row is not None and not nullable:
        _refuse_nulls(array, missing, declared, first_row)
    if NUMPY[datatype].kind not in "iubO":
        array = cast(array, datatype).copy()
        array[missing] = np.nan
        return array, missing
    if not nullable:
        raise ValueError(
            f"it has missing values ({int(missing.sum())}), and the model has no input"
            f" '{declared.name}{NULLS}' that would mark them"
        )
    if array.dtype.kind in "Mm":
        array = cast(array, datatype)
    array = array.astype(object) if datatype is Datatype.BYTES else array.copy()
    array[missing] = b"" if datatype is Datatype.BYTES else 0
    return cast(array, datatype), missing


def _refuse_nulls(array: Array, missing: Array, declared: Declared, first_row: int) -> None:
    """Raise `ValueError` with the row of the first missing element, except NaN as such."""
    is_nan = array.dtype.kind == "f" and NUMPY[declared.datatype].kind not in "iubO"
    is_null = missing & ~np.isnan(array) if is_nan else missing
    rows = is_null.reshape(len(is_null), -1).any(axis=1)
    if rows.any():
        raise ValueError(
            f"row {first_row + int(rows.argmax())} is null, and the model has no input"
            f" '{declared.name}{NULLS}' that would mark it"
        )


def arrays_of(outputs: Sequence[Tensor]) -> dict[str, TensorArray]:
    """Arrays by name; those with a tensor of missing values beside them are masked by it."""
    found = {tensor.name: tensor.array for tensor in outputs}
    for name in found:
        if name.endswith(NULLS):
            return _without_nulls({tensor.name: tensor for tensor in outputs})
    return found


def _without_nulls(tensors: Mapping[str, Tensor]) -> dict[str, TensorArray]:
    found: dict[str, TensorArray] = {}
    for name, tensor in tensors.items():
        if name.endswith(NULLS) and _masks(tensor, tensors.get(name.removesuffix(NULLS))):
            continue
        found[name] = tensor.array
        nulls = tensors.get(name + NULLS)
        if nulls is not None and _masks(nulls, tensor):
            found[name] = np.ma.MaskedArray(np.asarray(tensor.array), np.asarray(nulls.array))
    return found


def _masks(nulls: Tensor, tensor: Tensor | None) -> bool:
    if tensor is None or nulls.datatype is not Datatype.BOOL:
        return False
    return bool(nulls.array.shape == tensor.array.shape)


def fit(array: Array, declared: Declared) -> Array:
    """`array` in an accepted shape: as it is, as one row, or from flat values.

    Raises `ValueError` with the expected shape.
    """
    shape = declared.shape
    if fits(array.shape, shape):
        return array
    if declared.rows and fits(array.shape, shape[1:]):
        return array[np.newaxis]
    if array.ndim <= 1 and (full := filled(array.size, shape)) is not None:
        return array.reshape(full)
    if array.ndim == 2 and declared.rows:  # a table, with each row in the declared shape
        full = filled(array.shape[1], shape[1:])
        if full is not None:
            return array.reshape(array.shape[0], *full)
    hint = " (-1 is any number)" if -1 in shape else ""
    raise ValueError(f"expected shape {brackets(shape)}{hint}, got {brackets(array.shape)}")


def filled(count: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """`shape` for `count` elements: the last -1 is computed, the others are 1."""
    full = [1 if size < 0 else size for size in shape]
    fixed = math.prod(full)
    open_axes = [axis for axis, size in enumerate(shape) if size < 0]
    if open_axes and fixed and count % fixed == 0:
        full[open_axes[-1]] = count // fixed
    return tuple(full) if math.prod(full) == count else None


def tensor_of(name: str, value: Any) -> Tensor:
    """A value as a tensor of its own datatype and shape; raises `InputError`."""
    if not isinstance(value, np.ndarray):
        column = column_of(value)
        value = column[0] if column is not None and column[1] is None else value
    try:
        array = value if isinstance(value, np.ndarray) else numbers(value)
    except ValueError:
        raise InputError(f"input '{name}': the arrays in it differ in length") from None
    if array.dtype.kind == "M":
        return Tensor(name, Datatype.BYTES, cast(array, Datatype.BYTES))
    if array.dtype.kind in "SUO":
        # A bytes array of numpy would drop trailing zeros.
        given = value if isinstance(value, np.ndarray) else np.array(value, object)
        try:
            return Tensor(name, Datatype.BYTES, cast(given, Datatype.BYTES))
        except ValueError as error:
            raise InputError(f"input '{name}': {error}") from None
    native = array.astype(array.dtype.newbyteorder("<"), copy=False)
    datatype = BY_NUMPY.get(native.dtype)
    if datatype is None:
        raise InputError(f"input '{name}': no datatype of the protocol is numpy's {array.dtype}")
    return Tensor(name, datatype, native)


def elements(data: Any, datatype: Datatype) -> Array:
    """JSON values or a tensor, as an array; raises `ValueError` for a mismatch."""
    if isinstance(data, DLPackTensor):
        return cast(_from_dlpack(data), datatype)
    try:
        given = np.array(data, object) if datatype is Datatype.BYTES else numbers(data)
    except (ValueError, OverflowError):
        raise ValueError("the arrays in it differ in length") from None
    return cast(given, datatype)


def _from_dlpack(tensor: Any) -> Array:
    """The array of a tensor, without a copy; raises `ValueError` if it is elsewhere."""
    device = tensor.__dlpack_device__()[0]
    if device not in _IN_MEMORY:
        raise ValueError(
            f"the tensor is on a device (of DLPack's type {device}): copy it to the CPU"
        )
    try:
        found: Array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:  # a gradient, or a type of its own
        raise ValueError(f"the tensor cannot be read: {error}") from None
    return found


def cast(given: Array, datatype: Datatype) -> Array:
    """Convert values to `datatype`; raises `ValueError` if they do not fit."""
    if given.dtype.kind in "Mm":
        return _cast_moments(given, datatype)
    if datatype is Datatype.BYTES:
        texts = [_text(item) for item in given.ravel().tolist()]
        return object_array([texts], given.shape)
    wanted = NUMPY[datatype]
    if given.dtype == wanted:
        return given
    if given.dtype == NUMPY[Datatype.BF16]:  # which numpy does not know as a float
        given = given.astype(np.float32)
    if given.size == 0:
        return given.astype(wanted)
    if given.dtype == object and isinstance(given.flat[0], Decimal):
        given = _of_decimals(given, wanted.kind in "iu")
    if given.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers for {datatype}")
    if datatype is Datatype.BOOL:
        if not np.isin(given, (0, 1)).all():
            raise ValueError("expected true, false, 1 or 0 for BOOL")
    elif wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if given.dtype.kind == "f" and not (given == np.floor(given)).all():
            raise ValueError(f"expected whole numbers for {datatype}")
        # As numbers of Python, which are compared exactly: 2.0**63 is not 2**63 - 1.
        if given.min().item() < limits.min or given.max().item() > limits.max:
            raise ValueError(f"expected numbers from {limits.min} to {limits.max} for {datatype}")
    with np.errstate(over="ignore"):  # too large values become infinite
        return given.astype(wanted)


def _cast_moments(given: Array, datatype: Datatype) -> Array:
    """Moments or durations as text, nanoseconds or seconds; raises `ValueError` for another."""
    given = given.astype(given.dtype.newbyteorder("="), copy=False)
    if datatype is Datatype.BYTES and given.dtype.kind == "M":
        return cast(np.asarray(np.datetime_as_string(given), object), datatype)
    if datatype not in (Datatype.INT64, Datatype.FP64):
        raise ValueError(f"moments are for INT64, FP64 or as text for BYTES, not for {datatype}")
    exact = given.astype(f"{given.dtype.kind}8[ns]")
    if (exact.astype(given.dtype) != given).any():
        raise ValueError("a moment in it is not within 292 years of 1970, so it has no nanoseconds")
    count = exact.astype(np.int64)
    return count if datatype is Datatype.INT64 else count / 1e9


def _of_decimals(given: Array, whole: bool) -> Array:
    """Decimals as the nearest floats, or as integers if all are; raises `ValueError`."""
    try:
        if whole and all(item == int(item) for item in given.flat):
            return np.array([int(item) for item in given.flat]).reshape(given.shape)
        return given.astype(np.float64)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"the decimals are no numbers: {error}") from None


def _text(item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"expected texts for BYTES, got {json.dumps(item, default=str)}")
    return item.encode("utf-8", "surrogateescape")
