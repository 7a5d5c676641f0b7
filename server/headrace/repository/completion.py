"""Completion of a configuration from the model's files, the loaded model and the available GPUs.

Pure functions from messages to messages; nothing here opens a file. They follow Triton's
auto-completion, so that a repository means the same on both, with three differences: an explicit
`max_batch_size` is never changed, even if it is 0; a batching model without a scheduler gets
`dynamic_batching`, because requests are batched unless the model says otherwise; and a model
without instance groups gets one instance, also on the CPU.

GPUs are assigned as by Triton: a group of KIND_AUTO is on GPUs if all GPUs that it lists exist,
else on the CPU; a group on GPUs that lists none has all of them. A model without instance groups
gets one group of KIND_AUTO. A backend that also runs without GPUs has such a group on the CPU
unless the group lists some.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TypeAlias

from headrace.core.datatypes import CONFIG_NUMBERS
from headrace.core.errors import InvalidConfig
from headrace.core.model_spec import TensorInfo
from headrace.placement.backend import Backend
from headrace.protocol.pb import model_config_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.repository.config import ConfigFile, Problem, parameter

_ELSEWHERE = "triton"  # the backend of upstream models
_WHOLE = (_ELSEWHERE, "onnxruntime")  # backends that run a batch like one request
_SEQUENCE_IDLE_US = 1_000_000

ModelTensor: TypeAlias = pb.ModelInput | pb.ModelOutput


def complete_backend(
    file: ConfigFile, model: str, filenames: Iterable[str], backends: Mapping[str, Backend]
) -> ModelConfig:
    """A copy of the configuration with name, backend, platform and model file name filled in.

    `filenames` are the entries of the first version's directory. Raises `InvalidConfig` if no
    backend of this server can be determined.
    """
    config = deepcopy(file.config)
    config.name = model
    names = list(filenames)
    if not config.backend:
        config.backend = _guess_backend(config, model, names, backends)
    backend = backends.get(config.backend)
    if backend is None:
        known = ", ".join(sorted(backends))
        files = [b.default_filename for b in backends.values() if b.default_filename]
        if not (config.backend or config.platform):
            raise InvalidConfig(
                f"{file.name}: no backend or platform is named, and no file tells: expected"
                f" {' or '.join(files)},"
                f" found {', '.join(sorted(names)[:5]) or 'nothing'};"
                f" backends of this server: {known}"
            )
        field = "backend" if config.backend else "platform"
        text = (
            f"'{config.backend or config.platform}' is not a {field} of this server,"
            f" which has the backends: {known}"
        )
        raise InvalidConfig(file.explain(Problem(field, text)))
    config.platform = config.platform or backend.platform
    if not config.default_model_filename:
        config.default_model_filename = _guess_filename(backend, names)
    return config


def complete_tensors(
    file: ConfigFile,
    config: ModelConfig,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    default_max_batch_size: int,
) -> ModelConfig:
    """A copy of `config` with `max_batch_size`, `input` and `output` filled in.

    An input for which the model has a default is only offered if the configuration declares it.
    """
    result = deepcopy(config)
    required = [info for info in inputs if not info.optional]
    if inputs and not file.sets("max_batch_size") and _can_batch(result, [*required, *outputs]):
        result.max_batch_size = default_max_batch_size
    lead = 1 if result.max_batch_size > 0 else 0
    if not result.input:
        for info in required:
            if info.datatype is not None:
                result.input.add(name=info.name)
    if not result.output:
        for info in outputs:
            if info.datatype is not None:
                result.output.add(name=info.name)
    for declared, infos in ((result.input, inputs), (result.output, outputs)):
        by_name = {info.name: info for info in infos}
        for tensor in declared:
            found = by_name.get(tensor.name)
            if found is not None and found.datatype is not None:
                _complete_tensor(tensor, found, lead, config.backend == _ELSEWHERE)
    return result


def normalise(config: ModelConfig) -> ModelConfig:
    """A copy of `config` with the defaults of unset fields filled in."""
    result = deepcopy(config)
    if result.version_policy.WhichOneof("policy_choice") is None:
        result.version_policy.latest.num_versions = 1
    if batches(result):
        batching = result.dynamic_batching
        batching.SetInParent()
        if not batching.preferred_batch_size:
            batching.preferred_batch_size.append(result.max_batch_size)
    if result.WhichOneof("scheduling_choice") == "sequence_batching":
        sequences = result.sequence_batching
        sequences.max_sequence_idle_microseconds = (
            sequences.max_sequence_idle_microseconds or _SEQUENCE_IDLE_US
        )
    composed = result.WhichOneof("scheduling_choice") == "ensemble_scheduling"
    if not (result.instance_group or composed):
        result.instance_group.add(name=result.name, kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    for index, group in enumerate(result.instance_group):
        group.name = group.name or f"{result.name}_{index}"
        group.count = group.count or 1
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            group.kind = (
                pb.ModelInstanceGroup.KIND_GPU if group.gpus else pb.ModelInstanceGroup.KIND_CPU
            )
    return result


def batches(config: ModelConfig) -> bool:
    """True if requests to this model may share batches."""
    if config.max_batch_size < 1:
        return False
    if config.WhichOneof("scheduling_choice") not in (None, "dynamic_batching"):
        return False
    if config.model_transaction_policy.decoupled and config.backend == _ELSEWHERE:
        return False  # an upstream receives each request on a stream of its own
    if not config.input and config.backend in _WHOLE:
        return False  # nothing in a batch would tell its number of requests
    return parameter(config, "batching") != "off"


def divides(config: ModelConfig, completed: bool) -> bool:
    """True if requests with more rows than a batch are divided.

    `completed` is true if this server has chosen the batch size.
    """
    if "split_requests" in config.parameters:
        return parameter(config, "split_requests") == "on"
    return completed and can_divide(config)


def can_divide(config: ModelConfig) -> bool:
    """True if requests may be divided: rows, and responses, are independent of each other."""
    ordered = config.dynamic_batching.preserve_ordering or config.HasField("sequence_batching")
    return batches(config) and not (config.model_transaction_policy.decoupled or ordered)


def model_dims(tensor: ModelTensor) -> Sequence[int]:
    """The dimensions seen by the model, without the batch dimension."""
    return tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims


def named_backend(config: ModelConfig, backends: Mapping[str, Backend]) -> Backend | None:
    """The backend that a configuration names, itself or by its platform."""
    return backends.get(config.backend or _of_platform(config, backends))


def _of_platform(config: ModelConfig, backends: Mapping[str, Backend]) -> str:
    wanted = config.platform
    return next((n for n, b in backends.items() if wanted and b.platform == wanted), "")


def _guess_backend(
    config: ModelConfig, model: str, names: list[str], backends: Mapping[str, Backend]
) -> str:
    """The backend of the named platform, or else the one indicated by the files."""
    if config.platform:
        return _of_platform(config, backends)
    given = config.default_model_filename
    for name, backend in backends.items():
        if given in backend.filenames or given.endswith((*backend.suffixes, *_any_suffix(backend))):
            return name
    for name, backend in backends.items():
        if any(_is_there(known, names) for known in backend.filenames):
            return name
    for name, backend in backends.items():
        if model.endswith((*backend.suffixes, "." + name)) or _alike(backend, names):
            return name
    return ""


def _guess_filename(backend: Backend, names: list[str]) -> str:
    """A known file name, the only file of the backend's kind, or the default."""
    known = next((name for name in backend.filenames if _is_there(name, names)), "")
    return known or _alike(backend, names) or backend.default_filename


