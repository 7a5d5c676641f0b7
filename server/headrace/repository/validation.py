"""Validation of a configuration: each problem names the field and what was expected.

Every field of `ModelConfig` is accepted, so that a repository made for Triton loads. A field that
is set but has no effect here is reported once, when its model is loaded: `EFFECTIVE` lists the
others.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from google.protobuf.message import Message

from headrace.core.columns import COLUMNS, columns_by_input
from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.model_spec import TensorInfo
from headrace.core.ragged import RaggedForm
from headrace.core.signature import quoted
from headrace.core.tensors import brackets
from headrace.protocol.pb import model_config_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository import fail_over
from headrace.repository.completion import ModelTensor, can_divide, divides, model_dims
from headrace.repository.config import Problem
from headrace.repository.fail_over import PARAMETERS as FAIL_OVER
from headrace.repository.reading import OVERLOAD_DELAY

EFFECTIVE = frozenset(
    {
        "name", "platform", "backend", "max_batch_size", "default_model_filename",
        "version_policy.latest.num_versions", "version_policy.all",
        "version_policy.specific.versions", "input.name", "input.data_type", "input.dims",
        "input.optional", "input.reshape", "input.reshape.shape", "input.allow_ragged_batch",
        "batch_input", "batch_output", "model_repository_agents", "output.name",
        "output.data_type", "output.dims", "output.reshape", "output.reshape.shape",
        "output.label_filename", "instance_group.name", "instance_group.kind",
        "instance_group.count", "instance_group.gpus", "instance_group.rate_limiter",
        "dynamic_batching",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.max_queue_delay_microseconds", "dynamic_batching.preserve_ordering",
        "dynamic_batching.priority_levels", "dynamic_batching.default_priority_level",
        "dynamic_batching.default_queue_policy.timeout_action",
        "dynamic_batching.default_queue_policy.default_timeout_microseconds",
        "dynamic_batching.default_queue_policy.allow_timeout_override",
        "dynamic_batching.default_queue_policy.max_queue_size",
        "dynamic_batching.priority_queue_policy", "optimization.graph.level",
        "optimization.input_pinned_memory.enable", "optimization.output_pinned_memory.enable",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization.execution_accelerators.cpu_execution_accelerator", "metric_tags",
        "model_transaction_policy.decoupled", "sequence_batching", "ensemble_scheduling",
        "model_warmup.name", "response_cache.enable",
        "model_warmup.batch_size", "model_warmup.inputs", "model_warmup.count",
        "model_metrics.metric_control.metric_identifier.family",
        "model_metrics.metric_control.histogram_options.buckets",
    }
)  # fmt: skip

# The server's settings in the `parameters` map; backends read further ones.
TRAFFIC = "traffic"  # the parameter with traffic rules, changed in place
BUCKETS = "pad_to_buckets"  # the parameter with buckets of variable dimensions
OWN_PARAMETERS = (
    frozenset(
        {"execution", "batching", "split_requests", OVERLOAD_DELAY, TRAFFIC, COLUMNS, BUCKETS}
    )
    | FAIL_OVER
)
_TAG = re.compile(r"[A-Za-z0-9_]+")
_ALIKE = 0.85  # similarity above which a name counts as misspelt


def without_effect(config: ModelConfig, reads_parameter: Callable[[str], bool]) -> list[str]:
    """The paths of fields that are set in `config` without effect, each once, in order."""
    unread = [
        f"parameters['{name}']"
        for name in sorted(config.parameters)
        if name not in OWN_PARAMETERS and not reads_parameter(name)
    ]
    return [*dict.fromkeys(_ineffective(config, "")), *unread]


def misspelt(config: ModelConfig, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Parameter names that nearly match one of the `known`, with that name."""
    names = {name.lower(): name for name in known}
    for name in sorted(config.parameters):
        near = difflib.get_close_matches(name.lower(), names, 1, _ALIKE)
        if near and name != names[near[0]]:
            yield name, names[near[0]]


