"""The bucket of a request, its padded inputs, and its part of padded outputs: pure functions.

A dimension of variable size is in an axis of some inputs, which have the same length there. All of
them are padded to the smallest bucket that has room. Axes are those of `dims`, without the rows.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array, Tensor, brackets

_Shape = tuple[int, ...]
_OBJECT = 8  # bytes of a reference to a text


class PaddedAxis(NamedTuple):
    """The axis of an input that is padded, and the value of added elements."""

    axis: int
    value: object


class FilledInput(NamedTuple):
    """An input that is filled unless a client sends it."""

    name: str
    datatype: Datatype


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """A dimension with ascending `buckets`; `outputs` follow it in an axis.

    The `mask` of a row is 1 for its own elements and 0 for added ones, `lengths` is the length.
    `axes` are those of all inputs that may be padded: of a client's mask, too.
    """

    name: str
    buckets: tuple[int, ...]
    inputs: Mapping[str, PaddedAxis]
    outputs: Mapping[str, int] = field(default_factory=dict)
    mask: FilledInput | None = None
    lengths: FilledInput | None = None
    axes: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = {name: one.axis for name, one in self.inputs.items()}
        if self.mask is not None:
            axes[self.mask.name] = 0
        object.__setattr__(self, "axes", axes)


class PaddedSize(NamedTuple):
    """The length of a request in a dimension, and its bucket."""

    dim: PaddedDim
    length: int
    bucket: int


def decide(dims: Sequence[PaddedDim], shapes: Mapping[str, _Shape]) -> tuple[PaddedSize, ...]:
    """The sizes of a request with inputs of these shapes, rows first.

    Raises `InvalidRequest` if inputs disagree, or are longer than the largest bucket.
    """
    return tuple(_size(dim, shapes) for dim in dims)


def _size(dim: PaddedDim, shapes: Mapping[str, _Shape]) -> PaddedSize:
    (first, axis), *others = [(n, a) for n, a in dim.axes.items() if n in shapes]
    length = shapes[first][1 + axis]
    for name, other in others:
        if shapes[name][1 + other] != length:
            raise InvalidRequest(
                f"input '{name}' has {shapes[name][1 + other]} elements in dimension '{dim.name}',"
                f" and input '{first}' has {length}"
            )
    place = bisect_left(dim.buckets, length)
    if place == len(dim.buckets):
        raise InvalidRequest(
            f"input '{first}' has {length} elements in dimension '{dim.name}', whose largest bucket"
            f" is {dim.buckets[-1]}"
        )
    return PaddedSize(dim, length, dim.buckets[place])


def padded_shape(sizes: Iterable[PaddedSize], name: str, shape: _Shape) -> _Shape:
    """The shape of an input after padding."""
    found = list(shape)
    for size in sizes:
        axis = size.dim.axes.get(name)
        if axis is not None:
            found[1 + axis] = size.bucket
    return tuple(found)


def added_bytes(sizes: Sequence[PaddedSize], inputs: Mapping[str, Tensor], rows: int) -> int:
    """The bytes that `padded` allocates, of texts only those of their references."""
    total = 0
    for name, tensor in inputs.items():
        shape = padded_shape(sizes, name, tensor.array.shape)
        if shape != tensor.array.shape:
            total += math.prod(shape) * ITEM_SIZES.get(tensor.datatype, _OBJECT)
    for size in sizes:
        for filled, width in ((size.dim.mask, size.bucket), (size.dim.lengths, 1)):
            if filled is not None and filled.name not in inputs:
                total += rows * width * ITEM_SIZES[filled.datatype]
    return total


def padded(
    sizes: Sequence[PaddedSize], inputs: Mapping[str, Tensor], rows: int
) -> dict[str, Tensor]:
    """The inputs padded to these sizes, with those that are filled."""
    found = dict(inputs)
    for name, tensor in inputs.items():
        shape = padded_shape(sizes, name, tensor.array.shape)
        if shape != tensor.array.shape:
            values = (s.dim.inputs[name].value for s in sizes if name in s.dim.inputs)
            array: Array = np.full(shape, next(values, 0), NUMPY[tensor.datatype])
            array[tuple(map(slice, tensor.array.shape))] = np.asarray(tensor.array)
            found[name] = Tensor(name, tensor.datatype, array)
    for dim, length, bucket in sizes:
        if dim.mask is not None and dim.mask.name not in inputs:
            name, datatype = dim.mask
            mask: Array = np.zeros((rows, bucket), NUMPY[datatype])
            mask[:, :length] = 1
            found[name] = Tensor(name, datatype, mask)
        if dim.lengths is not None and dim.lengths.name not in inputs:
            name, datatype = dim.lengths
            found[name] = Tensor(name, datatype, np.full((rows, 1), length, NUMPY[datatype]))
    return found


def cut(sizes: Sequence[PaddedSize], model: str, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs without added elements, as views; raises `ExecutionFailed` for other shapes."""
    return [_cut(sizes, model, tensor) for tensor in outputs]


def _cut(sizes: Sequence[PaddedSize], model: str, tensor: Tensor) -> Tensor:
    shape = tensor.array.shape
    ends: list[int | None] = [None] * len(shape)
    for dim, length, bucket in sizes:
        axis = dim.outputs.get(tensor.name)
        if axis is None:
            continue
        if len(shape) <= 1 + axis or shape[1 + axis] != bucket:
            raise ExecutionFailed(
                f"model '{model}' gave output '{tensor.name}' of shape {brackets(shape)}: its"
                f" axis {axis} follows dimension '{dim.name}', which was padded to {bucket}"
            )
        if length != bucket:
            ends[1 + axis] = length
    if not any(end is not None for end in ends):
        return tensor
    return Tensor(tensor.name, tensor.datatype, np.asarray(tensor.array)[tuple(map(slice, ends))])
