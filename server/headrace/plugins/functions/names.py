"""The names for annotations of models, at run time.

`names.pyi` beside it is for type checkers: arrays, whatever the dimensions.
"""

from typing import Annotated, Any

from headrace.plugins.functions.signature import ArrayOf, Element, FrameOf


class N:
    """The usual name of the dimension that counts rows."""


class Bool(ArrayOf):
    """Booleans."""

    element = Element("Bool", "BOOL")


class UInt8(ArrayOf):
    """Integers from 0 to 255."""

    element = Element("UInt8", "UINT8")


class UInt16(ArrayOf):
    """Unsigned 16-bit integers."""

    element = Element("UInt16", "UINT16")


class UInt32(ArrayOf):
    """Unsigned 32-bit integers."""

    element = Element("UInt32", "UINT32")


class UInt64(ArrayOf):
    """Unsigned 64-bit integers."""

    element = Element("UInt64", "UINT64")


class Int8(ArrayOf):
    """Signed 8-bit integers."""

    element = Element("Int8", "INT8")


class Int16(ArrayOf):
    """Signed 16-bit integers."""

    element = Element("Int16", "INT16")


class Int32(ArrayOf):
    """Signed 32-bit integers."""

    element = Element("Int32", "INT32")


class Int64(ArrayOf):
    """Signed 64-bit integers."""

    element = Element("Int64", "INT64")


class Float16(ArrayOf):
    """16-bit floating-point numbers."""

    element = Element("Float16", "FP16")


class BFloat16(ArrayOf):
    """16-bit floating-point numbers with the range of 32 bits (BF16), as arrays of float32."""

    element = Element("BFloat16", "BF16")


class Float32(ArrayOf):
    """32-bit floating-point numbers."""

    element = Element("Float32", "FP32")


class Float64(ArrayOf):
    """64-bit floating-point numbers."""

    element = Element("Float64", "FP64")


class Strings(ArrayOf):
    """Text: BYTES containing UTF-8, as arrays of `str`."""

    element = Element("Strings", "BYTES", text=True)


class Bytes(ArrayOf):
    """BYTES unchanged, as arrays of `bytes`."""

    element = Element("Bytes", "BYTES")


class Frame:
    """A pandas data frame; subscript it with a schema that has a field per column."""

    def __class_getitem__(cls, schema: Any) -> Any:
        return Annotated[Any, FrameOf("pandas", schema)]


class Table:
    """A pyarrow table; subscript it with a schema that has a field per column."""

    def __class_getitem__(cls, schema: Any) -> Any:
        return Annotated[Any, FrameOf("pyarrow", schema)]
