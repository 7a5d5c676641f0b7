"""Values for other packages from a completed configuration and the files that it names.

Warm-up samples are checked here as far as possible without running the model, with file, line and
field. Their files are in the model's directory `warmup`, label files beside the configuration, and
neither may be elsewhere, even by symlinks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.core.columns import COLUMNS, columns_by_input
from headrace.core.datatypes import BY_CONFIG_NUMBER, ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidOption, InvalidRequest
from headrace.core.model_spec import LoadSpec
from headrace.core.ragged import BatchInput, BatchInputKind, Ragged, RaggedForm
from headrace.core.signature import Shape, Signature, TensorSpec, fits, quoted
from headrace.core.tensors import Array, Tensor, brackets, element_count
from headrace.core.texts import shown, whole_number
from headrace.observability.statistics import FIRST_RESPONSE, FIRST_RESPONSE_BOUNDS
from headrace.placement import warming
from headrace.placement.warming import MakeInput, Sample
from headrace.protocol.documents import to_json
from headrace.protocol.pb import model_config_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelWarmup
from headrace.repository.completion import batches
from headrace.repository.config import ConfigFile, Problem, parameter, refuse
from headrace.scheduling.overload import DelayBound
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction


@dataclass(frozen=True, slots=True)
class WantedInstance:
    """One instance requested by a configuration, in the instance group of index `group`.

    `device` is None for CPU, and if the model chooses it (`by_model`).
    """

    name: str
    device: int | None
    group: int = 0
    by_model: bool = False


def signature(config: ModelConfig, ragged: RaggedForm | None = None) -> Signature:
    """The declared inputs and outputs; `ragged` is that of the model's backend."""
    strict = _strict_outputs(config)
    columns = columns_by_input(parameter(config, COLUMNS))
    return Signature(
        config.name,
        config.max_batch_size,
        tuple(
            _spec(tensor, tensor.optional, columns.get(tensor.name, ())) for tensor in config.input
        ),
        tuple(_spec(tensor, False) for tensor in config.output),
        config.model_transaction_policy.decoupled,
        strict_outputs=strict,
        # As in Triton, where each request of a batch shares its outputs with no other.
        any_rows=not (strict or batches(config)),
        ragged=_ragged(config, ragged),
    )


def _ragged(config: ModelConfig, form: RaggedForm | None) -> Ragged | None:
    inputs = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
    if form is RaggedForm.APART and inputs and config.max_batch_size:
        return Ragged(inputs)
    declared = inputs or config.batch_input or config.batch_output
    if not declared or form is not RaggedForm.FLAT:
        return None
    computed = tuple(
        BatchInput(
            BatchInputKind(each.kind), each.source_input[0], tuple(each.target_name),
            BY_CONFIG_NUMBER[each.data_type],
        )
        for each in config.batch_input
    )  # fmt: skip
    scattered = {n: each.source_input[0] for each in config.batch_output for n in each.target_name}
    return Ragged(inputs, computed, scattered)


def _strict_outputs(config: ModelConfig) -> bool:
    """True if outputs must be as declared; Python models' outputs are passed on, as in Triton.

    For upstream models this is up to the upstream.
    """
    strict = parameter(config, "strict_outputs") == "true"
    return strict or config.backend not in ("python", "triton")


OVERLOAD_DELAY = "overload_delay_ms"
_MOST_DELAY_MS = 86_400_000


