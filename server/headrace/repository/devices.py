"""Which instances of a model are on which GPU: pure decisions over instance groups.

As Triton decides: a group of KIND_AUTO is on GPUs if all of those that it lists are there, else on
the CPU; a group on GPUs that lists none has all. A model without instance groups is one group of
KIND_AUTO. A backend that can do without GPUs as well has such a group on the CPU unless the group
lists some.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.repository.config import Problem
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup


class Devices(Protocol):
    """The GPUs of this process. Looking for them takes a moment."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def problem(self) -> str:
        """Why there are none; empty if there are some."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a backend makes of GPUs.

    `preferred` is whether a model that does not say where it runs is on GPUs if there are any.
    `obstacle` is what keeps it from using them, empty for nothing.
    """

    preferred: bool = False
    obstacle: str = ""


def may_use_gpus(config: ModelConfig, preferred: bool) -> bool:
    """Whether GPUs have to be looked for to know where the instances of a model are."""
    if not config.instance_group:
        return preferred
    kinds = ModelInstanceGroup
    return any(
        group.kind == kinds.KIND_GPU
        or (group.kind == kinds.KIND_AUTO and (preferred or bool(group.gpus)))
        for group in config.instance_group
    )


def on_devices(config: ModelConfig, count: int, use: GpuUse) -> ModelConfig:
    """A copy of `config` whose instance groups say where they are, with `count` GPUs there."""
    result = ModelConfig()
    result.CopyFrom(config)
    usable = count > 0 and not use.obstacle
    if not result.instance_group and usable and use.preferred:
        result.instance_group.add(name=result.name, count=1)
    for group in result.instance_group:
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            wanted = all(gpu in range(count) for gpu in group.gpus) if group.gpus else use.preferred
            if usable and wanted:
                group.kind = ModelInstanceGroup.KIND_GPU
            else:
                group.kind = ModelInstanceGroup.KIND_CPU
                group.ClearField("gpus")
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(count))
    return result


def device_problems(config: ModelConfig, devices: Devices, use: GpuUse) -> Iterator[Problem]:
    """Why instance groups cannot be where they are meant to be; of a result of `on_devices`."""
    count = devices.count
    for index, group in enumerate(config.instance_group):
        if group.kind != ModelInstanceGroup.KIND_GPU:
            continue
        path = f"instance_group[{index}]"
        name = group.name or f"{config.name}_{index}"
        which = f"instance group {name} of model {config.name}"
        if not count:
            missing = devices.problem + (f"; besides, {use.obstacle}" if use.obstacle else "")
            text = f"{which} has kind KIND_GPU but no GPUs are available: {missing}"
            yield Problem(f"{path}.kind", text)
        elif use.obstacle:
            yield Problem(f"{path}.kind", f"{which} has kind KIND_GPU, but {use.obstacle}")
        for gpu in group.gpus if count else ():
            if gpu not in range(count):
                there = ", ".join(map(str, range(count)))
                text = f"{which} specifies invalid or unsupported gpu id {gpu}. GPUs are: {there}"
                yield Problem(f"{path}.gpus", text)
