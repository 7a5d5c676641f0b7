"""Instance groups of a model, divided over the processes of Tritons."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headrace.core.errors import InvalidOption
from headrace.placement.upstream.triton_options import PER_GPU, NumberedProcess, TritonOptions
from headrace.protocol.pb.model_config_pb2 import ModelInstanceGroup as Group

_DEVICE = re.compile(r"nvidia\d+")


def places(
    options: TritonOptions, environment: Mapping[str, str], found: int
) -> list[NumberedProcess]:
    """The processes to start; `found` is the machine's number of GPUs.

    Raises `InvalidOption` if there is to be one per GPU and there is no GPU.
    """
    gpus = list(options.gpus)
    if options.processes == PER_GPU:
        inherited = environment.get("CUDA_VISIBLE_DEVICES", "")
        gpus = gpus or [part.strip() for part in inherited.split(",") if part.strip()]
        gpus = gpus or [str(number) for number in range(found)]
        if not gpus:
            raise InvalidOption(
                "--triton-processes",
                "is per-gpu, and this machine has no GPU; --triton-gpus names some",
            )
        return [NumberedProcess(index, len(gpus), gpu, True) for index, gpu in enumerate(gpus)]
    count = int(options.processes)
    visible = ",".join(gpus) if gpus else None
    return [NumberedProcess(index, count, visible) for index in range(count)]


def gpu_count(devices: Path = Path("/dev")) -> int:
    """The machine's number of GPUs, by their device files."""
    try:
        return sum(_DEVICE.fullmatch(name) is not None for name in os.listdir(devices))
    except OSError:
        return 0


def groups_of(groups: Sequence[Group], place: NumberedProcess) -> list[Group] | None:
    """The instance groups of a model in one process; None if it has none of them.

    A model without instance groups has Triton's default in every process. Instances on the CPU are
    divided over all processes; so are those on GPUs if each process sees every GPU. Raises
    `InvalidOption` for a GPU that does not exist.
    """
    if not groups:
        return []
    found = []
    for index, group in enumerate(groups):
        own = Group()
        own.CopyFrom(group)
        on_cpu = group.kind == Group.KIND_CPU
        if place.own_gpu and not on_cpu:
            if group.gpus:
                _check(group, index, place)
                if place.index not in group.gpus:
                    continue
                own.gpus[:] = [0]
        elif place.count > 1:
            own.count = _share(max(group.count, 1), place)
            if not own.count:
                continue
        found.append(own)
    return found or None


def as_configured(groups: Iterable[Group], place: NumberedProcess) -> list[Group]:
    """Reported instance groups, with GPUs numbered as in the configuration."""
    found = []
    for group in groups:
        own = Group()
        own.CopyFrom(group)
        if place.own_gpu and own.gpus:
            own.gpus[:] = [place.index + gpu for gpu in own.gpus]
        found.append(own)
    return found


def _share(count: int, place: NumberedProcess) -> int:
    return count // place.count + (place.index < count % place.count)


def _check(group: Group, index: int, place: NumberedProcess) -> None:
    for gpu in group.gpus:
        if not 0 <= gpu < place.count:
            raise InvalidOption(
                f"instance_group[{index}].gpus",
                f"there is no GPU {gpu}: the Tritons of this server have {place.count}, which are"
                f" numbered from 0",
            )