def scheduling_policy(
    config: ModelConfig, delay_ms: int = 0, fair_share: bool = False
) -> SchedulingPolicy:
    """The policies for queueing and batching the model's requests.

    `delay_ms` is the server's bound on the delay in an overloaded queue, 0 for none. A queue
    policy, priorities or sequences of the configuration replace it, unless the model has a bound of
    its own. `fair_share` is the server's setting, unless the model has its own. Raises
    `InvalidOption`.
    """
    batching = config.dynamic_batching
    own = parameter(config, OVERLOAD_DELAY)
    if own:
        found = whole_number(own, 0, _MOST_DELAY_MS)
        if found is None:
            expected = "a whole number of milliseconds, 0 for no bound"
            raise InvalidOption(
                f"parameters['{OVERLOAD_DELAY}']", f"expected {expected}, got {shown(own)}"
            )
        delay_ms = found
    elif (
        batching.HasField("default_queue_policy")
        or batching.priority_queue_policy
        or batching.priority_levels
        or config.WhichOneof("scheduling_choice") == "sequence_batching"
    ):
        delay_ms = 0
    policy = BatchPolicy(max_rows=0)
    if batches(config):
        policy = BatchPolicy(
            config.max_batch_size,
            batching.max_queue_delay_microseconds * 1_000,
            frozenset(batching.preferred_batch_size),
            not (batching.HasField("default_queue_policy") or batching.priority_queue_policy),
        )
    return SchedulingPolicy(
        policy,
        _queue_policy(batching.default_queue_policy, batching.HasField("default_queue_policy")),
        batching.priority_levels,
        batching.default_priority_level,
        {n: _queue_policy(policy, True) for n, policy in batching.priority_queue_policy.items()},
        batching.preserve_ordering,
        DelayBound(delay_ms * 1_000_000, policy.max_delay) if delay_ms else None,
        parameter(config, "fair_share", "true" if fair_share else "false") == "true",
    )


def placements(config: ModelConfig) -> list[WantedInstance]:
    """All instances, in order; `count` applies to each listed GPU, or to the CPU."""
    return list(_placements(config))


def load_spec(
    config: ModelConfig, root: Path, version: int, placement: WantedInstance, threads: int
) -> LoadSpec:
    """The specification for a backend to load one instance of one version."""
    accelerators = config.optimization.execution_accelerators
    chosen = (
        accelerators.cpu_execution_accelerator
        if placement.device is None
        else accelerators.gpu_execution_accelerator
    )
    return LoadSpec(
        config.name,
        root / str(version) / config.default_model_filename,
        root,
        parameters(config),
        config.optimization.graph.level,
        tuple((a.name, dict(a.parameters)) for a in chosen),
        placement.device,
        threads,
        placement.group,
        version,
        placement.name,
        lambda: json.dumps(to_json(config)),
        by_model=placement.by_model,
        pinned_outputs=_enabled(config.optimization, "output_pinned_memory"),
    )


def pinned_inputs(config: ModelConfig) -> bool:
    """True if batches for a GPU may be gathered in page-locked memory, the default."""
    return _enabled(config.optimization, "input_pinned_memory")


def _enabled(
    optimization: pb.ModelOptimizationPolicy,
    name: Literal["input_pinned_memory", "output_pinned_memory"],
) -> bool:
    return not optimization.HasField(name) or bool(getattr(optimization, name).enable)


def parameters(config: ModelConfig) -> dict[str, str]:
    """The configuration's parameters as strings."""
    return {name: value.string_value for name, value in config.parameters.items()}


def execution(config: ModelConfig) -> str:
    """The configured execution: auto, inline, thread or process."""
    return parameter(config, "execution", "auto")


def first_response_bounds(config: ModelConfig) -> Sequence[float]:
    """The histogram bounds of the time to the first response, in milliseconds."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE and control.HasField(
            "histogram_options"
        ):
            return tuple(control.histogram_options.buckets)
    return FIRST_RESPONSE_BOUNDS


def chosen_versions(config: ModelConfig, available: tuple[int, ...]) -> tuple[int, ...]:
    """The versions among `available` selected by the version policy, ascending."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return available
        case "specific":
            return tuple(v for v in available if v in policy.specific.versions)
        case _:
            return available[-max(policy.latest.num_versions, 1) :]


