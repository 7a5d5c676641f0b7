"""Ragged batches: inputs of different shapes in one batch, and what tells them apart.

A model with requests gets each input in its request's shape. Any other gets the elements of all
requests, one after the other, in one axis; computed inputs have the requests' sizes, and outputs of
such an axis are cut by them. Pure functions of shapes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, TensorArray, concatenated

_Shape = tuple[int, ...]


class RaggedForm(Enum):
    """The form in which models of a backend get ragged inputs."""

    FLAT = "the elements of all requests in one axis"
    APART = "one array for each request"


class BatchInputKind(Enum):
    """The value of a computed input, by the numbers of the configuration."""

    ELEMENT_COUNT = 0  # elements of each request's source
    ACCUMULATED = 1  # the running total of these
    ACCUMULATED_WITH_ZERO = 2  # the same behind a zero
    MAX_AS_SHAPE = 3  # as many zeros as the largest count
    ITEM_SHAPE = 4  # the shape of each row
    ITEM_SHAPE_FLATTEN = 5  # the same in one axis


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input of the model that is computed from the shapes of a batch's `source`."""

    kind: BatchInputKind
    source: str
    targets: tuple[str, ...]
    datatype: Datatype

    def value(self, shapes: Sequence[_Shape]) -> Array:
        """The value for requests with these shapes of the source."""
        counts = [math.prod(shape) for shape in shapes]
        found: object = counts
        match self.kind:
            case BatchInputKind.ACCUMULATED:
                found = np.cumsum(counts)
            case BatchInputKind.ACCUMULATED_WITH_ZERO:
                found = np.cumsum([0, *counts])
            case BatchInputKind.MAX_AS_SHAPE:
                found = np.zeros(max(counts))
            case BatchInputKind.ITEM_SHAPE | BatchInputKind.ITEM_SHAPE_FLATTEN:
                rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
                found = np.array(rows).reshape(len(rows), len(shapes[0]) - 1)
                if self.kind is BatchInputKind.ITEM_SHAPE_FLATTEN:
                    found = found.ravel()
        return np.asarray(found, NUMPY[self.datatype])


@dataclass(frozen=True, slots=True)
class Ragged:
    """The ragged parts of a signature: `inputs`, `computed` inputs, and outputs with the input
    whose shapes cut them, `scattered`. Inputs that stay `APART` need neither.
    """

    inputs: frozenset[str]
    computed: tuple[BatchInput, ...] = ()
    scattered: Mapping[str, str] | None = None

    def computed_from(self, requests: Sequence[Mapping[str, _Shape]]) -> dict[str, Array]:
        """The computed inputs of requests with inputs of these shapes."""
        found: dict[str, Array] = {}
        for one in self.computed:
            value = one.value([shapes[one.source] for shapes in requests])
            found |= dict.fromkeys(one.targets, value)
        return found


def flattened(parts: Sequence[TensorArray]) -> TensorArray:
    """The elements of all arrays in one axis."""
    return concatenated([part.reshape((part.size,)) for part in parts])


def scattered(
    array: TensorArray, dims: _Shape, sources: Sequence[_Shape]
) -> Sequence[TensorArray] | str:
    """The pieces of an output for requests with these shapes of its source, or the problem.

    A piece has the rows of its source, and in place of each -1 in `dims` its size in that axis.
    """
    shapes = [_piece(dims, source) for source in sources]
    sizes = [math.prod(shape) for shape in shapes]
    if array.ndim != 1 or len(array) != sum(sizes):
        return f"of shape {list(array.shape)}, the shapes of its source need [{sum(sizes)}]"
    pieces = zip(divided(array, sizes), shapes, strict=True)
    return [piece.reshape(shape) for piece, shape in pieces]


def divided(array: TensorArray, sizes: Sequence[int]) -> list[TensorArray]:
    """The pieces of an array with these rows, one after the other."""
    ends = np.cumsum(sizes).tolist()
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _piece(dims: _Shape, source: _Shape) -> _Shape:
    return source[0], *[size if d == -1 else d for d, size in zip(dims, source[1:], strict=True)]
