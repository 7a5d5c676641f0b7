"""Tensors as the server carries them between the wire and a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype, Elsewhere
from headrace.core.errors import InvalidRequest
from headrace.core.shapes import brackets

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview
_COPIED = 4096  # bytes up to which a copy costs less than a view

# Not frozen: a frozen dataclass takes three times as long to build, and every request builds
# several. Nothing in the server assigns to a tensor after it was made.


@dataclass(slots=True)
class Tensor:
    """A named array with a protocol datatype; axis 0 counts rows when the model batches."""

    name: str
    datatype: Datatype
    array: Array

    @classmethod
    def from_bytes(
        cls, name: str, datatype: Datatype, shape: Sequence[int], raw: bytes | memoryview
    ) -> "Tensor":
        """View `raw` (row-major, little-endian, fixed-size datatype) without copying it.

        Raises `InvalidRequest` if `shape` and the number of bytes do not agree.
        """
        size = element_count(name, shape) * ITEM_SIZES[datatype]
        if len(raw) != size:
            raise InvalidRequest(
                f"input byte size mismatch for input '{name}', {datatype} of shape"
                f" {brackets(shape)}. Expected {size}, got {len(raw)}"
            )
        return cls(name, datatype, np.frombuffer(raw, NUMPY[datatype]).reshape(shape))


MAX_RANK = 32
_MAX_COUNT = 2**63 - 1  # elements that the protocol can speak of
_MAX_ELEMENTS = 2**59  # 8 bytes each is as far as numpy can address


def element_count(name: str, shape: Sequence[int]) -> int:
    """The number of elements that `shape` asks for, in Python integers, which cannot wrap around.

    Raises `InvalidRequest` for a negative dimension, and for shapes beyond what an array can have.
    """
    if len(shape) > MAX_RANK:  # first, because the other messages show the shape
        raise too_many_dimensions(name, shape)
    if min(shape, default=0) < 0:
        raise InvalidRequest(
            f"input '{name}': every dimension must be given and not negative, got {brackets(shape)}"
        )
    count = math.prod(shape)
    # A zero hides the other dimensions from the product, not from numpy.
    if count > _MAX_ELEMENTS or (count == 0 and math.prod(filter(None, shape)) > _MAX_ELEMENTS):
        if math.prod(filter(None, shape)) > _MAX_COUNT:
            raise InvalidRequest(
                f"shape {brackets(shape)} of input '{name}' causes total element count to exceed"
                f" maximum size of {_MAX_COUNT}"
            )
        raise InvalidRequest(
            f"byte size overflow for input '{name}': shape {brackets(shape)} has more than"
            f" {_MAX_ELEMENTS} elements"
        )
    return count


def too_many_dimensions(name: str, shape: Sequence[object]) -> InvalidRequest:
    """The error of a shape with more than `MAX_RANK` dimensions, whatever they are."""
    return InvalidRequest(
        f"input '{name}' has {len(shape)} dimensions, at most {MAX_RANK} are allowed"
    )


def elsewhere(name: str, datatype: Datatype, shape: Sequence[int]) -> Tensor:
    """A tensor whose data are in shared memory: its array has the shape, and no bytes at all."""
    # Whatever writes tensors writes the name of the datatype, and the bytes of the array.
    return Tensor(name, cast(Datatype, Elsewhere(datatype.value)), np.empty(shape, "V0"))


def raw_bytes(array: Array) -> Buffer:
    """An array of a fixed-size datatype as bytes in row-major order; large ones as a view."""
    if array.nbytes <= _COPIED or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data