def _ineffective(message: Message, prefix: str) -> Iterator[str]:
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in EFFECTIVE and not any(known.startswith(path + ".") for known in EFFECTIVE):
            continue
        if path == "parameters":
            continue  # reported by key
        nested = [value] if isinstance(value, Message) else value
        is_map = (
            descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry
        )
        if descriptor.message_type is None or is_map:
            if path not in EFFECTIVE:
                yield path
            continue
        known = any(name.startswith(path + ".") for name in EFFECTIVE)
        for item in nested:
            if not known:
                yield path
            elif isinstance(item, Message):
                yield from _ineffective(item, path + ".")


EXECUTION = ("auto", "inline", "thread", "process")
_CHOICES: Mapping[str, Sequence[str]] = {
    "execution": EXECUTION, "batching": ("on", "off"), "split_requests": ("on", "off"),
    "strict_outputs": ("true", "false"),
    "fair_share": ("true", "false"),
}  # fmt: skip


def problems(config: ModelConfig, directory: str) -> Iterator[Problem]:
    """The problems of `config`, for a directory of this name; "" if any name is right."""
    if config.name and directory and config.name != directory:
        yield Problem(
            "name",
            f"unexpected directory name '{directory}' for model '{config.name}',"
            " directory name must equal model name",
        )
    if config.max_batch_size < 0:
        yield Problem("max_batch_size", f"must not be negative, got {config.max_batch_size}")
    named = {config.platform, config.backend} - {""}
    if config.WhichOneof("scheduling_choice") == "ensemble_scheduling" and named != {"ensemble"}:
        text = f"needs the platform 'ensemble', got '{config.platform or config.backend}'"
        yield Problem("ensemble_scheduling", text)
    file = PurePosixPath(config.default_model_filename)
    if file.is_absolute() or ".." in file.parts:
        yield Problem(
            "default_model_filename", f"must lie within the version's directory, got '{file}'"
        )
    if config.HasField("model_repository_agents"):
        yield Problem(
            "model_repository_agents",
            "is not supported: agents are libraries of Triton that change a model's files before"
            " its load; a store of a plugin can (docs/extending.md), and a manifest checks files",
        )
    yield from _unknown_values(config, "")
    yield from _parameters(config)
    yield from _tensors(config.input, "input")
    yield from _tensors(config.output, "output")
    yield from _dynamic_batching(config)
    yield from _instance_groups(config)
    yield from _metrics(config)
    yield from fail_over.problems(config)


def tensor_problems(
    config: ModelConfig,
    inputs: Sequence[TensorInfo] = (),
    outputs: Sequence[TensorInfo] = (),
    ragged: RaggedForm | None = None,
) -> Iterator[Problem]:
    """Problems of completed `input` and `output`, and of dividing requests.

    `inputs` and `outputs` are those of the loaded model, as far as known; `ragged` is that of its
    backend.
    """
    declared: tuple[tuple[str, Sequence[ModelTensor], Sequence[TensorInfo]], ...] = (
        ("input", config.input, inputs),
        ("output", config.output, outputs),
    )
    for path, tensors, infos in declared:
        if infos and not tensors:
            yield Problem(path, "at least one must be declared")
        for index, tensor in enumerate(tensors):
            if not tensor.data_type:
                yield Problem(f"{path}[{index}].data_type", f"is missing for '{tensor.name}'")
    if divides(config, False) and not can_divide(config):
        yield Problem(
            "parameters['split_requests']",
            "'on' needs a model that batches, is not decoupled and does not preserve ordering",
        )
    yield from _column_problems(config)
    if ragged is not None:
        yield from _ragged_problems(config, ragged is RaggedForm.FLAT)
    stateful = config.WhichOneof("scheduling_choice") == "sequence_batching"
    if config.response_cache.enable and (stateful or config.model_transaction_policy.decoupled):
        kind = "with sequences" if stateful else "that is decoupled"
        yield Problem("response_cache.enable", f"cannot be set for a model {kind}")


# Datatypes of computed inputs, as in Triton; zeros that only have a shape may be of any other, too.
_COUNTED = (pb.TYPE_INT32, pb.TYPE_FP32)