def _placements(config: ModelConfig) -> Iterator[WantedInstance]:
    for index, group in enumerate(config.instance_group):
        on_gpu = group.kind == pb.ModelInstanceGroup.KIND_GPU
        by_model = group.kind == pb.ModelInstanceGroup.KIND_MODEL
        devices = (group.gpus or [0]) if on_gpu else [None]
        for device in devices:
            suffix = f"_gpu{device}" if len(devices) > 1 else ""
            for n in range(group.count):
                yield WantedInstance(f"{group.name}_{n}{suffix}", device, index, by_model)


def _spec(
    tensor: pb.ModelInput | pb.ModelOutput, optional: bool, columns: tuple[str, ...] = ()
) -> TensorSpec:
    return TensorSpec(
        tensor.name,
        BY_CONFIG_NUMBER[tensor.data_type],
        tuple(tensor.dims),
        optional,
        tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        columns,
    )


def _queue_policy(policy: pb.ModelQueuePolicy, configured: bool) -> QueuePolicy:
    return QueuePolicy(
        policy.max_queue_size,
        policy.default_timeout_microseconds * 1_000,
        TimeoutAction(policy.timeout_action),
        policy.allow_timeout_override,
        configured,
    )


def read_labels(
    directory: Path, config: ModelConfig
) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    """The labels of each output with a label file, and problems of the files."""
    labels: dict[str, tuple[str, ...]] = {}
    found: list[Problem] = []
    for index, output in enumerate(config.output):
        if name := output.label_filename:
            try:
                labels[output.name] = _lines(_content(directory, name).decode("utf-8-sig"))
            except (OSError, ValueError) as error:
                path = f"output[{index}].label_filename"
                found.append(Problem(path, _unreadable(name, error)))
    return labels, found


def _lines(text: str) -> tuple[str, ...]:
    # Not splitlines, which also splits at characters that may be part of a label.
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)


def _content(root: Path, name: str, within: str = "") -> bytes:
    """The content of a file below the directory `within` of `root`.

    Raises `OSError`, `ValueError`.
    """
    place = (root / within).resolve()
    path = (place / name).resolve()
    if not path.is_relative_to(place) or path == place:
        outside = f" '{within}'" if within else ""
        raise ValueError(f"it lies outside of the model's directory{outside}")
    return path.read_bytes()


