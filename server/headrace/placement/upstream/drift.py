"""Instance groups of Tritons, and differences between a model there and its configuration.

Plain functions over messages. GPUs are numbered as Triton numbers them: by their place among those
that its process sees. Where each process sees one of its own, a configuration numbers them as if
one process saw them all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.errors import InvalidOption
from headrace.core.tensors import brackets
from headrace.placement.upstream.connection import RemoteDescription
from headrace.placement.upstream.triton_options import Place
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from headrace.protocol.pb.model_config_pb2 import ModelInstanceGroup as Group


def groups_of(groups: Sequence[Group], place: Place) -> list[Group] | None:
    """The instance groups of a model in one process; None if it has nothing of the model.

    A model without instance groups has Triton's own choice of them in every process. Instances on
    the CPU are divided over all processes; so are those on GPUs where each process sees every GPU.
    Raises `InvalidOption` for a GPU that there is not.
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


def as_configured(groups: Iterable[Group], place: Place) -> list[Group]:
    """Reported instance groups, with GPUs numbered as in the configuration."""
    found = []
    for group in groups:
        own = Group()
        own.CopyFrom(group)
        if place.own_gpu and own.gpus:
            own.gpus[:] = [place.index + gpu for gpu in own.gpus]
        found.append(own)
    return found


def agree(asked: Sequence[Group], reported: Sequence[Group]) -> bool:
    """True if a server that reports these groups has what was asked for.

    What was left open, such as the GPUs, is as the server has chosen. Names do not matter.
    """
    if not asked:
        return True
    if len(asked) == len(reported):
        pairs = zip(asked, reported, strict=True)
        if all(_is(wanted, there) for wanted, there in pairs):
            return True
    return _instances(asked) == _instances(reported)


def described(groups: Sequence[Group]) -> str:
    """Groups for people, such as `2 x GPU 0, 2 x GPU 1`."""
    parts = []
    for group in groups:
        kind = Group.Kind.Name(group.kind).removeprefix("KIND_")
        where = [f"{kind} {gpu}" for gpu in group.gpus] or [kind]
        parts += [f"{max(group.count, 1)} x {one}" for one in where]
    return ", ".join(parts) or "none"


def _is(asked: Group, reported: Group) -> bool:
    kind = Group.KIND_GPU if asked.kind == Group.KIND_AUTO and asked.gpus else asked.kind
    if kind not in (Group.KIND_AUTO, reported.kind):
        return False
    if asked.gpus and sorted(asked.gpus) != sorted(reported.gpus):
        return False
    return not asked.count or asked.count == max(reported.count, 1)


def _instances(groups: Iterable[Group]) -> Counter[tuple[int, int | None]]:
    """How many instances there are by kind and GPU."""
    counts: Counter[tuple[int, int | None]] = Counter()
    for group in groups:
        for gpu in group.gpus or [None]:
            counts[group.kind, gpu] += max(group.count, 1)
    return counts


def _share(count: int, place: Place) -> int:
    return count // place.count + (place.index < count % place.count)


def _check(group: Group, index: int, place: Place) -> None:
    for gpu in group.gpus:
        if not 0 <= gpu < place.count:
            raise InvalidOption(
                f"instance_group[{index}].gpus",
                f"there is no GPU {gpu}: the Tritons of this server have {place.count}, which are"
                f" numbered from 0",
            )


Tensor: TypeAlias = ModelInput | ModelOutput
Reported: TypeAlias = pb.ModelMetadataResponse.TensorMetadata


@dataclass(frozen=True, slots=True)
class Difference:
    """One field, with what was asked for and what a server reports, for people."""

    path: str
    asked: str
    reported: str

    @property
    def field(self) -> str:
        """The field of the configuration that it is about."""
        return self.path.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.path}: {self.asked} asked for, {self.reported} there"


def differences(asked: ModelConfig, said: RemoteDescription, version: str = "") -> list[Difference]:
    """Where a server's model is not what a configuration asks for.

    What the configuration leaves open is as the server has it. `version` is the one that is wanted
    there, empty for any.
    """
    return list(_differences(asked, said, version))


def _differences(asked: ModelConfig, said: RemoteDescription, version: str) -> Iterator[Difference]:
    versions = list(said.metadata.versions)
    if version and versions and version not in versions:
        yield Difference("version", version, ", ".join(versions))
    groups = list(asked.instance_group)
    if said.config is None:
        if groups:
            yield Difference("instance_group", described(groups), "what the server does not tell")
    else:
        most = said.config.max_batch_size
        if asked.max_batch_size > most:
            yield Difference("max_batch_size", str(asked.max_batch_size), str(most))
        if not agree(groups, list(said.config.instance_group)):
            reported = described(list(said.config.instance_group))
            yield Difference("instance_group", described(groups), reported)
    batches = asked.max_batch_size > 0
    optional = {one.name for one in said.config.input if one.optional} if said.config else set()
    yield from _tensors("input", asked.input, said.metadata.inputs, batches, optional)
    yield from _tensors("output", asked.output, said.metadata.outputs, batches, None)


def _tensors(
    path: str,
    asked: Sequence[Tensor],
    reported: Sequence[Reported],
    batches: bool,
    optional: set[str] | None,
) -> Iterator[Difference]:
    """`optional` are the names of inputs that need not be given; None for outputs."""
    if not asked or not reported:
        return  # a server that tells of none leaves them to the configuration
    there = {tensor.name: tensor for tensor in reported}
    for tensor in asked:
        at = f"{path} '{tensor.name}'"
        found = there.pop(tensor.name, None)
        if found is None:
            yield Difference(at, "it is", "it is not")
            continue
        datatype = BY_CONFIG_NUMBER.get(tensor.data_type)
        if datatype is not None and datatype != found.datatype:
            yield Difference(f"{at} datatype", str(datatype), found.datatype)
        dims = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        shape = [-1, *dims] if batches else dims
        if tensor.dims and found.shape and not _fits(shape, list(found.shape)):
            yield Difference(f"{at} shape", brackets(shape), brackets(found.shape))
    if optional is not None:
        for name in there.keys() - optional:
            yield Difference(f"{path} '{name}'", "no such one is", "a needed one is")


def _fits(asked: Sequence[int], reported: Sequence[int]) -> bool:
    return len(asked) == len(reported) and all(
        -1 in (one, other) or one == other for one, other in zip(asked, reported, strict=True)
    )
