"""From a completed configuration to the values that the other floors work with."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.model_spec import LoadSpec
from headrace.core.signature import Signature, TensorSpec
from headrace.observability.responses import FIRST_RESPONSE, FIRST_RESPONSE_BOUNDS
from headrace.repository.completion import batches
from headrace.scheduling.policy import BatchPolicy, QueuePolicy, SchedulingPolicy, TimeoutAction
from headrace.wire.documents import to_json
from headrace.wire.pb import model_config_pb2 as pb
from headrace.wire.pb.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance that a configuration asks for, in the instance group of index `group`.

    `device` is None for CPU, and where the model decides itself (`by_model`).
    """

    name: str
    device: int | None
    group: int = 0
    by_model: bool = False


def signature(config: ModelConfig) -> Signature:
    """The declared inputs and outputs."""
    return Signature(
        config.name,
        config.max_batch_size,
        tuple(_spec(tensor, tensor.optional) for tensor in config.input),
        tuple(_spec(tensor, False) for tensor in config.output),
        config.model_transaction_policy.decoupled,
        strict_outputs=_strict_outputs(config),
    )


def _strict_outputs(config: ModelConfig) -> bool:
    """Whether outputs must be as declared; those of Python models are passed on, as in Triton.

    For models on other servers that was up to them.
    """
    named = config.parameters
    if "strict_outputs" in named and named["strict_outputs"].string_value == "true":
        return True
    return config.backend not in ("python", "triton")


def scheduling_policy(config: ModelConfig) -> SchedulingPolicy:
    """How the model's requests are queued and batched."""
    batching = config.dynamic_batching
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
    )


def placements(config: ModelConfig) -> list[Placement]:
    """All instances, in order; `count` holds for each GPU that a group lists, or for the CPU."""
    return list(_placements(config))


def load_spec(
    config: ModelConfig, root: Path, version: int, placement: Placement, threads: int
) -> LoadSpec:
    """What the backend needs to load one instance of one version."""
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
        json.dumps(to_json(config)),
        by_model=placement.by_model,
        pinned_outputs=_enabled(config.optimization, "output_pinned_memory"),
    )


def pinned_inputs(config: ModelConfig) -> bool:
    """Whether batches for a GPU may be put together in page-locked memory, as they are unless the
    configuration says otherwise.
    """
    return _enabled(config.optimization, "input_pinned_memory")


def _enabled(
    optimization: pb.ModelOptimizationPolicy,
    name: Literal["input_pinned_memory", "output_pinned_memory"],
) -> bool:
    return not optimization.HasField(name) or bool(getattr(optimization, name).enable)


def parameters(config: ModelConfig) -> dict[str, str]:
    """The configuration's parameters as strings."""
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def execution(config: ModelConfig) -> str:
    """The instance kind that the configuration asks for: auto, inline, thread or process."""
    return (
        config.parameters["execution"].string_value if "execution" in config.parameters else "auto"
    )


def first_response_bounds(config: ModelConfig) -> Sequence[float]:
    """By which milliseconds the time to a request's first response is counted."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE and control.HasField(
            "histogram_options"
        ):
            return tuple(control.histogram_options.buckets)
    return FIRST_RESPONSE_BOUNDS


def chosen_versions(config: ModelConfig, available: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the available versions the version policy serves, ascending."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return available
        case "specific":
            return tuple(v for v in available if v in policy.specific.versions)
        case _:
            return available[-max(policy.latest.num_versions, 1) :]


def _placements(config: ModelConfig) -> Iterator[Placement]:
    for index, group in enumerate(config.instance_group):
        on_gpu = group.kind == pb.ModelInstanceGroup.KIND_GPU
        by_model = group.kind == pb.ModelInstanceGroup.KIND_MODEL
        devices = (group.gpus or [0]) if on_gpu else [None]
        for device in devices:
            suffix = f"_gpu{device}" if len(devices) > 1 else ""
            for n in range(group.count):
                yield Placement(f"{group.name}_{n}{suffix}", device, index, by_model)


def _spec(tensor: pb.ModelInput | pb.ModelOutput, optional: bool) -> TensorSpec:
    return TensorSpec(
        tensor.name,
        BY_CONFIG_NUMBER[tensor.data_type],
        tuple(tensor.dims),
        optional,
        tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
    )


def _queue_policy(policy: pb.ModelQueuePolicy, configured: bool) -> QueuePolicy:
    return QueuePolicy(
        policy.max_queue_size,
        policy.default_timeout_microseconds * 1_000,
        TimeoutAction(policy.timeout_action),
        policy.allow_timeout_override,
        configured,
    )