def ragged_fields(config: ModelConfig) -> Iterator[str]:
    """The paths of ragged inputs, and of what is computed from shapes and cut by them."""
    for index, tensor in enumerate(config.input):
        if tensor.allow_ragged_batch:
            yield f"input[{index}].allow_ragged_batch"
    yield from (f"batch_input[{index}]" for index in range(len(config.batch_input)))
    yield from (f"batch_output[{index}]" for index in range(len(config.batch_output)))


def _ragged_problems(config: ModelConfig, flat: bool) -> Iterator[Problem]:
    """Problems of ragged inputs, and of what is computed from shapes and cut by them.

    Unless all requests are one `flat` axis, nothing is computed nor cut, and only fields that no
    model can have are problems, as in Triton.
    """
    paths = list(ragged_fields(config))
    if not paths:
        return
    if flat and not config.max_batch_size:
        yield Problem(paths[0], "needs a max_batch_size")
    for index, tensor in enumerate(config.input):
        if flat and tensor.allow_ragged_batch and tensor.HasField("reshape"):
            path = f"input[{index}].allow_ragged_batch"
            yield Problem(path, "cannot be combined with reshape")
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for index, computed in enumerate(config.batch_input):
        path = f"batch_input[{index}]"
        yield from _source_problems(path, computed.source_input, inputs)
        as_shape = computed.kind == pb.BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE
        fixed = computed.data_type in BY_CONFIG_NUMBER and computed.data_type != pb.TYPE_STRING
        if not (computed.data_type in _COUNTED or (as_shape and fixed)):
            yield Problem(f"{path}.data_type", "must be TYPE_INT32 or TYPE_FP32")
        taken = [name for name in computed.target_name if name in inputs]
        if flat and taken:
            yield Problem(f"{path}.target_name", f"'{taken[0]}' is an input of requests")
        if not computed.target_name:
            yield Problem(f"{path}.target_name", "is missing")
    for index, cut in enumerate(config.batch_output):
        path = f"batch_output[{index}]"
        yield from _source_problems(path, cut.source_input, inputs)
        source = inputs.get(cut.source_input[0]) if cut.source_input else None
        for name in cut.target_name:
            if name not in outputs:
                yield Problem(f"{path}.target_name", f"there is no output '{name}'")
            elif not flat:
                continue
            elif outputs[name].HasField("reshape"):
                yield Problem(f"{path}.target_name", f"'{name}' cannot be combined with reshape")
            elif source is not None and len(source.dims) != len(outputs[name].dims):
                text = f"'{name}' must have as many dims as its source '{source.name}'"
                yield Problem(f"{path}.target_name", text)


def _source_problems(
    path: str, given: Sequence[str], inputs: Mapping[str, pb.ModelInput]
) -> Iterator[Problem]:
    if len(given) != 1:
        yield Problem(f"{path}.source_input", f"must be one input, got {len(given)}")
    elif given[0] not in inputs:
        text = f"there is no input '{given[0]}', but {quoted(inputs)}"
        yield Problem(f"{path}.source_input", text)
    elif inputs[given[0]].optional:
        yield Problem(f"{path}.source_input", f"'{given[0]}' is optional")


def _column_problems(config: ModelConfig) -> Iterator[Problem]:
    """Problems of names of columns, by which clients would arrange their tables.

    In a model of Python code the parameter may be its own, of any form.
    """
    if COLUMNS not in config.parameters or config.backend == "python":
        return
    path = f"parameters['{COLUMNS}']"
    found = columns_by_input(config.parameters[COLUMNS].string_value)
    if not found:
        yield Problem(path, 'must be JSON of names by input, such as {"INPUT": ["a", "b"]}')
    inputs = {tensor.name: tensor for tensor in config.input}
    for name, columns in found.items():
        size = math.prod(inputs[name].dims) if name in inputs else 0
        if name not in inputs:
            yield Problem(path, f"there is no input '{name}'")
        elif len(set(columns)) < len(columns):
            yield Problem(path, f"the columns of '{name}' have a name twice")
        elif size > 0 and config.max_batch_size > 0 and size != len(columns):
            text = f"'{name}' has {size} columns, and {len(columns)} names are given"
            yield Problem(path, text)


