"""Which tensors of a call go through shared memory, and where they lie in their region."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.datatypes import ITEM_SIZES, Datatype
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import RemoteRequest
from headrace.wire.remote_infer import RemoteInput
from headrace.wire.remote_shared import Place

THRESHOLD = 256 << 10  # bytes of a tensor
_ALIGNMENT = 64


class FixedSizes(NamedTuple):
    """The bytes of outputs whose shape is fixed; of one row each, if the model `batches`."""

    outputs: Mapping[str, int]
    batches: bool

    @classmethod
    def of(cls, signature: Signature) -> "FixedSizes":
        """Those of a model."""
        found = {
            spec.name: math.prod(spec.dims) * ITEM_SIZES[spec.datatype]
            for spec in signature.outputs
            if -1 not in spec.dims and spec.datatype is not Datatype.BYTES
        }
        return cls(found, signature.batches)

    def large(self, request: RemoteRequest) -> dict[str, int]:
        """The bytes of those outputs of a call that are worth it."""
        rows = 1
        if self.batches:
            if not request.inputs:
                return {}
            rows = request.inputs[0].shape[0]
        sizes = {name: rows * self.outputs.get(name, 0) for name in request.outputs}
        return {name: size for name, size in sizes.items() if size >= THRESHOLD}


def large_inputs(request: RemoteRequest) -> dict[str, int]:
    """The bytes of those inputs of a call that are worth it."""
    found = {}
    for item in request.inputs:
        if item.datatype is not Datatype.BYTES:
            size = math.prod(item.shape) * ITEM_SIZES[item.datatype]
            if size >= THRESHOLD:
                found[item.name] = size
    return found


def laid_out(sizes: Mapping[str, int], region: str) -> dict[str, Place]:
    """The places of tensors behind one another."""
    places: dict[str, Place] = {}
    position = 0
    for name, size in sizes.items():
        places[name] = Place(region, position, size)
        position = _aligned(position + size)
    return places


def needed(sizes: Mapping[str, int]) -> int:
    """The bytes that these tensors take."""
    *others, last = sizes.values()
    return sum(map(_aligned, others)) + last


def write(inputs: Sequence[RemoteInput], places: Mapping[str, Place], memory: Buffer) -> None:
    """Put inputs into their places."""
    for item in inputs:
        place = places.get(item.name)
        if place is None:
            continue
        position = place.offset
        for part in item.parts:
            np.ndarray(part.shape, part.dtype, memory, position)[...] = part
            position += part.nbytes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
