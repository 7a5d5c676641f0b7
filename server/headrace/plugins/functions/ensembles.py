"""`@ensemble`: an ensemble written as a typed function over models.

The function is called once, with placeholders for its inputs: each `step` in it becomes a step of
the graph, and nothing of it is left afterwards. What remains is a configuration, which is checked
and served like one that was written by hand. It is written as text, without a message: a worker
imports this module with a model's file, and may have neither the messages nor protobuf.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from headrace.plugins.functions.configuration import config_type
from headrace.plugins.functions.signature import (
    CallMode,
    Columns,
    FunctionSignature,
    Options,
    Packing,
    Port,
    SignatureError,
    read_signature,
)


class StepTensor:
    """A placeholder for a tensor of an ensemble, while its function is called.

    `label` is its name in the ensemble, "" until it has one; `what` names it in messages.
    """

    def __init__(self, trace: "_Trace", what: str, label: str = "") -> None:
        self.trace = trace
        self.what = what
        self.label = label

    def __bool__(self) -> bool:
        raise SignatureError(f"{self.what} has no value: the function is called without any")

    __iter__ = None  # indexing would let loops over it go on forever


class StepOutputs:
    """The outputs of a step: attributes, or items, by the names that the step's model has."""

    def __init__(self, trace: "_Trace", number: int) -> None:
        self._trace = trace
        self._number = number

    # Typed as what a function declares to return, which stands for the tensors of requests.
    def __getitem__(self, name: str) -> Any:
        return self._trace.output(self._number, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class _Trace:
    """The steps of a function that is being called."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, int, Mapping[str, StepTensor]]] = []
        self._outputs: dict[tuple[int, str], StepTensor] = {}

    def add(self, model: str, version: int, inputs: Mapping[str, StepTensor]) -> StepOutputs:
        """Add a step."""
        self._steps.append((model, version, inputs))
        return StepOutputs(self, len(self._steps) - 1)

    def output(self, number: int, name: str) -> StepTensor:
        """The placeholder for an output of a step."""
        if (number, name) not in self._outputs:
            what = f"output '{name}' of the step of '{self._steps[number][0]}'"
            self._outputs[number, name] = StepTensor(self, what)
        return self._outputs[number, name]

    def fields(self, given: Iterable[StepTensor]) -> Iterator[str]:
        """The steps as fields of a configuration; tensors without a label get one.

        Raises `SignatureError` for one of the `given` inputs, or a step, that nothing uses.
        """
        used = {tensor for _, _, inputs in self._steps for tensor in inputs.values()}
        for tensor in given:
            if tensor not in used:
                raise SignatureError(f"{tensor.what} is used by no step")
        for (number, name), tensor in self._outputs.items():
            if tensor in used:
                tensor.label = tensor.label or f"{number}.{name}"
        for number, (model, version, inputs) in enumerate(self._steps):
            made = {n: t.label for (of, n), t in self._outputs.items() if of == number and t.label}
            if not made:
                raise SignatureError(f"no output of the step of '{model}' is used")
            yield f"  step {{\n    model_name: {_text(model)}\n    model_version: {version or -1}"
            for name, tensor in inputs.items():
                yield f"    input_map {{ key: {_text(name)} value: {_text(tensor.label)} }}"
            for name, label in made.items():
                yield f"    output_map {{ key: {_text(name)} value: {_text(label)} }}"
            yield "  }"


def step(model: str, version: int = 0, /, **inputs: Any) -> StepOutputs:
    """Run a model in an ensemble: its inputs by name; the outputs by `.NAME` or `["NAME"]`.

    `version` 0 is the one that requests without a version go to; it may also be given by name,
    unless the model has an input of that name. Only for functions under `@headrace.ensemble`;
    raises `SignatureError`.
    """
    if "version" in inputs and not isinstance(inputs["version"], StepTensor | StepOutputs):
        version = inputs.pop("version")
    for name, tensor in inputs.items():
        if not isinstance(tensor, StepTensor):
            hint = ": take one of its outputs" if isinstance(tensor, StepOutputs) else ""
            raise SignatureError(
                f"input '{name}' of the step of '{model}' is no tensor of the ensemble, but"
                f" {tensor!r:.60}{hint}"
            )
    if not inputs:
        raise SignatureError(f"the step of '{model}' has no input")
    first: StepTensor = next(iter(inputs.values()))
    return first.trace.add(model, version, inputs)


class Ensemble:
    """An ensemble made of a function; `config` is its `config.pbtxt`.

    `headrace.serve` and `headrace.Engine` take it as a model.
    """

    def __init__(self, function: Callable[..., Any], config: str) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.config = config

    def save(self, repository: str | Path) -> Path:
        """Write the model's directory into a model repository, for this server or Triton."""
        folder = Path(repository, self.name)
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(self.config, encoding="utf-8")
        return folder

    def __repr__(self) -> str:
        return f"<ensemble {self.name}>"


@overload
def ensemble(function: Callable[..., Any], /) -> Ensemble: ...


@overload
def ensemble(
    *,
    max_batch_size: int = 0,
    outputs: Sequence[str] | None = None,
    max_inflight_requests: int = 0,
) -> Callable[[Callable[..., Any]], Ensemble]: ...


def ensemble(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_batch_size: int = 0,
    outputs: Sequence[str] | None = None,
    max_inflight_requests: int = 0,
) -> Any:
    """Make an ensemble of a function over models.

    Its annotations declare inputs and outputs as those of `@headrace.model` do, and each
    `headrace.step` in it runs a model. The function is called once, now; it becomes an
    `Ensemble`, with `config` and `save`.

    With `max_batch_size` the first dimension of all inputs and outputs counts rows. `outputs`
    names the outputs of a function that returns a tuple. `max_inflight_requests` limits the calls
    of each step for one request, with decoupled models; 0 for no limit.

    Raises `SignatureError` if the annotations, or the graph, are insufficient.
    """
    options = Options(max_batch_size, None if outputs is None else tuple(outputs), False)

    def make(found: Callable[..., Any]) -> Ensemble:
        if not inspect.isfunction(found):
            raise SignatureError(f"@ensemble takes a function, got {found!r:.60}")
        try:
            return Ensemble(found, _config_of(found, options, max_inflight_requests))
        except SignatureError as error:
            text = str(error).removeprefix(f"model {found.__name__}: ")
            raise SignatureError(f"ensemble {found.__name__}: {text}") from None

    return make if function is None else make(function)


def _config_of(function: Callable[..., Any], options: Options, most: int) -> str:
    signature = read_signature(function, function.__name__, options)
    _check(signature)
    trace = _Trace()
    given = {
        port.name: StepTensor(trace, f"input '{port.name}'", port.name) for port in signature.inputs
    }
    for name, tensor in _unpacked(signature, function(**given)).items():
        if not isinstance(tensor, StepTensor):
            raise SignatureError(f"output '{name}' is no output of a step, but {tensor!r:.60}")
        if tensor.label:
            raise SignatureError(f"output '{name}' is {tensor.what}, which has a name already")
        tensor.label = name
    lines = [
        f"name: {_text(signature.name)}", 'platform: "ensemble"',
        f"max_batch_size: {signature.max_batch_size}",
        *(_declared("input", port) for port in signature.inputs),
        *(_declared("output", port) for port in signature.results),
        "ensemble_scheduling {", *trace.fields(given.values()),
        *([f"  max_inflight_requests: {most}"] if most else []), "}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _declared(kind: str, port: Port) -> str:
    optional = " optional: true" if port.optional else ""
    dims = ", ".join(map(str, port.shape))
    kind_of = config_type(port)
    return f"{kind} {{ name: {_text(port.name)} data_type: {kind_of} dims: [ {dims} ]{optional} }}"


def _text(text: str) -> str:
    """A text in a configuration."""
    return json.dumps(text, ensure_ascii=False)


def _check(signature: FunctionSignature) -> None:
    """Refuse what only functions that compute can have."""
    if signature.mode is CallMode.STREAM:
        raise SignatureError("it cannot yield: it is decoupled if one of its models is")
    if signature.asynchronous:
        raise SignatureError("it is no coroutine: it is called without data, and only once")
    if signature.context:
        raise SignatureError("it has no Context: it is called without a request")
    for value in (*signature.parameters, *signature.outputs):
        if isinstance(value.declared, Columns):
            raise SignatureError(f"'{value.name}' is a data frame; name its tensors instead")


def _unpacked(signature: FunctionSignature, found: Any) -> Mapping[str, Any]:
    """The values that a function has returned, by output; raises `SignatureError`."""
    names = [value.name for value in signature.outputs]
    match signature.packing:
        case Packing.ONE:
            return {names[0]: found}
        case Packing.TUPLE if isinstance(found, tuple) and len(found) == len(names):
            return dict(zip(names, found, strict=True))
        case Packing.KEYS if isinstance(found, Mapping) and set(found) == set(names):
            return found
        case Packing.FIELDS if all(hasattr(found, name) for name in names):
            return {name: getattr(found, name) for name in names}
    raise SignatureError(f"it returns {found!r:.80} in place of {', '.join(names)}")
