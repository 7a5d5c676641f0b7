"""The graph of an ensemble: its steps, and the tensors that go from one to the next.

Read from `ensemble_scheduling`, and checked in two goes: the graph alone when the model is opened,
and against the signatures of its steps' models when these are loaded. An *edge* is a tensor's way
from what produces it, a step or the request, to what consumes it, a step or the response.

A step whose model is decoupled begins a *domain*: the steps after it run once for each of its
responses. A domain is the tuple of these steps, outermost first; () is that of the request.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from headrace.core.errors import Contradiction
from headrace.core.model_spec import Used
from headrace.core.signature import Shape, Signature, TensorSpec, fits, quoted
from headrace.core.tensors import Tensor, TensorArray, brackets, new_tensor
from headrace.protocol.pb.model_config_pb2 import ModelConfig

Problem = tuple[str, str]  # a field of the configuration, and what is wrong with it
Domain = tuple[int, ...]
_NOT_FOR = {"instance_group", "optimization", "model_warmup"}  # settings of models that run
_APART = "decoupled models, whose responses do not belong to each other"


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step: tensors of the ensemble by the model's inputs, and by its outputs.

    `version` is "" for the one that the model's requests without a version go to.
    """

    number: int
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def used(self) -> Used:
        """The model that it runs."""
        return self.model, self.version

    @property
    def name(self) -> str:
        """The step in messages and metrics."""
        return f"{self.number}:{self.model}"

    @property
    def path(self) -> str:
        """The field of the configuration that describes the step."""
        return f"ensemble_scheduling.step[{self.number}]"

    def input_path(self, name: str) -> str:
        """The field that maps an input."""
        return f"{self.path}.input_map['{name}']"

    def output_path(self, name: str) -> str:
        """The field that maps an output."""
        return f"{self.path}.output_map['{name}']"


def read_steps(config: ModelConfig) -> list[EnsembleStep]:
    """The steps of a configuration, in its order."""
    return [
        EnsembleStep(
            number, step.model_name, str(step.model_version) if step.model_version > 0 else "",
            dict(sorted(step.input_map.items())), dict(sorted(step.output_map.items())),
        )
        for number, step in enumerate(config.ensemble_scheduling.step)
    ]  # fmt: skip


def used_models(config: ModelConfig) -> list[Used]:
    """The models of the steps; raises `Contradiction` for a graph that cannot run."""
    steps = read_steps(config)
    if problems := list(_graph_problems(config, steps)):
        raise Contradiction(problems)
    return [step.used for step in steps]


def _graph_problems(config: ModelConfig, steps: Sequence[EnsembleStep]) -> Iterator[Problem]:
    """Problems of the graph alone: what is not named, produced or used, or goes in a circle."""
    for name in sorted(_NOT_FOR & {one.name for one, _ in config.ListFields()}):
        yield name, f"{name} should not be specified for an ensemble, which runs nothing itself"
    if not steps:
        yield "ensemble_scheduling", "an ensemble needs at least one step"
        return
    if not config.input or not config.output:
        yield "ensemble_scheduling", "an ensemble declares each input and output itself"
    for step in steps:
        if not step.model:
            yield f"{step.path}.model_name", "every step must name its model"
        if not step.inputs:
            yield f"{step.path}.input_map", "every step must map an input"
        if not step.outputs:
            yield f"{step.path}.output_map", "every step must map an output"
    inputs = {tensor.name for tensor in config.input}
    producers: dict[str, str] = {}
    for step in steps:
        for name, tensor in step.outputs.items():
            path = step.output_path(name)
            if tensor in inputs:
                yield path, f"tensor '{tensor}' is an input of the ensemble"
            elif tensor in producers:
                yield path, f"tensor '{tensor}' is produced twice, first by {producers[tensor]}"
            else:
                producers[tensor] = path
    consumed = {tensor for step in steps for tensor in step.inputs.values()}
    wanted = {tensor.name for tensor in config.output}
    for step in steps:
        for name, tensor in step.inputs.items():
            if tensor not in inputs and tensor not in producers:
                text = f"tensor '{tensor}' is produced by no step, and is no input of the ensemble"
                yield step.input_path(name), text
    for index, output in enumerate(config.output):
        if output.name not in producers:
            yield f"output[{index}].name", f"'{output.name}' is produced by no step"
    for index, given in enumerate(config.input):
        if given.name not in consumed:
            yield f"input[{index}].name", f"'{given.name}' is used by no step"
    for tensor, path in producers.items():
        if tensor not in consumed | wanted:
            yield path, f"tensor '{tensor}' is used by no step, and is no output: leave it out"
    try:
        TopologicalSorter(predecessors(steps)).prepare()
    except CycleError as error:
        way = " -> ".join(f"{number} ({steps[number].model})" for number in error.args[1])
        yield "ensemble_scheduling.step", f"the steps wait for each other: {way}"


