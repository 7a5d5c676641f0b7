"""The names that models annotate with, as they are at run time.

`names.pyi` beside it is what type checkers see of them: arrays, whatever the dimensions.
"""

from typing import Annotated, Any

from headrace.plugins.functions.signature import ArrayOf, Element, FrameOf


class N:
    """The usual name of the dimension that counts rows."""


class Bool(ArrayOf):
    """Truth values."""

    element = Element("Bool", "BOOL")


class UInt8(ArrayOf):
    """Whole numbers from 0 to 255."""

    element = Element("UInt8", "UINT8")


class UInt16(ArrayOf):
    """Whole numbers of 16 bits from 0 on."""

    element = Element("UInt16", "UINT16")


class UInt32(ArrayOf):
    """Whole numbers of 32 bits from 0 on."""

    element = Element("UInt32", "UINT32")


class UInt64(ArrayOf):
    """Whole numbers of 64 bits from 0 on."""

    element = Element("UInt64", "UINT64")


class Int8(ArrayOf):
    """Whole numbers of 8 bits."""

    element = Element("Int8", "INT8")


class Int16(ArrayOf):
    """Whole numbers of 16 bits."""

    element = Element("Int16", "INT16")


class Int32(ArrayOf):
    """Whole numbers of 32 bits."""

    element = Element("Int32", "INT32")


class Int64(ArrayOf):
    """Whole numbers of 64 bits."""

    element = Element("Int64", "INT64")


class Float16(ArrayOf):
    """Floating-point numbers of 16 bits."""

    element = Element("Float16", "FP16")


class BFloat16(ArrayOf):
    """Floating-point numbers of 16 bits with the range of 32, BF16; arrays of float32."""

    element = Element("BFloat16", "BF16")


class Float32(ArrayOf):
    """Floating-point numbers of 32 bits."""

    element = Element("Float32", "FP32")


class Float64(ArrayOf):
    """Floating-point numbers of 64 bits."""

    element = Element("Float64", "FP64")


class Strings(ArrayOf):
    """Text: BYTES that hold UTF-8; arrays of `str`."""

    element = Element("Strings", "BYTES", text=True)


class Bytes(ArrayOf):
    """BYTES as they are; arrays of `bytes`."""

    element = Element("Bytes", "BYTES")


class Frame:
    """A pandas data frame; subscribed with a schema, which has a field for each column."""

    def __class_getitem__(cls, schema: Any) -> Any:
        return Annotated[Any, FrameOf("pandas", schema)]


class Table:
    """A pyarrow table; subscribed with a schema, which has a field for each column."""

    def __class_getitem__(cls, schema: Any) -> Any:
        return Annotated[Any, FrameOf("pyarrow", schema)]
