"""Tensors as passed between codecs and models."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from headrace.core.bytes_array import COPIED, BytesArray, checked_bytes_array
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype, Elsewhere
from headrace.core.errors import InvalidRequest
from headrace.ipc.elements import join

_SHOWN = 32  # dimensions: more than any model has, but a request may have them


def brackets(shape: Sequence[int]) -> str:
    """A shape in the form `[-1,16]`; very long ones are truncated."""
    more = ",…" if len(shape) > _SHOWN else ""
    return "[" + ",".join(map(str, shape[:_SHOWN])) + more + "]"


Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview
TensorArray = Array | BytesArray  # BYTES are undecoded, or objects in an array


class Tensor(NamedTuple):
    """A named array with a protocol datatype; axis 0 counts rows if the model batches."""

    name: str
    datatype: Datatype
    array: TensorArray

    @classmethod
    def from_bytes(
        cls,
        name: str,
        datatype: Datatype,
        shape: Sequence[int],
        raw: bytes | memoryview,
        model: str = "",
        request_id: str = "",
    ) -> "Tensor":
        """View `raw` (row-major, little-endian; BYTES with their lengths) without copying it.

        `model` and `request_id` are for the error, "" if the tensor is not a request's input.
        Raises `InvalidRequest` if `shape` and the number of bytes do not agree.
        """
        count = element_count(name, shape)
        if datatype is Datatype.BYTES:
            array = checked_bytes_array(name, shape, count, raw, model, request_id)
            return cls(name, datatype, array)
        size = count * ITEM_SIZES[datatype]
        if len(raw) != size:
            raise byte_size_mismatch(name, datatype, shape, len(raw), model, request_id)
        return cls(name, datatype, np.frombuffer(raw, NUMPY[datatype]).reshape(shape))


# Makes a tensor of (name, datatype, array) without a Python-level call: once per output and
# request.
new_tensor: Callable[[tuple[str, Datatype, TensorArray]], Tensor] = partial(tuple.__new__, Tensor)

MAX_RANK = 32
_MAX_COUNT = 2**63 - 1  # elements that the protocol can express
_MAX_ELEMENTS = 2**59  # 8 bytes each is the limit of numpy's addressing


def element_count(name: str, shape: Sequence[int]) -> int:
    """The number of elements of `shape`, in Python integers, which cannot overflow.

    Raises `InvalidRequest` for a negative dimension, and for shapes that no array can have.
    """
    if len(shape) > MAX_RANK:  # first, because the other messages show the shape
        raise too_many_dimensions(name, shape)
    if min(shape, default=0) < 0:
        raise InvalidRequest(
            f"input '{name}': every dimension must be given and not negative, got {brackets(shape)}"
        )
    count = math.prod(shape)
    # A zero hides the other dimensions from the product, but not from numpy.
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


def byte_size_mismatch(
    name: str, datatype: Datatype, shape: Sequence[int], got: int, model: str, request_id: str
) -> InvalidRequest:
    """The error of an input whose shape requires another number of bytes, in Triton's words."""
    prefix = f"[request id: {request_id or '<id_unknown>'}] " if model else ""
    of_model = f" for model '{model}'" if model else ""
    expected = math.prod(shape) * ITEM_SIZES[datatype]
    return InvalidRequest(
        f"{prefix}input byte size mismatch for input '{name}'{of_model}."
        f" Expected {expected}, got {got} ({datatype} of shape {brackets(shape)})"
    )


def too_many_dimensions(name: str, shape: Sequence[object]) -> InvalidRequest:
    """The error of a shape with more than `MAX_RANK` dimensions."""
    return InvalidRequest(
        f"input '{name}' has {len(shape)} dimensions, at most {MAX_RANK} are allowed"
    )


def elsewhere(name: str, datatype: Datatype, shape: Sequence[int]) -> Tensor:
    """A tensor whose data is in shared memory: its array has the shape, but no bytes."""
    # Tensor writers need the name of the datatype and the bytes of the array only.
    return Tensor(name, cast(Datatype, Elsewhere(datatype.value)), np.empty(shape, "V0"))


def concatenated(parts: Sequence[TensorArray]) -> TensorArray:
    """Concatenate arrays of one datatype and row shape, undecoded if any of them is."""
    if any(isinstance(part, BytesArray) for part in parts):
        data = b"".join(map(raw_bytes, parts))
        return BytesArray(data, (sum(map(len, parts)), *parts[0].shape[1:]))
    result: Array = np.concatenate(parts)
    return result


def raw_bytes(array: TensorArray) -> Buffer:
    """The elements of an array in the protocol's binary form; a view if they are large."""
    if isinstance(array, BytesArray):
        return array.data
    if array.dtype.hasobject:
        return join(array.ravel().tolist())
    if array.nbytes <= COPIED or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data
