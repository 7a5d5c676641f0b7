"""What a model takes, as it says itself, and bringing data into that form."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.client.address import BadAnswer
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.tensors import Array, brackets
from headrace.workers.elements import object_array

_RANDOM_INTEGERS = 10  # exclusive
_RANDOM_LETTERS = 8


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor as the model declares it; with `rows`, axis 0 of `shape` counts them. -1 in
    `shape` is any number."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    rows: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {brackets(self.shape)}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A model's inputs and outputs by name, and whether it may answer more than once.

    A request may have `most_rows`; 0 if that is not known, or if it has no rows.
    """

    inputs: Mapping[str, Declared]
    outputs: Mapping[str, Declared]
    decoupled: bool = False
    most_rows: int = 0


def taken(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Taken:
    """From the documents of both names; raises `BadAnswer`.

    Without a configuration a model has rows if every input may begin with any number.
    """
    shapes = [item.get("shape", ()) for item in metadata.get("inputs", ())]
    rows = config.get("max_batch_size", 0) > 0
    if not config:
        rows = bool(shapes) and all(int(shape[0]) == -1 for shape in shapes if shape)
    optional = {item["name"] for item in config.get("input", ()) if item.get("optional")}

    def declared(items: Sequence[Mapping[str, Any]]) -> dict[str, Declared]:
        return {
            item["name"]: Declared(
                item["name"],
                BY_NAME[item["datatype"]],
                tuple(map(int, item["shape"])),
                rows,
                item["name"] in optional,
            )
            for item in items
        }

    try:
        policy = config.get("model_transaction_policy", {})
        return Taken(
            declared(metadata["inputs"]),
            declared(metadata["outputs"]),
            bool(policy.get("decoupled", False)),
            int(config.get("max_batch_size", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadAnswer(f"the model's metadata make no sense: {error!r}") from error


def fit(array: Array, declared: Declared) -> Array:
    """`array` in a shape that the model takes: as it is, as one row, or from flat values.

    Raises `ValueError` that says what is expected.
    """
    shape = declared.shape
    if _matches(array.shape, shape):
        return array
    if declared.rows and _matches(array.shape, shape[1:]):
        return array[np.newaxis]
    if array.ndim <= 1 and (full := _filled(array.size, shape)) is not None:
        return array.reshape(full)
    if array.ndim == 2 and declared.rows:  # of a table, each row in its shape
        full = _filled(array.shape[1], shape[1:])
        if full is not None:
            return array.reshape(array.shape[0], *full)
    hint = " (-1 is any number)" if -1 in shape else ""
    raise ValueError(f"expected shape {brackets(shape)}{hint}, got {brackets(array.shape)}")


def random(
    declared: Declared, generator: np.random.Generator, rows: int, shape: Sequence[int] | None
) -> Array:
    """Values that mean nothing, of a shape that the model takes; what may be any number is 1.

    Floats are from 0 to 1, integers from 0 to 9, texts have eight letters. `shape` is in place of
    the declared one, rows and all.
    """
    full = tuple(1 if size < 0 else size for size in declared.shape)
    if declared.rows:
        full = (rows, *full[1:])
    if shape is not None:
        full = tuple(shape)
    dtype = NUMPY[declared.datatype]
    if declared.datatype is Datatype.BYTES:
        letters = generator.integers(97, 123, (math.prod(full), _RANDOM_LETTERS), np.uint8)
        return object_array([[row.tobytes() for row in letters]], full)
    if declared.datatype is Datatype.BOOL:
        return generator.integers(0, 2, full).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(0, _RANDOM_INTEGERS, full).astype(dtype)
    return generator.random(full).astype(dtype)


def _matches(given: Sequence[int], declared: Sequence[int]) -> bool:
    return len(given) == len(declared) and all(
        want in (-1, size) for size, want in zip(given, declared, strict=True)
    )


def _filled(count: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """`shape` for so many elements: the last -1 is what is needed, the others are 1."""
    full = [1 if size < 0 else size for size in shape]
    fixed = math.prod(full)
    open_axes = [axis for axis, size in enumerate(shape) if size < 0]
    if open_axes and fixed and count % fixed == 0:
        full[open_axes[-1]] = count // fixed
    return tuple(full) if math.prod(full) == count else None
