"""BYTES tensors in wire format: their elements in binary form, and a shape.

A Python object takes a hundred times as much as a short element on the wire, so elements become
objects only where a model or a text needs them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headrace.core.errors import InvalidRequest
from headrace.ipc.elements import (
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
    """An immutable array of undecoded BYTES elements.

    Its shape and rows read like those of an array of objects, and `np.asarray` converts it to one.
    `data` is the elements in row-major order, each preceded by its length.
    """

    __slots__ = ("_starts", "data", "shape", "size")

    dtype = np.dtype(object)

    def __init__(self, data: bytes | memoryview, shape: Sequence[int]) -> None:
        """Wrap `data`, whose element count the caller has checked against `shape`."""
        self.data = data
        self.shape = tuple(shape)
        self.size = math.prod(shape)
        self._starts: np.ndarray[Any, np.dtype[Any]] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements and their lengths in bytes."""
        return len(self.data)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "BytesArray":
        """A contiguous range of rows; a view if it is large."""
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
        """Yield the elements as `bytes` in small lists, letting other threads run in between."""
        return pieces(self.data, self.size)

    def tolist(self) -> Any:
        """The elements as `bytes`, in lists nested like the shape."""
        return split(self.data, self.size) if self.ndim == 1 else np.asarray(self).tolist()

    def tobytes(self) -> bytes:
        """The elements in row-major order, each preceded by its length."""
        return bytes(self.data)

    def copy(self) -> "BytesArray":
        """Copy the array into memory of its own."""
        return BytesArray(bytes(self.data), self.shape)


def bytes_array(
    elements: Sequence[bytes], shape: Sequence[int]
) -> "BytesArray | np.ndarray[Any, np.dtype[Any]]":
    """An array of these elements; undecoded unless there are only a few of them."""
    if len(elements) > FEW:
        return BytesArray(join(elements), shape)
    return object_array([elements], shape)


def checked_bytes_array(
    name: str,
    shape: Sequence[int],
    count: int,
    raw: bytes | memoryview,
    model: str = "",
    request_id: str = "",
) -> BytesArray:
    """View `raw`, received from a client or server, as `count` elements without decoding them.

    Pure, callable from any thread. Raises `InvalidRequest` if the lengths do not fit; `model` and
    `request_id` are for the error, "" if the array is not a request's input.
    """
    size = len(raw)
    data = bytes(raw) if size <= COPIED else raw
    whole, end = walk(data, min(count, size // 4))  # each element takes 4 bytes at least
    if whole != count or end != size:
        raise wrong_strings(_misfit(count, data, whole, end), name, model, request_id)
    return BytesArray(data, shape)


def wrong_strings(text: str, name: str, model: str, request_id: str) -> InvalidRequest:
    """The error of an input whose elements do not fit its shape, in Triton's words.

    `{}` in `text` stands for the input, and the model unless it is "".
    """
    prefix = f"[request id: {request_id or '<id_unknown>'}] " if model else ""
    of_model = f" for model '{model}'" if model else ""
    return InvalidRequest(prefix + text.format(f"for inference input '{name}'{of_model}"))


def _misfit(count: int, raw: bytes | memoryview, whole: int, end: int) -> str:
    """The error text for a tensor with `whole` complete elements, the last ending at `end`."""
    left = len(raw) - end
    if whole == count:
        text = f"unexpected number of string elements {count + 1} {{}}, expecting {count}"
        return f"{text}: {left} bytes follow the last"
    if not left:
        return f"expected {count} string elements {{}}, got {whole}"
    if left < 4:
        text = "incomplete string length indicator {}, expecting 4 bytes but only"
        return f"{text} {left} bytes available"
    claimed = int.from_bytes(raw[end : end + 4], "little")
    text = f"incomplete string data {{}}, expecting string of length {claimed} but only"
    return f"{text} {left - 4} bytes available: element {whole}"
