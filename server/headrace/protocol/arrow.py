"""Arrow tables as requests and answers: a column for each tensor, rows are axis 0.

Fixed-size lists and lists are further dimensions; within a table all lists of a column have one
length. Strings and binary are BYTES, dictionaries are decoded, numbers are converted where none
changes but by rounding of fractions. Nulls are refused, unless the model has the input
`<name>.null` that marks them; an output `<name>.null` makes nulls of the output that it belongs to.

A table for a model with one input may have a column for each of its elements: see `matrix`.

Pure, for any thread. pyarrow is imported when it is first needed, which takes 0.2 s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from headrace.core.bytes_array import BytesArray
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest, Unsupported
from headrace.core.limits import Charge, uncharged
from headrace.core.signature import Signature, TensorSpec, quoted
from headrace.core.tensors import Array, Tensor, TensorArray, brackets, raw_bytes
from headrace.ipc.elements import starts_of

NULLS = ".null"  # suffix of the tensor that marks the missing values of another one
_TEXT_BYTES = 2**31 - 1  # of a column with offsets of 32 bits
_MOMENT = "%Y-%m-%dT%H:%M:%S"
_SHOWN = 5  # names in an error

# Name, datatype and row shape of a tensor.
Described = tuple[str, Datatype, Sequence[int]]


def pyarrow() -> Any:
    """The module pyarrow; raises `Unsupported` without it."""
    try:
        import_module("pyarrow.compute")
        return import_module("pyarrow")
    except ImportError:
        text = "Arrow needs pyarrow, which is not installed: pip install 'headrace[tables]'"
        raise Unsupported(text) from None


# --- schemas


def described(specs: Iterable[TensorSpec]) -> list[Described]:
    """The arguments of `schema_of` for declared tensors of a model with rows."""
    return [(spec.name, spec.datatype, spec.dims) for spec in specs]


def schema_of(tensors: Iterable[Described], metadata: Mapping[str, Any] | None = None) -> Any:
    """The `pyarrow.Schema` of tensors; -1 in a row shape is a list of any length.

    A BOOL tensor `<name>.null` has no field: it makes that of `<name>` nullable.
    """
    arrow, found = pyarrow(), list(tensors)
    shapes = {name: (datatype, tuple(dims)) for name, datatype, dims in found}
    fields = []
    for name, datatype, dims in found:
        marks = name.endswith(NULLS) and datatype is Datatype.BOOL
        if marks and shapes.get(name.removesuffix(NULLS), ("", None))[1] == tuple(dims):
            continue
        nullable = shapes.get(name + NULLS) == (Datatype.BOOL, tuple(dims))
        fields.append(arrow.field(name, column_type(datatype, dims), nullable))
    return arrow.schema(fields, metadata)


def column_type(datatype: Datatype, dims: Sequence[int]) -> Any:
    """The `pyarrow.DataType` of a tensor's column; BF16, which Arrow does not have, is float32."""
    arrow = pyarrow()
    kind = arrow.binary()
    if datatype is not Datatype.BYTES:
        kind = arrow.from_numpy_dtype(_arrow_dtype(datatype))
    for size in reversed(dims):
        kind = arrow.list_(kind, size)  # -1 is any length for Arrow, too
    return kind


def _arrow_dtype(datatype: Datatype) -> np.dtype[Any]:
    return np.dtype(np.float32) if datatype is Datatype.BF16 else NUMPY[datatype]


# --- tensors as a table


