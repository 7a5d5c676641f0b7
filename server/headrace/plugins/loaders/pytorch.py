"""PyTorch programs: TorchScript (`model.pt`) and exported programs (`model.pt2`).

Names follow Triton's PyTorch backend: `INPUT__0`, or any name with such a number, or the names of
arguments; otherwise inputs are assigned in the order of the configuration.
"""

import importlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ipc.elements import Array
from headrace.plugins.loaders.tabular import (
    DeclaredTensor,
    fill,
    model_class,
    needed,
    threads,
    unreadable,
)

_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ExportParts:
    """The signature of a program: `inputs` and `outputs` with all dimensions, -1 if variable.

    `most_rows` is the maximum number of rows; 0 if the first dimension does not count rows in every
    tensor.
    """

    arguments: Sequence[str]
    keywords: Sequence[str]
    inputs: Sequence[DeclaredTensor]
    outputs: Sequence[DeclaredTensor]
    most_rows: int


def export_parts(torch: Any, program: Any) -> ExportParts:
    """Read the signature of an exported program.

    Raises `ValueError` for arguments besides tensors.
    """
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
    """Move a program to another device; raises `ValueError` if PyTorch is too old."""
    try:
        passes = importlib.import_module("torch.export.passes")  # since 2.6
    except ImportError:
        raise ValueError("exported programs on a GPU need PyTorch 2.6 or newer") from None
    # Tensors that the program creates itself, such as ranges, name a device, too.
    return passes.move_to_device_pass(program, device)


def _value(nodes: Any, name: Any) -> Any:
    value = nodes[name].meta.get("val") if name in nodes else None
    if not hasattr(value, "dtype"):
        raise ValueError(
            f"'{name}' is no tensor: only programs that take and give tensors are served"
        )
    return value


def _declared(name: str, value: Any, datatypes: Any) -> DeclaredTensor:
    datatype = datatypes.get(value.dtype)
    if datatype is None:
        raise ValueError(f"{name} is {value.dtype}, which cannot be served")
    return DeclaredTensor(
        name, datatype, tuple(d if isinstance(d, int) else -1 for d in value.shape)
    )


def _most_rows(program: Any, values: Sequence[Any]) -> int:
    """The maximum of the variable that is the first dimension of all tensors."""
    first: list[Any] = [value.shape[0] if len(value.shape) else 1 for value in values]
    if not first or any(isinstance(size, int) for size in first):
        return 0
    symbols = {size.node.expr for size in first}
    bounds = program.range_constraints.get(next(iter(symbols)))
    if len(symbols) > 1 or bounds is None or int(bounds.lower) > 1:
        return 0
    # Without a bound it is infinity, which is no number: it can be compared only.
    return _UNBOUNDED if bounds.upper >= _UNBOUNDED else int(bounds.upper)


