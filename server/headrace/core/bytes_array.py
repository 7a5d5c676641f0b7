"""BYTES tensors as they travel: the binary form of their elements, and a shape.

An object of Python takes a hundred times what a short element does on the wire. So elements become
objects where a model or a text needs them, and nowhere before.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headrace.core.errors import InvalidRequest
from headrace.workers.elements import (
    FEW,
    join,
    object_array,
    pieces,
    split,
    starts_of,
    walk,
)

COPIED = 4096  # bytes up to which a copy costs less than a view


class BytesArray:
    """An undecoded array of BYTES elements, which cannot be changed.

    To whoever asks for its shape or rows it is like an array of objects, which `np.asarray` makes
    of it. `data` is the elements in row-major order, each with its length before it.
    """

    __slots__ = ("_starts", "data", "shape", "size")

    dtype = np.dtype(object)

    def __init__(self, data: bytes | memoryview, shape: Sequence[int]) -> None:
        """`data` must have the elements that `shape` asks for: whoever has received it checks."""
        self.data = data
        self.shape = tuple(shape)
        self.size = math.prod(shape)
        self._starts: np.ndarray[Any, np.dtype[Any]] | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements and their lengths."""
        return len(self.data)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "BytesArray":
        """Some rows, one after the other; a view if they are large."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows one after the other, got a step of {step}")
        if self._starts is None:
            self._starts = starts_of(self.data, self.size)
        width = math.prod(self.shape[1:])
        begin, end = int(self._starts[start * width]), int(self._starts[max(start, stop) * width])
        data = self.data if end - begin <= COPIED else memoryview(self.data)
        return BytesArray(data[begin:end], (max(stop - start, 0), *self.shape[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The elements as `bytes` in an object array."""
        return object_array(self.pieces(), self.shape)

    def reshape(self, shape: Sequence[int]) -> "BytesArray":
        """Reshape without a copy; raises `ValueError` for another number of elements."""
        if math.prod(shape) != self.size:
            raise ValueError(f"{self.size} elements do not have the shape {list(shape)}")
        return BytesArray(self.data, shape)

    def ravel(self) -> "BytesArray":
        """Flatten without a copy."""
        return BytesArray(self.data, (self.size,))

    def pieces(self) -> Iterable[list[bytes]]:
        """The elements as `bytes`, some at a time, between which other threads get their turn."""
        return pieces(self.data, self.size)

    def tolist(self) -> Any:
        """The elements as `bytes`, in lists as the shape says."""
        return split(self.data, self.size) if self.ndim == 1 else np.asarray(self).tolist()

    def tobytes(self) -> bytes:
        """The elements in row-major order, each with its length before it."""
        return bytes(self.data)

    def copy(self) -> "BytesArray":
        """An array that nothing else refers to the memory of."""
        return BytesArray(bytes(self.data), self.shape)


def bytes_array(
    elements: Sequence[bytes], shape: Sequence[int]
) -> "BytesArray | np.ndarray[Any, np.dtype[Any]]":
    """An array of these elements; undecoded, unless they are so few that it does not matter."""
    if len(elements) > FEW:
        return BytesArray(join(elements), shape)
    return object_array([elements], shape)


def checked_bytes_array(
    name: str, shape: Sequence[int], count: int, raw: bytes | memoryview
) -> BytesArray:
    """View `raw`, which a client or server has sent, as `count` elements, without making objects.

    A pure function, for any thread. Raises `InvalidRequest` where the lengths do not fit.
    """
    size = len(raw)
    if count * 4 > size:
        raise InvalidRequest(
            f"expected {count} string elements for inference input '{name}', got fewer:"
            f" {size} bytes cannot hold {count} length indicators"
        )
    data = bytes(raw) if size <= COPIED else raw
    whole, end = walk(data, count)
    if whole != count or end != size:
        raise InvalidRequest(_misfit(name, count, data, whole, end))
    return BytesArray(data, shape)


def _misfit(name: str, count: int, raw: bytes | memoryview, whole: int, end: int) -> str:
    """The error of a tensor of which so many elements, that end there, are whole."""
    left = len(raw) - end
    if whole == count:
        return (
            f"unexpected number of string elements {count + 1} for inference input '{name}',"
            f" expecting {count}: {left} bytes follow the last"
        )
    if not left:
        return f"expected {count} string elements for inference input '{name}', got {whole}"
    if left < 4:
        return (
            f"incomplete string length indicator for inference input '{name}':"
            f" {left} bytes left where 4 are needed"
        )
    claimed = int.from_bytes(raw[end : end + 4], "little")
    return (
        f"incomplete string data for inference input '{name}': element {whole}"
        f" claims {claimed} bytes, {left - 4} are left"
    )
