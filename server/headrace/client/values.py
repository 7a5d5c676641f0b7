"""Conversion of Python values to tensors, with or without a model's signature.

Values are arrays, scalars, lists, strings and bytes. The signature determines datatype and shape; a
value that does not fit is refused, never rounded or truncated.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from headrace.client import AnswerError, InputError
from headrace.core.datatypes import BY_NAME, BY_NUMPY, NUMPY, Datatype
from headrace.core.signature import fits
from headrace.core.tensors import Array, Tensor, brackets
from headrace.workers.elements import object_array


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared tensor; if `rows`, axis 0 of `shape` counts rows. -1 in `shape` is a variable
    dimension.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    rows: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {brackets(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A model's inputs and outputs by name; `decoupled` if it may answer more than once.

    A request may have `most_rows`; 0 if unknown, or without rows.
    """

    inputs: Mapping[str, Declared]
    outputs: Mapping[str, Declared]
    decoupled: bool = False
    most_rows: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """Parse a model's metadata and configuration; raises `AnswerError`.

        Without a configuration a model has rows if the first dimension of every input is variable.
        """
        try:
            shapes = [item.get("shape", ()) for item in metadata["inputs"]]
            rows = config.get("max_batch_size", 0) > 0
            if not config:
                rows = bool(shapes) and all(int(shape[0]) == -1 for shape in shapes if shape)
            optional = {item["name"] for item in config.get("input", ()) if item.get("optional")}
            policy = config.get("model_transaction_policy", {})
            return cls(
                _declared(metadata["inputs"], rows, optional),
                _declared(metadata["outputs"], rows, optional),
                bool(policy.get("decoupled", False)),
                int(config.get("max_batch_size", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerError(f"the model's metadata make no sense: {error!r}") from error

    def tensors(self, model: str, given: Mapping[str, Any]) -> list[Tensor]:
        """Convert values to the inputs of a request; raises `InputError` for the first mismatch.

        An optional input may be missing, or None.
        """
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in self.inputs:
                known = ", ".join(self.inputs)
                raise InputError(f"model '{model}' has no input '{name}', only {known}")
        for declared in self.inputs.values():
            if declared.name not in given and not declared.optional:
                raise InputError(f"model '{model}' needs the input {declared}")
        return [_fitting(model, self.inputs[name], value) for name, value in given.items()]


def _declared(
    items: Sequence[Mapping[str, Any]], rows: bool, optional: set[str]
) -> dict[str, Declared]:
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


def _fitting(model: str, declared: Declared, value: Any) -> Tensor:
    try:
        array = value if isinstance(value, np.ndarray) else elements(value, declared.datatype)
        array = fit(cast(array, declared.datatype), declared)
    except ValueError as error:
        is_array = isinstance(value, np.ndarray)
        got = f"{value.dtype} {brackets(value.shape)}" if is_array else type(value).__name__
        raise InputError(
            f"input '{declared.name}' of model '{model}': expected {declared.datatype}"
            f" {brackets(declared.shape)}, got {got}: {error}"
        ) from None
    return Tensor(declared.name, declared.datatype, array)


def fit(array: Array, declared: Declared) -> Array:
    """`array` in an accepted shape: as it is, as one row, or from flat values.

    Raises `ValueError` with the expected shape.
    """
    shape = declared.shape
    if fits(array.shape, shape):
        return array
    if declared.rows and fits(array.shape, shape[1:]):
        return array[np.newaxis]
    if array.ndim <= 1 and (full := filled(array.size, shape)) is not None:
        return array.reshape(full)
    if array.ndim == 2 and declared.rows:  # a table, with each row in the declared shape
        full = filled(array.shape[1], shape[1:])
        if full is not None:
            return array.reshape(array.shape[0], *full)
    hint = " (-1 is any number)" if -1 in shape else ""
    raise ValueError(f"expected shape {brackets(shape)}{hint}, got {brackets(array.shape)}")


def filled(count: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """`shape` for `count` elements: the last -1 is computed, the others are 1."""
    full = [1 if size < 0 else size for size in shape]
    fixed = math.prod(full)
    open_axes = [axis for axis, size in enumerate(shape) if size < 0]
    if open_axes and fixed and count % fixed == 0:
        full[open_axes[-1]] = count // fixed
    return tuple(full) if math.prod(full) == count else None


def tensor_of(name: str, value: Any) -> Tensor:
    """A value as a tensor of its own datatype and shape; raises `InputError`."""
    array = value if isinstance(value, np.ndarray) else np.array(value)
    if array.dtype.kind in "SUO":
        # A bytes array of numpy would drop trailing zeros.
        given = value if isinstance(value, np.ndarray) else np.array(value, object)
        try:
            return Tensor(name, Datatype.BYTES, cast(given, Datatype.BYTES))
        except ValueError as error:
            raise InputError(f"input '{name}': {error}") from None
    native = array.astype(array.dtype.newbyteorder("<"), copy=False)
    datatype = BY_NUMPY.get(native.dtype)
    if datatype is None:
        raise InputError(f"input '{name}': no datatype of the protocol is numpy's {array.dtype}")
    return Tensor(name, datatype, native)


def elements(data: Any, datatype: Datatype) -> Array:
    """JSON values, nested or not, as an array; raises `ValueError` for a mismatch."""
    try:
        given = np.array(data, object if datatype is Datatype.BYTES else None)
    except (ValueError, OverflowError):
        raise ValueError("the arrays in it differ in length") from None
    return cast(given, datatype)


def cast(given: Array, datatype: Datatype) -> Array:
    """Convert values to `datatype`; raises `ValueError` if they do not fit."""
    if datatype is Datatype.BYTES:
        texts = [_text(item) for item in given.ravel().tolist()]
        return object_array([texts], given.shape)
    wanted = NUMPY[datatype]
    if given.dtype == wanted:
        return given
    if given.size == 0:
        return given.astype(wanted)
    if given.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers for {datatype}")
    if datatype is Datatype.BOOL:
        if not np.isin(given, (0, 1)).all():
            raise ValueError("expected true, false, 1 or 0 for BOOL")
    elif wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if given.dtype.kind == "f" and not (given == np.floor(given)).all():
            raise ValueError(f"expected whole numbers for {datatype}")
        if given.min() < limits.min or given.max() > limits.max:
            raise ValueError(f"expected numbers from {limits.min} to {limits.max} for {datatype}")
    with np.errstate(over="ignore"):  # too large values become infinite
        return given.astype(wanted)


def _text(item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str):
        raise ValueError(f"expected texts for BYTES, got {json.dumps(item, default=str)}")
    return item.encode("utf-8", "surrogateescape")
