"""Numpy arrays and the protocol's tensor data, with nothing but numpy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.workers.bytes_elements import join, object_array, pieces

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | bytearray | memoryview

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
# The bits of what numpy has no type for.
BITS = {"BF16": np.dtype("<u2")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """The protocol's name of a numpy type; None if it has none."""
    if (name := NAMES.get(dtype)) is not None:
        return name
    if dtype.kind in "SU":
        return "BYTES"
    return NAMES.get(dtype.newbyteorder("<"))


def view(datatype: str, shape: Sequence[int], data: Buffer, start: int, size: int) -> Array:
    """The array in `size` bytes of `data`, read-only unless they are BYTES; raises `ValueError`."""
    if datatype == "BYTES":
        return decode_bytes(memoryview(data)[start : start + size], shape)
    dtype = DTYPES.get(datatype) or BITS[datatype]
    array: Array = np.ndarray(shape, dtype, data, start)
    if array.nbytes != size:
        raise ValueError(f"{size} bytes for {datatype} of shape {list(shape)}")
    return array


def raw(array: Array, datatype: str) -> Buffer:
    """The bytes of an array, row by row; a view if it is laid out like that already."""
    if datatype == "BYTES":
        return encode_bytes(array)
    if array.nbytes <= 4096 or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


def decode_bytes(data: Buffer, shape: Sequence[int]) -> Array:
    """The elements of a BYTES tensor as an object array of `bytes`; raises `ValueError`."""
    return object_array(pieces(data, math.prod(shape)), shape)


def encode_bytes(array: Array) -> bytes:
    """The elements of an array of strings, each with its length before it.

    Text is encoded as UTF-8; what is neither text nor bytes as the text that Python prints.
    """
    return join(_as_bytes(array))


def bytes_array(array: Array) -> Array:
    """An array of strings as a new object array of `bytes`, as `encode_bytes` understands them."""
    return object_array([_as_bytes(array)], array.shape)


def _as_bytes(array: Array) -> list[bytes]:
    elements: list[Any] = array.ravel().tolist()
    if set(map(type, elements)) <= {bytes}:
        return elements
    return [e if isinstance(e, bytes) else str(e).encode() for e in elements]
