"""What an exported PyTorch program says of its inputs and outputs."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.workers.loaders.rows import Declared

_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ExportParts:
    """`inputs` and `outputs` have all their dimensions, -1 where one is variable.

    `most_rows` is how many rows the program takes at once; 0 if its first dimension does not count
    rows in every tensor.
    """

    arguments: Sequence[str]
    keywords: Sequence[str]
    inputs: Sequence[Declared]
    outputs: Sequence[Declared]
    most_rows: int


def export_parts(torch: Any, program: Any) -> ExportParts:
    """Read the signature of a program; raises `ValueError` for what is no tensor."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    values_in = [_value(nodes, name) for name in signature.user_inputs]
    values_out = [_value(nodes, name) for name in signature.user_outputs]
    datatypes = {
        torch.bool: "BOOL", torch.uint8: "UINT8", torch.int8: "INT8", torch.int16: "INT16",
        torch.int32: "INT32", torch.int64: "INT64", torch.float16: "FP16",
        torch.float32: "FP32", torch.float64: "FP64",
    }  # fmt: skip
    arguments = [str(name) for name in signature.user_inputs]
    taken = program.call_spec.in_spec
    _, keywords = taken.children() if hasattr(taken, "children") else taken.children_specs
    by_name = list(keywords.context or ())
    inputs = [
        _declared(f"INPUT__{index}", value, datatypes) for index, value in enumerate(values_in)
    ]
    outputs = [
        _declared(f"OUTPUT__{index}", value, datatypes) for index, value in enumerate(values_out)
    ]
    rows = _most_rows(program, [*values_in, *values_out])
    return ExportParts(arguments, by_name, inputs, outputs, rows)


def moved_program(program: Any, device: str) -> Any:
    """The same program on another device; raises `ValueError` if this PyTorch cannot."""
    try:
        passes = importlib.import_module("torch.export.passes")  # from 2.6 on
    except ImportError:
        raise ValueError("exported programs on a GPU need PyTorch 2.6 or newer") from None
    # Also what the program makes itself, such as a range of numbers, names a device.
    return passes.move_to_device_pass(program, device)


def _value(nodes: Any, name: Any) -> Any:
    value = nodes[name].meta.get("val") if name in nodes else None
    if not hasattr(value, "dtype"):
        raise ValueError(
            f"'{name}' is no tensor: only programs that take and give tensors are served"
        )
    return value


def _declared(name: str, value: Any, datatypes: Any) -> Declared:
    datatype = datatypes.get(value.dtype)
    if datatype is None:
        raise ValueError(f"{name} is {value.dtype}, which cannot be served")
    return Declared(name, datatype, tuple(d if isinstance(d, int) else -1 for d in value.shape))


def _most_rows(program: Any, values: Sequence[Any]) -> int:
    """The largest size of the one variable that is the first dimension of all tensors."""
    first: list[Any] = [value.shape[0] if len(value.shape) else 1 for value in values]
    if not first or any(isinstance(size, int) for size in first):
        return 0
    symbols = {size.node.expr for size in first}
    bounds = program.range_constraints.get(next(iter(symbols)))
    if len(symbols) > 1 or bounds is None or int(bounds.lower) > 1:
        return 0
    try:
        return min(int(bounds.upper), _UNBOUNDED)
    except (OverflowError, TypeError, ValueError):  # it is infinite
        return _UNBOUNDED
