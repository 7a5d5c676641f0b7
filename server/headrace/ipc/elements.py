"""Conversion of binary tensor data to numpy arrays and back, with numpy only.

Each BYTES element is preceded by its length in 4 bytes, little-endian. The length determines the
position of the next element, so finding elements requires a walk. Elements of equal length are
found by one numpy comparison, short ones by a walk in numpy; a walk in Python is only for few or
long elements. No walk creates an object per element, and each is a pure function of its bytes, for
any thread.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview

SMALL = 4096  # bytes up to which a copy is as fast as a view
FEW = 64  # elements up to which Python is faster than numpy
_LONG = 32  # bytes per element from which on Python is as fast as numpy, which examines each byte
_BLOCK = 1 << 16  # bytes per numpy step, so that temporary data stays in the cache
_CHUNK = 1 << 14  # elements per step when they become objects
_unpack_length, _pack_length = Struct("<I").unpack_from, Struct("<I").pack
_PREFIXES = [length.to_bytes(4, "little") for length in range(256)]


def walk(data: Buffer, count: int, starts: Array | None = None) -> tuple[int, int]:
    """Return the number of whole elements, at most `count`, and the position after the last one.

    `data` consists of exactly `count` elements if the result is `count` and its size. The start of
    each element is stored in `starts`, an array of `count` items, if given.
    """
    size = len(data)
    if count <= FEW or size > count * _LONG:
        return _step(data, size, 0, 0, count, starts)
    width = _width(data, count)
    if width:
        if starts is not None:
            starts[:] = np.arange(0, size, width)
        return count, size
    found = position = 0
    while found < count and size - position > 4:
        whole, end = _jump(data, size, position, count - found, found, starts)
        if not whole:
            break
        found, position = found + whole, end
    return _step(data, size, position, found, count, starts)


def starts_of(data: Buffer, count: int) -> Array:
    """The start of each of `count` elements, and the end of the last one.

    Raises `ValueError` for malformed `data`.
    """
    starts = np.empty(count + 1, np.int64)
    starts[count] = len(data)
    if walk(data, count, starts[:count]) != (count, len(data)):
        raise ValueError(f"{len(data)} bytes are not {count} elements with their lengths")
    return starts


def pieces(data: Buffer, count: int) -> Iterable[list[bytes]]:
    """Iterate over the `count` elements in `data`, in small lists.

    numpy and `map` block all other threads for a millisecond or so per list. Raises `ValueError`
    for malformed `data`.
    """
    return [_split_few(data, count)] if count <= FEW else _pieces(data, count)


def _pieces(data: Buffer, count: int) -> Iterator[list[bytes]]:
    width = _width(data, count)
    if width > 4:
        form = np.dtype([("length", "<u4"), ("element", f"V{width - 4}")])
        alike = np.frombuffer(data, form)["element"]
    elif not width:
        starts = starts_of(data, count)
    for first in range(0, count, _CHUNK):
        last = min(first + _CHUNK, count)
        if width == 4:
            yield [b""] * (last - first)
        elif width:
            yield alike[first:last].tolist()
        else:
            base = int(starts[first])
            piece = bytes(data[base : int(starts[last])])
            begins = (starts[first:last] + (4 - base)).tolist()
            ends = (starts[first + 1 : last + 1] - base).tolist()
            yield [piece[begin:end] for begin, end in zip(begins, ends, strict=True)]


def split(data: Buffer, count: int) -> list[bytes]:
    """The `count` elements in `data`; raises `ValueError` for malformed data."""
    if count <= FEW:
        return _split_few(data, count)
    return list(chain.from_iterable(_pieces(data, count)))


def object_array(found: Iterable[Sequence[object]], shape: Sequence[int]) -> Array:
    """The objects in `found`, an iterable of lists, as an array."""
    array = np.empty(math.prod(shape), object)
    position = 0
    for piece in found:
        array[position : position + len(piece)] = piece
        position += len(piece)
    return array.reshape(tuple(shape))


def join(elements: Sequence[bytes]) -> bytes:
    """The binary form of elements."""
    if len(elements) <= FEW:
        return b"".join([part for one in elements for part in (_pack_length(len(one)), one)])
    chunks = range(0, len(elements), _CHUNK)
    return b"".join([_join(list(elements[first : first + _CHUNK])) for first in chunks])


def _join(elements: list[bytes]) -> bytes:
    lengths = list(map(len, elements))
    if max(lengths, default=0) < len(_PREFIXES):
        prefixes = list(map(_PREFIXES.__getitem__, lengths))
    else:
        # A void scalar of four bytes becomes a `bytes` object that keeps its trailing zeros.
        prefixes = np.array(lengths, "<u4").view("V4").tolist()
    return b"".join(chain.from_iterable(zip(prefixes, elements, strict=True)))


def _width(data: Buffer, count: int) -> int:
    """The size of each element, with its length; 0 if they differ."""
    width, rest = divmod(len(data), count)
    if rest or width < 4:
        return 0
    lengths = np.ndarray((count,), "<u4", data, strides=(width,))
    return width if (lengths == width - 4).all() else 0


def _step(
    data: Buffer, size: int, position: int, found: int, count: int, starts: Array | None
) -> tuple[int, int]:
    """`walk` in Python, starting at an element."""
    last = size - 4
    for index in range(found, count):
        if position > last:
            return index, position
        stop = position + 4 + _unpack_length(data, position)[0]
        if stop > size:
            return index, position
        if starts is not None:
            starts[index] = position
        position = stop
    return count, position


def _jump(
    data: Buffer, size: int, position: int, most: int, found: int, starts: Array | None
) -> tuple[int, int]:
    """`walk` in numpy, through one block; `found` elements precede it.

    Finds none if the next element is incomplete.
    """
    length = min(_BLOCK, size - position - 3)
    # The start of the next element if one began at each of these bytes.
    after = np.ndarray((length,), "<u4", data, position, (1,)) + np.arange(4, length + 4)
    room = min(most, length // 4 + 1)
    places = np.zeros(room + 1, np.int64)
    # `take` writes each item before it reads the next, so that this follows the chain of elements.
    # That is not guaranteed, and therefore checked.
    after.take(places[:-1], out=places[1:], mode="clip")
    whole = int(np.count_nonzero(places[:-1] < length))
    if not np.array_equal(after[places[:whole]], places[1 : whole + 1]):
        return 0, position
    if places[whole] > size - position:
        whole -= 1  # the last one is incomplete
    if starts is not None:
        starts[found : found + whole] = places[:whole] + position
    return whole, position + int(places[whole])


def _split_few(data: Buffer, count: int) -> list[bytes]:
    elements: list[Any] = []
    position, size = 0, len(data)
    for _ in range(count):
        start = position + 4
        if start > size:
            break
        position = start + _unpack_length(data, position)[0]
        elements.append(data[start:position])
    if position != size or len(elements) != count:
        raise ValueError(f"{size} bytes are not {count} elements with their lengths")
    return elements if type(data) is bytes else list(map(bytes, elements))


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
# The bit patterns of types that numpy lacks.
BITS = {"BF16": np.dtype("<u2")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """The protocol's name of a numpy type; None for others."""
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
    """The bytes of an array in row-major order; a view if it is laid out so."""
    if datatype == "BYTES":
        return encode_bytes(array)
    if array.nbytes <= SMALL or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


def decode_bytes(data: Buffer, shape: Sequence[int]) -> Array:
    """The elements of a BYTES tensor as an object array of `bytes`; raises `ValueError`."""
    return object_array(pieces(data, math.prod(shape)), shape)


def encode_bytes(array: Array) -> bytes:
    """The elements of an array of strings, each preceded by its length.

    Text is encoded as UTF-8; other objects as their `str`.
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