def batch_of(tensors: Sequence[Tensor], schema: Any = None) -> Any:
    """The `pyarrow.RecordBatch` of tensors with rows.

    By default with the schema of their own shapes. Numbers are not copied. Raises
    `ExecutionFailed` if they have no rows, different numbers of them, or do not fit `schema`.
    """
    arrow = pyarrow()
    for tensor in tensors:
        if len({one.array.shape[:1] for one in tensors} | {()}) > 2 or not tensor.array.shape:
            shapes = ", ".join(f"{one.name} {brackets(one.array.shape)}" for one in tensors)
            raise ExecutionFailed(f"outputs without one number of rows are no table: {shapes}")
    own = schema_of((name, datatype, array.shape[1:]) for name, datatype, array in tensors)
    schema = own if schema is None else schema
    named = {tensor.name: tensor for tensor in tensors}
    columns = []
    for field in schema:
        if field.name not in named:
            raise ExecutionFailed(f"the model gave no output '{field.name}'")
        tensor, marks = named[field.name], named.get(field.name + NULLS)
        try:
            nulls = None if marks is None or not field.nullable else np.asarray(marks.array)
            columns.append(_column(tensor.array, tensor.datatype, field.type, nulls))
        except (ValueError, NotImplementedError) as error:
            got = f"{tensor.datatype} {brackets(tensor.array.shape)}"
            raise ExecutionFailed(
                f"output '{field.name}': expected {field.type}, got {got}: {error}"
            ) from None
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def _column(array: TensorArray, datatype: Datatype, kind: Any, nulls: Array | None) -> Any:
    """An array, with a mask of nulls or None, as a column of a type; raises `ValueError`."""
    arrow, shape = pyarrow(), array.shape
    if not len(array):
        return arrow.array([], kind)
    kinds = [kind]
    while arrow.types.is_nested(kinds[-1]):
        kinds.append(kinds[-1].value_type)
    if len(kinds) != len(shape):
        raise ValueError(f"{len(shape) - 1} dimensions of a row, not {len(kinds) - 1}")
    column = _leaf(array, datatype)
    if column.type != kinds[-1]:
        column = column.cast(kinds[-1])
    if nulls is not None:
        column = arrow.compute.if_else(nulls.reshape(-1), arrow.scalar(None, column.type), column)
    for axis in range(len(shape) - 1, 0, -1):
        kind, size, count = kinds[axis - 1], shape[axis], math.prod(shape[:axis])
        if arrow.types.is_fixed_size_list(kind):
            if size != kind.list_size:
                raise ValueError(f"{size} elements, not {kind.list_size}")
            if size:
                column = arrow.FixedSizeListArray.from_arrays(column, type=kind)
            else:
                column = arrow.array([[]] * count, kind)
        else:
            offsets = arrow.array(np.arange(count + 1, dtype=np.int64) * size, arrow.int32())
            column = arrow.ListArray.from_arrays(offsets, column, type=kind)
    return column


def _leaf(array: TensorArray, datatype: Datatype) -> Any:
    """The elements of an array as a flat column."""
    arrow = pyarrow()
    if datatype is Datatype.BYTES:
        return _binary(np.frombuffer(raw_bytes(array), np.uint8), math.prod(array.shape))
    flat = np.ascontiguousarray(array).reshape(-1)
    return arrow.array(flat.astype(_arrow_dtype(datatype), copy=False))


def _binary(raw: Array, count: int) -> Any:
    """A column of elements that are preceded by their lengths."""
    starts = starts_of(raw.data, count)
    if len(raw) - 4 * count > _TEXT_BYTES:
        raise ValueError(f"more than {_TEXT_BYTES} bytes of texts")
    content = np.ones(len(raw), np.bool_)
    content[starts[:-1, None] + np.arange(4)] = False
    offsets = (starts - 4 * np.arange(count + 1)).astype(np.int32)
    arrow = pyarrow()
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(raw[content])]
    return arrow.Array.from_buffers(arrow.binary(), count, buffers)


# --- a table as tensors


def tensors_of(table: Any, signature: Signature, charge: Charge = uncharged) -> dict[str, Tensor]:
    """The inputs of a model with rows, from a validated `pyarrow.RecordBatch`.

    `charge` is called with the bytes of converted columns before they are allocated. Raises
    `InvalidRequest`, with the column and, for nulls and lists of other lengths, the row.
    """
    needs_rows(signature)
    specs = {spec.name: spec for spec in signature.inputs}
    columns = dict(zip(table.schema.names, table.columns, strict=True))
    if len(columns) < len(table.schema.names):
        names = table.schema.names
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"the table has several columns '{twice}'")
    required = [spec for spec in signature.inputs if not spec.optional]
    if len(required) == 1 and required[0].name not in columns and len(required[0].dims) == 1:
        [spec] = required
        return {spec.name: matrix(columns, spec, table.num_rows, charge)}
    found: dict[str, Tensor] = {}
    for name, column in columns.items():
        if name not in specs:
            raise InvalidRequest(
                f"the table has the column '{name}', but model '{signature.model}' has the inputs"
                f" {quoted(specs)}"
            )
        marks = None if name + NULLS in columns else specs.get(name + NULLS)
        array, nulls = _read(name, column, specs[name], marks is not None, charge)
        found[name] = Tensor(name, specs[name].datatype, array)
        if marks is not None and nulls is not None:
            found[marks.name] = Tensor(marks.name, marks.datatype, nulls.reshape(array.shape))
    return found