def predecessors(steps: Sequence[EnsembleStep]) -> dict[int, set[int]]:
    """The steps, by number, whose outputs each step needs."""
    makers = _makers(steps)
    return {
        step.number: {makers[tensor] for tensor in step.inputs.values() if tensor in makers}
        for step in steps
    }


def _makers(steps: Sequence[EnsembleStep]) -> dict[str, int]:
    """The number of the step that produces each tensor."""
    return {tensor: step.number for step in steps for tensor in step.outputs.values()}


class EdgeEnd(NamedTuple):
    """One end of an edge: who is at it, in words, with the tensor that it declares."""

    who: str
    spec: TensorSpec
    dims: Shape
    batches: bool

    @property
    def whole(self) -> Shape:
        """The shape with the batch dimension, if there is one."""
        return (-1, *self.dims) if self.batches else self.dims


@dataclass(frozen=True, slots=True)
class Fit:
    """The change of shape at an edge between what batches and what does not; views, no copies."""

    source: bool  # what produces the tensor batches
    target: bool
    dims: Shape  # what its consumer declares

    def __call__(self, array: TensorArray) -> TensorArray:
        """The array as its consumer expects it, as far as possible: it is checked there."""
        shape = array.shape
        if self.target and not self.source and fits(shape, self.dims):
            return array.reshape((1, *shape))
        if self.source and not self.target and shape[:1] == (1,) and fits(shape[1:], self.dims):
            return array.reshape(shape[1:])
        return array


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that run for a request with certain outputs.

    `consumers` are the steps by the tensor that they need, `outputs` the wanted outputs, all of
    which are complete in the `domain`. `sizes` are the numbers of steps in each domain, `wanted`
    the outputs of each step's model that are needed, () for all that it has.
    """

    outputs: tuple[str, ...]
    consumers: Mapping[str, tuple[int, ...]]
    domain: Domain
    sizes: Mapping[Domain, int]
    wanted: Mapping[int, tuple[str, ...]]


@dataclass(slots=True)
class Graph:
    """The checked graph of an ensemble, for its requests.

    `domains` are those in which the steps run, `tensor_domains` those of all tensors but the
    ensemble's inputs. `fits` are the changes of shape, by step and input, and by output of the
    ensemble, under the step number -1. `counts` are the numbers of outputs of the steps' models.
    """

    signature: Signature
    steps: Sequence[EnsembleStep]
    most: int  # calls of one step at a time, for one request; 0 for any number
    domains: Sequence[Domain]
    tensor_domains: Mapping[str, Domain]
    decoupled: frozenset[int]
    fits: Mapping[tuple[int, str], Fit]
    counts: Sequence[int]
    _plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, outputs: tuple[str, ...]) -> Plan:
        """The plan for some outputs, () for all."""
        if (found := self._plans.get(outputs)) is None:
            found = self._plans[outputs] = self._make_plan(outputs)
        return found

    def _make_plan(self, outputs: tuple[str, ...]) -> Plan:
        all_names = tuple(self.signature.names)
        names = tuple(name for name in all_names if name in outputs) or all_names
        makers = _makers(self.steps)
        needed, left = set[int](), [makers[name] for name in names]
        while left:
            if (number := left.pop()) not in needed:
                needed.add(number)
                inputs = self.steps[number].inputs.values()
                left += [makers[tensor] for tensor in inputs if tensor in makers]
        consumers: dict[str, tuple[int, ...]] = {}
        for number in sorted(needed):
            for tensor in dict.fromkeys(self.steps[number].inputs.values()):
                consumers[tensor] = (*consumers.get(tensor, ()), number)
        domain = max((self.tensor_domains[name] for name in names), key=len)
        wanted: dict[int, tuple[str, ...]] = {}
        for number in needed:
            outputs_of = self.steps[number].outputs.items()
            asked = tuple(name for name, t in outputs_of if t in consumers or t in names)
            wanted[number] = () if len(asked) == self.counts[number] else asked
        sizes = Counter(self.domains[number] for number in needed)
        return Plan(names, consumers, domain, sizes, wanted)

    def fitted(self, number: int, name: str, tensor: Tensor) -> Tensor:
        """A tensor under the name, and in the shape, of what consumes it."""
        array = tensor.array
        if self.fits and (fit := self.fits.get((number, name))) is not None:
            array = fit(array)
        return new_tensor((name, tensor.datatype, array))


def use_problems(
    config: ModelConfig, signature: Signature, used: Mapping[Used, Signature]
) -> Iterator[Problem]:
    """Problems of the graph with the signatures of its steps' models."""
    steps = read_steps(config)
    most = signature.max_batch_size
    problems = False
    for step in steps:
        model = used[step.used]
        for path, text in _step_problems(step, model):
            problems = True
            yield path, text
        if model.max_batch_size * model.parts < most:
            text = f"ensemble '{signature.model}' allows maximum batch size {most}, but it contains"
            own = f"model '{step.model}' which only allows maximum batch size"
            yield "max_batch_size", f"{text} {own} {model.max_batch_size}"
    if problems:
        return
    for _, path, source, target in _edges(signature, steps, used):
        yield from _edge_problems(path, source, target)
    domains, of_tensors = _domains(steps, _decoupled(steps, used))
    joined = [
        step for step in steps if _apart(domains[step.number], of_tensors, step.inputs.values())
    ]
    for step in joined:
        yield step.path, f"the step of model '{step.model}' needs tensors of different {_APART}"
    if not joined:
        longest = max((of_tensors[name] for name in signature.names), key=len)
        for name in _apart(longest, of_tensors, signature.names):
            yield "output", f"'{name}' and another output come from different {_APART}"


