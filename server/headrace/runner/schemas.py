"""The form of a runner's tables: an Arrow schema, and the same for Spark and pandas.

A row's output of one element is a value of that type, one of more dimensions a list, nested for
each; BYTES are texts. Outputs that have another one, `<output>.null`, for their missing values are
nullable columns.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

from headrace.client import InputError
from headrace.client.tables import pyarrow
from headrace.client.values import Declared
from headrace.core.datatypes import Datatype
from headrace.protocol.arrow import NULLS

_ARROW = {
    Datatype.BOOL: "bool", Datatype.BYTES: "string", Datatype.FP16: "halffloat",
    Datatype.BF16: "float", Datatype.FP32: "float", Datatype.FP64: "double",
}  # fmt: skip
_DDL = {
    "bool": "BOOLEAN", "string": "STRING", "float": "FLOAT", "double": "DOUBLE", "int8": "TINYINT",
    "int16": "SMALLINT", "int32": "INT", "int64": "BIGINT", "date32[day]": "DATE",
    "large_string": "STRING", "binary": "BINARY", "timestamp[us, tz=UTC]": "TIMESTAMP",
    "timestamp[us]": "TIMESTAMP_NTZ",
}  # fmt: skip


def is_scalar(declared: Declared) -> bool:
    """True for an output with one value a row."""
    return prod(declared.shape[1:]) == 1


def table_schema(outputs: Mapping[str, Declared], kept: Mapping[str, Any]) -> Any:
    """The `pyarrow.Schema` of tables of outputs, after the kept columns by their types."""
    arrow = pyarrow()
    fields = [arrow.field(name, type_of(which)) for name, which in kept.items()]
    for declared in columns_of(outputs):
        kind = arrow_type(declared.datatype)
        if not is_scalar(declared):
            for _ in declared.shape[1:]:
                kind = arrow.list_(kind)
        fields.append(arrow.field(declared.name, kind))
    return arrow.schema(fields)


def columns_of(outputs: Mapping[str, Declared]) -> Sequence[Declared]:
    """The outputs that are columns: those that mark missing values are not."""
    marks = {name + NULLS for name in outputs}
    return [
        one for one in outputs.values()
        if not (one.name in marks and one.datatype is Datatype.BOOL)
    ]  # fmt: skip


def arrow_type(datatype: Datatype) -> Any:
    """The Arrow type of a datatype's elements."""
    return pyarrow().type_for_alias(_ARROW.get(datatype, datatype.lower()))


def type_of(which: Any) -> Any:
    """An Arrow type from its name, such as `int64`, or itself; raises `InputError`."""
    if not isinstance(which, str):
        return which
    try:
        return pyarrow().type_for_alias(which)
    except ValueError:
        raise InputError(f"{which!r} is no name of a type of Arrow, such as 'int64'") from None


def ddl_of(schema: Any) -> str:
    """A schema as the text of Spark; raises `InputError` for a type that Spark has not."""
    return ", ".join(f"`{one.name.replace('`', '``')}` {_spark(one)}" for one in schema)


def _spark(field: Any, kind: Any = None) -> str:
    kind = kind or field.type
    if pyarrow().types.is_list(kind):
        return f"ARRAY<{_spark(field, kind.value_type)}>"
    found = _DDL.get(str(kind))
    if found is None:
        raise InputError(f"Spark has no type for column '{field.name}' of Arrow's type {kind}")
    return found


def meta_of(schema: Any, outputs: Mapping[str, Declared]) -> Any:
    """An empty pandas frame with the columns of a schema, in the types that tables have."""
    pandas = import_module("pandas")
    found = schema.empty_table().to_pandas()
    for field in schema:
        if field.name + NULLS in outputs and (name := _NULLABLE.get(str(field.type))):
            found[field.name] = pandas.array([], dtype=name)
    return found


_NULLABLE = {
    "bool": "boolean", "int8": "Int8", "int16": "Int16", "int32": "Int32", "int64": "Int64",
    "uint8": "UInt8", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
}  # fmt: skip