def needs_rows(signature: Signature) -> None:
    """Raise `InvalidRequest` for a model whose first axis does not count rows."""
    if not signature.batches:
        raise InvalidRequest(
            f"model '{signature.model}' takes no tables: the first axis of its inputs does not"
            " count rows (max_batch_size is 0)"
        )


def matrix(columns: Mapping[str, Any], spec: TensorSpec, rows: int, charge: Charge) -> Tensor:
    """The input of a model from a column for each element of a row.

    In the order of the model's training if it knows the names, else in that of the table. Raises
    `InvalidRequest`.
    """
    names, [size] = spec.columns or tuple(columns), spec.dims
    if {*names} != {*columns} or (size >= 0 and len(names) != size):
        wanted = f"{_listed(spec.columns)}, or " if spec.columns else ""
        number = "any number of columns" if size < 0 else f"{size} columns"
        raise InvalidRequest(
            f"the table has {_listed(columns)}, but the model takes {wanted}{number} for its input"
            f" '{spec.name}', or one column of that name"
        )
    if spec.datatype is Datatype.BYTES:
        raise InvalidRequest(f"input '{spec.name}' is BYTES: the table needs a column of that name")
    charge(rows * len(names) * NUMPY[spec.datatype].itemsize)
    each = TensorSpec(spec.name, spec.datatype, ())
    whole = np.empty((rows, len(names)), NUMPY[spec.datatype])
    for place, name in enumerate(names):
        array, _ = _read(name, columns[name], each, False, charge)
        if array.shape != (rows,):
            raise InvalidRequest(f"column '{name}': expected numbers, got {columns[name].type}")
        whole[:, place] = array
    return Tensor(spec.name, spec.datatype, whole)


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} others" if len(found) > _SHOWN else ""
    return f"the columns {quoted(found[:_SHOWN])}{more}"


def _read(
    name: str, column: Any, spec: TensorSpec, nullable: bool, charge: Charge
) -> tuple[TensorArray, Array | None]:
    try:
        array, nulls = elements_of(column, spec.datatype, charge)
    except (ValueError, NotImplementedError) as error:
        raise InvalidRequest(
            f"column '{name}': expected {spec.datatype} {brackets(spec.dims)} in each row, got"
            f" {str(column.type)[:200]}: {error}"
        ) from None
    if nulls is not None and not nullable:
        row = int(np.argmax(nulls.reshape(len(nulls), -1).any(axis=1)))
        raise InvalidRequest(
            f"column '{name}' has a null in row {row}, and the model has no input '{name}{NULLS}'"
            " that would mark it"
        )
    rows, flat = len(array), len(array.shape) <= 2
    if not rows:
        array = array.reshape((0, *(max(size, 0) for size in spec.dims)))
    elif flat and -1 not in spec.dims and math.prod(array.shape[1:]) == math.prod(spec.dims):
        array = array.reshape((rows, *spec.dims))
    return array, nulls


def elements_of(
    column: Any, datatype: Datatype, charge: Charge = uncharged
) -> tuple[TensorArray, Array | None]:
    """A validated `pyarrow.Array` as an array of a datatype, with a mask of nulls if it has any.

    Nulls have any value. `charge` as of `tensors_of`. Raises `ValueError`, or
    `NotImplementedError` for a conversion that pyarrow does not have.
    """
    arrow = pyarrow()
    types, shape = arrow.types, [len(column)]
    column = _stored(column)
    while types.is_list(column.type) or types.is_large_list(column.type) or (
        types.is_fixed_size_list(column.type)
    ):  # fmt: skip
        count = math.prod(shape)
        if column.null_count:
            row = int(np.argmax(np.asarray(column.is_null()))) * shape[0] // count
            raise ValueError(f"a null instead of a list in row {row}")
        if types.is_fixed_size_list(column.type):
            shape.append(column.type.list_size)
        else:
            lengths = np.asarray(arrow.compute.list_value_length(column))
            size = int(lengths[0]) if count else 0
            if (lengths != size).any():
                other = int(np.argmax(lengths != size))
                raise ValueError(
                    f"the list in row {other * shape[0] // count} has {lengths[other]} elements,"
                    f" the first one {size}"
                )
            shape.append(size)
        column = _stored(column.flatten())
    if types.is_dictionary(column.type):
        column = _decoded(column, charge)
    nulls = None
    if column.null_count:
        nulls = np.asarray(column.is_null()).reshape(shape)
        if types.is_null(column.type):
            raise ValueError("nulls without any value")
    if datatype is Datatype.BYTES:
        return _texts(column, charge).reshape(shape), nulls
    return _numbers(column, datatype, charge).reshape(shape), nulls