def make_graph(config: ModelConfig, signature: Signature, used: Mapping[Used, Signature]) -> Graph:
    """The graph of a configuration without problems."""
    steps = read_steps(config)
    decoupled = _decoupled(steps, used)
    found = {
        key: Fit(source.batches, target.batches, target.dims)
        for key, _, source, target in _edges(signature, steps, used)
        if source.batches is not target.batches
    }
    most = config.ensemble_scheduling.max_inflight_requests
    counts = [len(used[step.used].outputs) for step in steps]
    return Graph(signature, steps, most, *_domains(steps, decoupled), decoupled, found, counts)


def _step_problems(step: EnsembleStep, model: Signature) -> Iterator[Problem]:
    inputs = {spec.name: spec for spec in model.inputs}
    for name in step.inputs:
        if name not in inputs:
            text = f"model '{step.model}' has no input '{name}', it has {quoted(inputs)}"
            yield step.input_path(name), text
    for name in step.outputs:
        if name not in model.names:
            text = f"model '{step.model}' has no output '{name}', it has {quoted(model.names)}"
            yield step.output_path(name), text
    for name, spec in inputs.items():
        if not spec.optional and name not in step.inputs:
            text = f"model '{step.model}' needs its input '{name}', which is not mapped"
            yield f"{step.path}.input_map", text