_NUMBERED = re.compile(r".*__(\d+)")


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a file; raises `ImportError` or `ValueError`."""
    path = Path(document["file"])
    if not document["trusted"]:
        raise PermissionError(f"{path.name} is not trusted")
    torch = needed("torch", "torch")
    torch.set_num_threads(threads())
    try:
        if path.suffix == ".pt2":
            program = torch.export.load(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TorchScript's deprecation warning
                program = torch.jit.load(path, map_location="cpu")
    except Exception as error:
        raise unreadable(path.name, "a PyTorch program", error) from error
    if path.suffix != ".pt2":
        arguments = [argument.name for argument in program.forward.schema.arguments[1:]]
        script = program.eval()
        return model_class(Program(torch, script, script.to, arguments), document)
    parts = export_parts(torch, program)
    if parts.most_rows:
        default = document.get("default_max_batch_size", 0)
        document = {**document, "default_max_batch_size": min(default, parts.most_rows)}
    else:
        document = {**document, "default_max_batch_size": 0}

    def moved(device: str) -> Any:
        return moved_program(program, device).module()

    named = Program(torch, program.module(), moved, parts.arguments, parts.keywords)
    named.describe(parts.inputs, parts.outputs)
    return model_class(named, document)


class Program:
    """A program as an artefact: tensors in, one tensor or several out."""

    columns: Sequence[str] = ()

    def __init__(
        self,
        torch: Any,
        call: Any,
        moved: Callable[[str], Any],
        arguments: Sequence[str],
        keywords: Sequence[str] = (),
    ) -> None:
        """`arguments` are all names, of which `keywords` are passed by name.

        `moved` returns the same program on another device.
        """
        self._torch = torch
        self._call = call
        self._moved = moved
        self._arguments = list(arguments)
        self._keywords = frozenset(keywords)
        self._inputs: dict[str, str] = {}  # arguments by input name
        self._outputs: dict[str, int] = {}  # positions in the program's result
        self._device = "cpu"
        self._known: tuple[Sequence[DeclaredTensor], Sequence[DeclaredTensor]] = ((), ())

    def describe(self, inputs: Sequence[DeclaredTensor], outputs: Sequence[DeclaredTensor]) -> None:
        """Set the program's own declarations, including the first dimension."""
        self._known = inputs, outputs

    def complete(self, config: dict[str, Any], lead: Sequence[int]) -> None:
        """Complete the configuration from the program.

        Raises `ValueError` if it declares nothing.
        """
        for kind, known in zip(("input", "output"), self._known, strict=True):
            if not known and not config.get(kind):
                raise ValueError(
                    f"TorchScript does not say what its tensors look like: declare {kind} in"
                    f" config.pbtxt (the arguments are {', '.join(self._arguments)})"
                )
            names = [tensor["name"] for tensor in config.get(kind, ())]
            places = (
                self._places(kind, names) if names else {d.name: i for i, d in enumerate(known)}
            )
            if not lead and any(d.dims[:1] != (-1,) for d in known):
                raise ValueError(
                    "max_batch_size is not 0, but the first dimension of the program's tensors does"
                    " not vary"
                )
            # Without a batch dimension the program's first dimension is like any other.
            cut = 0 if lead else 1
            found = [
                DeclaredTensor(name, known[place].datatype, known[place].dims[cut:])
                for name, place in places.items()
                if place < len(known)
            ]
            fill(config, kind, found, ())
            for tensor in () if lead else config[kind]:
                if tensor["name"] in places and not tensor.get("dims"):
                    # One value per row and no axis for it: clients see [rows, 1].
                    tensor |= {"dims": [1], "reshape": {"shape": []}}

    def bind(
        self, inputs: Sequence[DeclaredTensor], outputs: Sequence[DeclaredTensor], device: str
    ) -> None:
        """Assign arguments to inputs; raises `ValueError`."""
        names = [declared.name for declared in inputs]
        places = self._places("input", names)
        if wrong := [n for n, place in places.items() if place >= len(self._arguments)]:
            raise ValueError(
                f"the program has no argument for input '{wrong[0]}'; it takes"
                f" {', '.join(self._arguments)}"
            )
        self._inputs = {name: self._arguments[place] for name, place in places.items()}
        self._outputs = self._places("output", [declared.name for declared in outputs])
        self._device = device
        if device != "cpu":
            _check_device(self._torch, device)
            self._call = self._moved(device)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """Run the program."""
        torch = self._torch
        given = {}
        for name, array in inputs.items():
            # Inputs are read-only, and a program may write to them.
            own = array if array.flags.writeable else array.copy()
            given[self._inputs[name]] = torch.from_numpy(np.ascontiguousarray(own)).to(self._device)
        positional = [given[a] for a in self._arguments if a in given and a not in self._keywords]
        named = {a: given[a] for a in self._keywords if a in given}
        with torch.inference_mode():
            found = self._call(*positional, **named)
        if torch.is_tensor(found):
            found = [found]
        results = {}
        for name in wanted:
            if isinstance(found, Mapping):
                results[name] = _array(torch, found[name])
            elif self._outputs[name] < len(found):
                results[name] = _array(torch, found[self._outputs[name]])
            else:
                raise ValueError(f"the program gives {len(found)} tensors, none for '{name}'")
        return results

    def _places(self, kind: str, names: Sequence[str]) -> dict[str, int]:
        matches = [_NUMBERED.fullmatch(name) for name in names]
        if all(matches):
            return {n: int(m[1]) for n, m in zip(names, matches, strict=True) if m is not None}
        if kind == "input" and all(name in self._arguments for name in names):
            return {name: self._arguments.index(name) for name in names}
        return {name: place for place, name in enumerate(names)}


def _check_device(torch: Any, device: str) -> None:
    """Raise `ValueError`, with the cause, if PyTorch cannot use a GPU."""
    number = torch.device(device).index or 0
    if torch.version.cuda is None:
        raise ValueError(
            f"its instance group asks for GPU {number}, but PyTorch {torch.__version__} is built"
            " without CUDA; the model's environment needs a build with it"
        )
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"its instance group asks for GPU {number}, but PyTorch {torch.__version__} (CUDA"
            f" {torch.version.cuda}) can use {torch.cuda.device_count()} GPUs"
        )


def _array(torch: Any, tensor: Any) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # numpy has no such type
    array: Array = tensor.detach().cpu().numpy()
    return array
