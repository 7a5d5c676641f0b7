"""The parameter of padding: JSON, checked against a complete configuration."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from headrace.core.datatypes import BY_CONFIG_NUMBER, FLOATS, NUMPY, Datatype
from headrace.core.signature import quoted
from headrace.core.tensors import brackets
from headrace.core.texts import shown
from headrace.plugins.padding.decisions import FilledInput, PaddedAxis, PaddedDim
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.repository.validation import BUCKETS

_EXAMPLE = '{"tokens": {"buckets": [32, 64], "inputs": {"IDS": {"value": 0}}, "outputs": {}}}'
_KEYS = ("buckets", "inputs", "outputs", "mask", "lengths")
_LARGEST = (1 << 31) - 1


class Misfit(ValueError):
    """A part of the parameter that does not fit, with its path."""


def read_dims(config: ModelConfig) -> tuple[PaddedDim, ...]:
    """The padded dimensions of a complete configuration; raises `Misfit`."""
    try:
        told = json.loads(config.parameters[BUCKETS].string_value)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not told:
        raise Misfit(f"must be JSON of dimensions by name, such as {_EXAMPLE}")
    if not config.max_batch_size:
        raise Misfit("needs a max_batch_size: requests are padded to share batches")
    dims = tuple(_dim(name, one, config) for name, one in told.items())
    _check_together(dims)
    return dims


def _check_together(dims: Sequence[PaddedDim]) -> None:
    """Raise `Misfit` if dimensions want different things of one tensor."""
    axes: dict[tuple[str, int], str] = {}
    values: dict[str, object] = {}
    filled: dict[str, str] = {}
    for dim in dims:
        for name, one in dim.inputs.items():
            if (other := axes.setdefault((name, one.axis), dim.name)) != dim.name:
                text = f"axis {one.axis} is that of '{other}', too"
                raise Misfit(f"{dim.name}.inputs['{name}']: {text}")
            if repr(first := values.setdefault(name, one.value)) != repr(one.value):
                text = f"it has two values, {first} and {one.value}"
                raise Misfit(f"{dim.name}.inputs['{name}']: {text}")
        for key, fills in (("mask", dim.mask), ("lengths", dim.lengths)):
            at = f"{dim.name}.{key}"
            if fills is not None and filled.setdefault(fills.name, at) != at:
                raise Misfit(f"{at}: '{fills.name}' is {filled[fills.name]}, too")
    for dim in dims:
        if taken := [name for name in dim.inputs if name in filled]:
            raise Misfit(f"{dim.name}.inputs['{taken[0]}']: it is {filled[taken[0]]}")


def _dim(name: str, told: Any, config: ModelConfig) -> PaddedDim:
    if not isinstance(told, dict):
        raise Misfit(f"{name}: must be an object with {quoted(_KEYS)}, got {shown(told)}")
    _check_keys(name, told, _KEYS)
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    padded = {
        input: _padded(f"{name}.inputs['{input}']", input, one, inputs)
        for input, one in _object(f"{name}.inputs", told.get("inputs")).items()
    }
    if not any(not inputs[input].optional for input in padded):
        raise Misfit(f"{name}.inputs: needs an input that is not optional")
    following = {
        output: _following(f"{name}.outputs['{output}']", output, one, outputs)
        for output, one in _object(f"{name}.outputs", told.get("outputs", {})).items()
    }
    return PaddedDim(
        name,
        _buckets(f"{name}.buckets", told.get("buckets")),
        padded,
        following,
        _filled(f"{name}.mask", told.get("mask"), inputs, (-1,)),
        _filled(f"{name}.lengths", told.get("lengths"), inputs, (1,)),
    )


def _buckets(path: str, told: Any) -> tuple[int, ...]:
    good = isinstance(told, list) and told and all(type(one) is int for one in told)
    if not good or any(one >= other for one, other in pairwise((0, *told, _LARGEST))):
        raise Misfit(f"{path}: must be ascending whole numbers above 0, got {shown(told)}")
    return tuple(told)


def _padded(path: str, name: str, told: Any, inputs: Mapping[str, ModelInput]) -> PaddedAxis:
    if name not in inputs:
        raise Misfit(f"{path}: there is no such input, but {quoted(inputs)}")
    tensor = inputs[name]
    _check_keys(path, _object(path, told), ("axis", "value"))
    axis = _axis(path, told.get("axis"), tensor)
    if tensor.allow_ragged_batch:
        raise Misfit(f"{path}: it cannot be combined with allow_ragged_batch")
    datatype = BY_CONFIG_NUMBER[tensor.data_type]
    given = told.get("value", "" if datatype is Datatype.BYTES else 0)
    if datatype is Datatype.BOOL and "value" not in told:
        given = False
    value = _element(given, datatype)
    if value is None:
        raise Misfit(f"{path}.value: must be a value of {datatype}, got {shown(given)}")
    return PaddedAxis(axis, value)


def _following(path: str, name: str, told: Any, outputs: Mapping[str, ModelOutput]) -> int:
    if name not in outputs:
        raise Misfit(f"{path}: there is no such output, but {quoted(outputs)}")
    _check_keys(path, _object(path, told), ("axis",))
    return _axis(path, told.get("axis"), outputs[name])


def _axis(path: str, told: Any, tensor: ModelInput | ModelOutput) -> int:
    """An axis of variable size; by default the only one."""
    dims = tuple(tensor.dims)
    free = [axis for axis, size in enumerate(dims) if size == -1]
    if tensor.HasField("reshape"):
        raise Misfit(f"{path}: it cannot be combined with reshape")
    if not free:
        raise Misfit(f"{path}: its dims {brackets(dims)} have no variable size")
    if told is None and len(free) == 1:
        return free[0]
    if type(told) is not int or told not in free:
        text = f"must be one of {free}, which its dims {brackets(dims)} leave open"
        raise Misfit(f"{path}.axis: {text}, got {'none' if told is None else shown(told)}")
    return told


def _filled(
    path: str, told: Any, inputs: Mapping[str, ModelInput], dims: tuple[int, ...]
) -> FilledInput | None:
    if told is None:
        return None
    if not isinstance(told, str) or told not in inputs:
        raise Misfit(f"{path}: must be one of the inputs {quoted(inputs)}, got {shown(told)}")
    tensor = inputs[told]
    datatype = BY_CONFIG_NUMBER[tensor.data_type]
    if tuple(tensor.dims) != dims or tensor.HasField("reshape") or tensor.allow_ragged_batch:
        got = brackets(tuple(tensor.dims))
        raise Misfit(f"{path}: '{told}' must have dims {brackets(dims)}, and neither reshape nor"
                     f" allow_ragged_batch; got {got}")  # fmt: skip
    if datatype is Datatype.BYTES or (datatype is Datatype.BOOL and dims == (1,)):
        raise Misfit(f"{path}: '{told}' must have numbers, not {datatype}")
    return FilledInput(told, datatype)


def _element(value: Any, datatype: Datatype) -> object:
    """The value as an element of this datatype; None if it is none."""
    if datatype is Datatype.BYTES:
        return value.encode() if isinstance(value, str) else None
    if datatype is Datatype.BOOL:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    dtype = NUMPY[datatype]
    if datatype in FLOATS:
        with np.errstate(over="ignore"):
            found = float(np.array(float(value)).astype(dtype))
        return found if isfinite(found) or not isfinite(value) else None
    limits = np.iinfo(dtype)
    good = isinstance(value, int) and limits.min <= value <= limits.max
    return value if good else None


def _object(path: str, told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise Misfit(f"{path}: must be an object, got {shown(told)}")
    return told


def _check_keys(path: str, told: Mapping[str, Any], keys: Collection[str]) -> None:
    if unknown := [key for key in told if key not in keys]:
        raise Misfit(f"{path}: '{unknown[0]}' is not one of {quoted(keys)}")
