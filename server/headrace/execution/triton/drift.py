"""What is not as it was asked for of a model that others run: plain comparisons."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.datatypes import BY_CONFIG_NUMBER
from headrace.core.tensors import brackets
from headrace.execution.remote.connection import RemoteDescription
from headrace.execution.triton.groups import agree, described
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.pb.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

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