def _is_there(filename: str, names: list[str]) -> bool:
    """True if the file, or its directory, is among the entries."""
    return filename.partition("/")[0] in names


def _alike(backend: Backend, names: list[str]) -> str:
    """The only file of a backend's kind.

    Determined by its suffix, or, if other backends share that, by being the only entry.
    """
    alike = [name for name in names if name.endswith(backend.suffixes)]
    if len(names) == 1 and names[0].endswith(_any_suffix(backend)):
        alike = names
    return alike[0] if len(alike) == 1 else ""


def _any_suffix(backend: Backend) -> tuple[str, ...]:
    return tuple({"." + name.rpartition(".")[2] for name in backend.filenames if "." in name})


def _can_batch(config: ModelConfig, infos: Sequence[TensorInfo]) -> bool:
    """True if every tensor has a variable first dimension, not declared in the configuration."""
    ranks = {info.name: len(info.shape) for info in infos}
    declared: list[ModelTensor] = [*config.input, *config.output]
    spelled_out = any(t.dims and len(model_dims(t)) == ranks.get(t.name, -1) for t in declared)
    return not spelled_out and all(info.shape[:1] == (-1,) for info in infos)


def _complete_tensor(tensor: ModelTensor, info: TensorInfo, lead: int, seen: bool) -> None:
    """Fill in one tensor; `seen` is true if `info` is in the clients' form, from an upstream."""
    assert info.datatype is not None
    if not tensor.data_type:
        tensor.data_type = pb.DataType.ValueType(CONFIG_NUMBERS[info.datatype])
    if tensor.dims:
        return
    dims = info.shape[lead:]
    if lead and not dims and not seen:
        # The model has one value per row and no axis for it: clients see [rows, 1], the model
        # [rows].
        tensor.dims.append(1)
        tensor.reshape.SetInParent()
    else:
        tensor.dims.extend(dims)