def _stored(column: Any) -> Any:
    """A column without its extension type; raises `ValueError` if its elements are permuted."""
    arrow = pyarrow()
    while isinstance(column.type, arrow.BaseExtensionType):
        if isinstance(column.type, arrow.FixedShapeTensorType) and column.type.permutation:
            raise ValueError("a permutation of dimensions is not supported")
        column = column.storage
    return column


def _decoded(column: Any, charge: Charge) -> Any:
    """A dictionary column decoded: few bytes may stand for many, which are charged first."""
    arrow = pyarrow()
    values, kind = column.dictionary, column.type.value_type
    if arrow.types.is_nested(kind) or arrow.types.is_dictionary(kind):
        raise ValueError("dictionaries have to be of numbers or texts")
    if _is_text(kind):
        lengths = _lengths(values)
        charge(int(lengths[np.asarray(column.indices.drop_null())].sum()))
    else:
        charge(len(column) * (kind.bit_width + 7) // 8)
    return column.dictionary_decode()


def _lengths(texts: Any) -> Array:
    """The length of each element in bytes; nulls have none."""
    arrow = pyarrow()
    if texts.type in (arrow.string_view(), arrow.binary_view()):
        views = texts.buffers()[1]
        found = np.zeros(0, np.int32) if views is None else np.frombuffer(views, "<i4")
        return found.reshape(-1, 4)[texts.offset : texts.offset + len(texts), 0]
    if arrow.types.is_fixed_size_binary(texts.type):
        return np.full(len(texts), texts.type.byte_width)
    return np.asarray(arrow.compute.binary_length(texts).fill_null(0))


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        or types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )  # fmt: skip


def _texts(column: Any, charge: Charge) -> BytesArray:
    arrow = pyarrow()
    if arrow.types.is_timestamp(column.type):
        charge(32 * len(column))
        column = column.cast(arrow.timestamp(column.type.unit))  # in UTC
        column = arrow.compute.strftime(column, _MOMENT)
    elif arrow.types.is_date(column.type):
        charge(16 * len(column))
        column = column.cast(arrow.string())
    elif not _is_text(column.type):
        raise ValueError("expected texts or binary")
    count, total = len(column), int(_lengths(column).sum(dtype=np.int64))
    charge(total + 4 * count)
    if not count:
        return BytesArray(b"", (0,))
    column = column.cast(arrow.large_binary()).fill_null(b"")
    _, places, content = column.buffers()
    offsets = np.frombuffer(places, np.int64)[column.offset : column.offset + count + 1]
    texts = np.frombuffer(content or b"", np.uint8)[offsets[0] : offsets[-1]]
    raw, is_text = np.empty(len(texts) + 4 * count, np.uint8), np.ones(len(texts) + 4 * count, "?")
    heads = (offsets[:-1] - offsets[0] + 4 * np.arange(count))[:, None] + np.arange(4)
    raw[heads] = np.diff(offsets).astype("<u4").view(np.uint8).reshape(count, 4)
    is_text[heads] = False
    raw[is_text] = texts
    return BytesArray(raw.data, (count,))


def _numbers(column: Any, datatype: Datatype, charge: Charge) -> Array:
    arrow, types, kind = pyarrow(), pyarrow().types, column.type
    wanted = _arrow_dtype(datatype)
    target = arrow.from_numpy_dtype(wanted)
    if datatype is Datatype.BOOL:
        if not types.is_boolean(kind):
            raise ValueError("expected booleans")
    elif not (
        types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        or types.is_boolean(kind) or (types.is_temporal(kind) and datatype is Datatype.INT64)
    ):  # fmt: skip
        raise ValueError("expected numbers")
    if kind != target:
        charge(len(column) * wanted.itemsize)
        column = column.cast(target)
    if column.null_count:
        charge(len(column) * wanted.itemsize)
        column = column.fill_null(False if datatype is Datatype.BOOL else 0)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array.astype(NUMPY[datatype], copy=False)