def _unreadable(name: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error  # without the path, since clients see this
    return f"'{name}' cannot be read: {reason}"


DIRECTORY = "warmup"


class _Wrong(Exception):
    """An invalid input of a sample: the path below the input's, and the problem."""


def read_samples(
    file: ConfigFile, config: ModelConfig, signature: Signature, root: Path
) -> tuple[Sample, ...]:
    """The samples of a complete configuration, for the model directory `root`.

    Samples with a `batch_size` of 0 are left out. Reads files. Raises `InvalidConfig`.
    """
    found: list[Problem] = []
    samples = tuple(
        _sample(f"model_warmup[{index}]", setting, signature, root, found)
        for index, setting in enumerate(config.model_warmup)
        if setting.batch_size
    )
    refuse(file, found)
    return samples


def _sample(
    at: str, setting: ModelWarmup, signature: Signature, root: Path, found: list[Problem]
) -> Sample:
    """The valid part of a sample; problems are added to `found`."""
    most = max(signature.max_batch_size, 1)
    if setting.batch_size > most:
        text = f"must be at most {most}, as max_batch_size has it, got {setting.batch_size}"
        found.append(Problem(f"{at}.batch_size", text))
    inputs: dict[str, MakeInput] = {}
    for name, told in setting.inputs.items():
        path = f"{at}.inputs['{name}']"
        try:
            spec = signature.input(name)
            inputs[name] = _input(told, spec, signature.batches, root, setting.batch_size)
        except InvalidRequest:
            known = quoted(spec.name for spec in signature.inputs)
            found.append(Problem(path, f"the model has no such input, it has {known}"))
        except _Wrong as wrong:
            field, text = wrong.args
            found.append(Problem(f"{path}.value{field}", text))
    required = [spec.name for spec in signature.inputs if not spec.optional]
    if missing := [name for name in required if name not in setting.inputs]:
        found.append(Problem(f"{at}.inputs", f"the model also needs {quoted(missing)}"))
    return Sample(setting.name, setting.batch_size, setting.count or 1, inputs)


def _input(
    told: ModelWarmup.Input, spec: TensorSpec, batches: bool, root: Path, requests: int
) -> MakeInput:
    """An input of a sample for `requests` requests; raises `_Wrong`."""
    datatype = BY_CONFIG_NUMBER.get(told.data_type)
    if datatype is not spec.datatype:
        given = f"got {datatype}" if datatype is not None else "it is missing"
        raise _Wrong(".data_type", f"must be that of the input, {spec.datatype}; {given}")
    dims = tuple(told.dims)
    if min(dims, default=0) < 0:
        raise _Wrong(".dims", f"every dimension must be given, got {brackets(dims)}")
    if not fits(dims, spec.dims):
        expected = f"those of the input are {brackets(spec.dims)}"
        note = ", without that of the batch" if batches else ""
        raise _Wrong(".dims", f"{brackets(dims)} do not fit: {expected}{note}")
    shape = (1, *dims) if batches else dims
    match told.WhichOneof("input_data_type"):
        case "zero_data":
            return partial(warming.zeros, spec.name, datatype, shape)
        case "random_data":
            return partial(warming.random, spec.name, datatype, shape)
        case "input_data_file":
            arrays = _file_data(root, told.input_data_file, datatype, shape, requests)
            return partial(warming.given, spec.name, datatype, arrays)
    raise _Wrong("", "one of zero_data, random_data and input_data_file must be set")


def _file_data(
    root: Path, name: str, datatype: Datatype, shape: Shape, requests: int
) -> tuple[Array, ...]:
    """The data in a file for one request, or for all of them; raises `_Wrong`."""
    try:
        return file_arrays(root, DIRECTORY, name, datatype, shape, requests)
    except ValueError as error:
        raise _Wrong(".input_data_file", str(error)) from error


def file_arrays(
    root: Path, within: str, name: str, datatype: Datatype, shape: Shape, requests: int = 1
) -> tuple[Array, ...]:
    """The array in a file of the directory `within` of a model, or an array for each request.

    Elements are as clients send them. Raises `ValueError`, with the file's name.
    """
    try:
        raw = _content(root, name, within)
        if datatype is Datatype.BYTES:
            return _texts(raw, shape, requests)
        return _numbers(raw, datatype, shape, requests)
    except InvalidRequest as error:
        raise ValueError(f"'{name}': {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(_unreadable(name, error)) from error


def _numbers(raw: bytes, datatype: Datatype, shape: Shape, requests: int) -> tuple[Array, ...]:
    size = element_count("", shape) * ITEM_SIZES[datatype]
    if len(raw) not in (size, size * requests):
        each = f" (or {size * requests} for {requests} requests)" if requests > 1 else ""
        raise InvalidRequest(
            f"{datatype} of shape {brackets(shape)} takes {size} bytes{each}, the file has"
            f" {len(raw)}"
        )
    count = len(raw) // size if size else 1
    return tuple(np.frombuffer(raw, NUMPY[datatype]).reshape(count, *shape))


def _texts(raw: bytes, shape: Shape, requests: int) -> tuple[Array, ...]:
    """Length-prefixed elements, as clients send them."""
    try:
        return (np.asarray(Tensor.from_bytes("", Datatype.BYTES, shape, raw).array),)
    except InvalidRequest as error:
        try:
            return tuple(
                np.asarray(Tensor.from_bytes("", Datatype.BYTES, (requests, *shape), raw).array)
            )
        except InvalidRequest:
            text = str(error).replace(" for inference input ''", "")
            raise InvalidRequest(text) from None