def may_use_gpus(config: ModelConfig, preferred: bool) -> bool:
    """True if GPUs must be detected to place a model's instances."""
    if not config.instance_group:
        return preferred
    kinds = ModelInstanceGroup
    return any(
        group.kind == kinds.KIND_GPU
        or (group.kind == kinds.KIND_AUTO and (preferred or bool(group.gpus)))
        for group in config.instance_group
    )


def on_devices(config: ModelConfig, count: int, preferred: bool, obstacle: str = "") -> ModelConfig:
    """A copy of `config` with devices for its instance groups, given `count` GPUs.

    If they are `preferred`, a model without placement runs on them. `obstacle` is the reason why
    its backend cannot use them, "" for none.
    """
    result = deepcopy(config)
    usable = count > 0 and not obstacle
    if not result.instance_group and usable and preferred:
        result.instance_group.add(name=result.name, count=1)
    for group in result.instance_group:
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            wanted = all(gpu in range(count) for gpu in group.gpus) if group.gpus else preferred
            if usable and wanted:
                group.kind = ModelInstanceGroup.KIND_GPU
            else:
                group.kind = ModelInstanceGroup.KIND_CPU
                group.ClearField("gpus")
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(count))
    return result


def device_problems(
    config: ModelConfig, count: int, missing: str, obstacle: str
) -> Iterator[Problem]:
    """Problems of instance groups with the available GPUs, for a result of `on_devices`.

    `missing` is the reason why there are no GPUs; "" if there are some.
    """
    for index, group in enumerate(config.instance_group):
        if group.kind != ModelInstanceGroup.KIND_GPU:
            continue
        path = f"instance_group[{index}]"
        name = group.name or f"{config.name}_{index}"
        which = f"instance group {name} of model {config.name}"
        if not count:
            besides = f"; besides, {obstacle}" if obstacle else ""
            text = f"{which} has kind KIND_GPU but no GPUs are available: {missing}{besides}"
            yield Problem(f"{path}.kind", text)
        elif obstacle:
            yield Problem(f"{path}.kind", f"{which} has kind KIND_GPU, but {obstacle}")
        for gpu in group.gpus if count else ():
            if gpu not in range(count):
                there = ", ".join(map(str, range(count)))
                text = f"{which} specifies invalid or unsupported gpu id {gpu}. GPUs are: {there}"
                yield Problem(f"{path}.gpus", text)