def model_problems(
    config: ModelConfig,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    ragged: RaggedForm | None = None,
) -> Iterator[Problem]:
    """Contradictions between `config` and the loaded model; `ragged` is that of its backend."""
    lead = 1 if config.max_batch_size > 0 else 0
    groups: tuple[tuple[str, Sequence[ModelTensor], Sequence[TensorInfo]], ...] = (
        ("input", config.input, inputs),
        ("output", config.output, outputs),
    )
    flat: set[str] = set()
    if ragged is RaggedForm.FLAT:
        flat.update(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        flat.update(name for cut in config.batch_output for name in cut.target_name)
    for path, tensors, infos in groups:
        by_name = {info.name: info for info in infos}
        for index, tensor in enumerate(tensors):
            info = by_name.get(tensor.name)
            at = f"{path}[{index}]"
            if info is None:
                yield Problem(
                    f"{at}.name",
                    f"the model has no {path} '{tensor.name}', it has {quoted(by_name)}",
                )
            elif info.datatype is None:
                yield Problem(
                    f"{at}.name",
                    f"'{tensor.name}' is a {info.type_name}, which is not a tensor of the protocol",
                )
            elif (declared := BY_CONFIG_NUMBER.get(tensor.data_type)) is not info.datatype:
                yield Problem(
                    f"{at}.data_type",
                    f"the model's {path} '{tensor.name}' is {info.datatype}, not {declared}",
                )
            elif tensor.name in flat:
                if info.shape and info.shape != (-1,):
                    yield Problem(
                        f"{at}.dims",
                        f"the model's {path} '{tensor.name}' has shape {brackets(info.shape)},"
                        " and a ragged one has all elements of a batch in one axis: [-1]",
                    )
            elif info.shape and not _agree(config, tensor, info.shape):
                expected = ([-1] if lead else []) + list(model_dims(tensor))
                hint = (
                    " (max_batch_size is not 0, so the model's first dimension must be variable)"
                    if lead and info.shape[0] != -1
                    else ""
                )
                yield Problem(
                    f"{at}.dims",
                    f"the model's {path} '{tensor.name}' has shape {brackets(info.shape)},"
                    f" the configuration means {brackets(expected)}{hint}",
                )
    required = {info.name for info in inputs if not info.optional}
    for index, declared_input in enumerate(config.input):
        if declared_input.optional and declared_input.name in required:
            yield Problem(
                f"input[{index}].optional",
                f"the model needs '{declared_input.name}', for which it has no value of its own",
            )
    missing = required - {tensor.name for tensor in config.input}
    known = {info.name: info for info in inputs}
    for index, computed in enumerate(config.batch_input):
        for name in computed.target_name:
            missing.discard(name)
            given = known.get(name)
            if given is None or given.datatype is not BY_CONFIG_NUMBER[computed.data_type]:
                has = f"the model has no input '{name}'" if given is None else (
                    f"the model's input '{name}' is {given.datatype}"
                )  # fmt: skip
                yield Problem(f"batch_input[{index}].target_name", has)
    if missing:
        yield Problem("input", f"the model also needs the inputs {quoted(sorted(missing))}")


def _agree(config: ModelConfig, tensor: ModelTensor, shape: tuple[int, ...]) -> bool:
    if config.max_batch_size > 0:
        if shape[0] != -1:
            return False
        shape = shape[1:]
    dims = model_dims(tensor)
    return len(dims) == len(shape) and all(
        own in (-1, d) for own, d in zip(shape, dims, strict=True)
    )


def _unknown_values(message: Message, prefix: str) -> Iterator[Problem]:
    """Undefined enum numbers, which protobuf's parser accepts."""
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.enum_type is not None:
            known = field.enum_type.values_by_number
            for number in [value] if isinstance(value, int) else value:
                if number not in known:
                    names = ", ".join(known[n].name for n in sorted(known))
                    yield Problem(path, f"must be one of {names}, got {number}")
        elif isinstance(value, Message):
            yield from _unknown_values(value, f"{path}.")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in value:
                if isinstance(value[key], Message):
                    yield from _unknown_values(value[key], f"{path}['{key}'].value.")
        elif field.message_type is not None:
            for index, item in enumerate(value):
                yield from _unknown_values(item, f"{path}[{index}].")


def _parameters(config: ModelConfig) -> Iterator[Problem]:
    for name, allowed in _CHOICES.items():
        if name in config.parameters:
            value = config.parameters[name].string_value
            if value not in allowed:
                yield Problem(
                    f"parameters['{name}']", f"must be one of {quoted(allowed)}, got '{value}'"
                )


def _tensors(tensors: Sequence[ModelTensor], path: str) -> Iterator[Problem]:
    names: set[str] = set()
    for index, tensor in enumerate(tensors):
        at = f"{path}[{index}]"
        if not tensor.name:
            yield Problem(f"{at}.name", f"every {path} must have a name")
        if tensor.name in names:
            yield Problem(f"{at}.name", f"the name '{tensor.name}' is given twice")
        names.add(tensor.name)
        if any(d < 1 and d != -1 for d in tensor.dims):
            yield Problem(
                f"{at}.dims",
                f"every dimension must be positive, or -1 for variable,"
                f" got {brackets(tensor.dims)}",
            )
        if tensor.HasField("reshape"):
            dims, shape = list(tensor.dims), list(tensor.reshape.shape)
            fixed = math.prod(d for d in dims if d != -1), math.prod(d for d in shape if d != -1)
            if dims.count(-1) != shape.count(-1) or fixed[0] != fixed[1]:
                yield Problem(
                    f"{at}.reshape",
                    f"{brackets(shape)} must have as many elements and variable dimensions"
                    f" as dims {brackets(dims)}",
                )


def _dynamic_batching(config: ModelConfig) -> Iterator[Problem]:
    if not config.HasField("dynamic_batching"):
        return
    batching, path = config.dynamic_batching, "dynamic_batching"
    for index, size in enumerate(batching.preferred_batch_size):
        if not 0 < size <= max(config.max_batch_size, 1):
            yield Problem(
                f"{path}.preferred_batch_size[{index}]",
                f"must be between 1 and max_batch_size ({config.max_batch_size}), got {size}",
            )
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield Problem(
            f"{path}.default_priority_level",
            f"must be between 1 and priority_levels ({levels}),"
            f" got {batching.default_priority_level}",
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            yield Problem(
                f"{path}.priority_queue_policy",
                f"level {level} is not between 1 and priority_levels ({levels})",
            )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if batching.preserve_ordering:
        if levels > 1:
            yield Problem(
                f"{path}.preserve_ordering", "cannot be combined with several priority levels"
            )
        if any(p.timeout_action == pb.ModelQueuePolicy.DELAY for p in policies):
            yield Problem(
                f"{path}.preserve_ordering", "cannot be combined with timeout_action DELAY"
            )


def _instance_groups(config: ModelConfig) -> Iterator[Problem]:
    for index, group in enumerate(config.instance_group):
        path = f"instance_group[{index}]"
        if not 0 <= group.count <= 1_000:
            yield Problem(f"{path}.count", f"must be between 1 and 1000, got {group.count}")
        if group.gpus and group.kind in (
            pb.ModelInstanceGroup.KIND_CPU,
            pb.ModelInstanceGroup.KIND_MODEL,
        ):
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            yield Problem(f"{path}.gpus", f"no GPUs may be listed for an instance group of {kind}")


def _metrics(config: ModelConfig) -> Iterator[Problem]:
    for key in sorted(config.metric_tags):
        if not _TAG.fullmatch(key):  # Prometheus would refuse the metrics of all models
            yield Problem(
                f"metric_tags[{key!r}]", "must consist of letters, digits and '_', in ASCII"
            )
    for index, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        bounds = list(control.histogram_options.buckets)
        rising = all(low < high for low, high in pairwise(bounds))  # false for NaN, too
        if not (bounds and rising and all(map(math.isfinite, bounds))):
            yield Problem(
                f"{path}.histogram_options.buckets",
                f"must be numbers, each greater than the one before, got {bounds}",
            )