def _edges(
    signature: Signature, steps: Sequence[EnsembleStep], used: Mapping[Used, Signature]
) -> Iterator[tuple[tuple[int, str], str, EdgeEnd, EdgeEnd]]:
    """Every edge with its place, as in `Graph.fits`, and the field that makes it."""
    sources = {spec.name: _end("input", spec, signature) for spec in signature.inputs}
    for step in steps:
        model = used[step.used]
        for spec in model.outputs:
            if (tensor := step.outputs.get(spec.name)) is not None:
                sources[tensor] = _end("output", spec, model, step)
    for step in steps:
        model = used[step.used]
        for name, tensor in step.inputs.items():
            target = _end("input", model.input(name), model, step)
            yield (step.number, name), step.input_path(name), sources[tensor], target
    for index, spec in enumerate(signature.outputs):
        target = _end("output", spec, signature)
        yield (-1, spec.name), f"output[{index}]", sources[spec.name], target


def _end(
    kind: str, spec: TensorSpec, owner: Signature, step: EnsembleStep | None = None
) -> EdgeEnd:
    """The end of an edge at a tensor of a step's model, or of the ensemble itself."""
    if step is None:
        who, dims = "the ensemble", spec.model_dims
    else:
        who, dims = f"model '{step.model}' (step {step.number})", spec.dims
    return EdgeEnd(f"{kind} '{spec.name}' of {who}", spec, dims, owner.batches)


def _edge_problems(path: str, source: EdgeEnd, target: EdgeEnd) -> Iterator[Problem]:
    one, other = source.spec.datatype, target.spec.datatype
    if one is not other:
        yield path, f"{source.who} is {one}, and {target.who} is {other}"
    # As in Triton: what batches may be given as it is to what declares the rows as a dimension.
    if not (_agree(source.dims, target.dims) or _agree(source.whole, target.whole)):
        shapes = brackets(source.whole), brackets(target.whole)
        text = f"{source.who} has the shape {shapes[0]}, and {target.who} the shape {shapes[1]}"
        yield path, text
    if source.spec.optional and not target.spec.optional:
        yield path, f"{source.who} is optional, and {target.who} is not"


def _agree(one: Shape, other: Shape) -> bool:
    return len(one) == len(other) and all(
        a == b or -1 in (a, b) for a, b in zip(one, other, strict=True)
    )


def _decoupled(steps: Sequence[EnsembleStep], used: Mapping[Used, Signature]) -> frozenset[int]:
    """The numbers of the steps whose models are decoupled."""
    return frozenset(step.number for step in steps if used[step.used].decoupled)


def _domains(
    steps: Sequence[EnsembleStep], decoupled: frozenset[int]
) -> tuple[list[Domain], dict[str, Domain]]:
    """The domain of each step, the longest one of its inputs; and of each tensor of a step."""
    domains: list[Domain] = [()] * len(steps)
    of_tensors: dict[str, Domain] = {}
    for number in TopologicalSorter(predecessors(steps)).static_order():
        step = steps[number]
        found = (of_tensors.get(tensor, ()) for tensor in step.inputs.values())
        domain = domains[number] = max(found, key=len, default=())
        after = (*domain, number) if number in decoupled else domain
        of_tensors.update(dict.fromkeys(step.outputs.values(), after))
    return domains, of_tensors


def _apart(domain: Domain, of_tensors: Mapping[str, Domain], names: Iterable[str]) -> list[str]:
    """The tensors, of some, that steps in a domain do not see."""
    found = {name: of_tensors.get(name, ()) for name in names}
    return [name for name, own in found.items() if domain[: len(own)] != own]
