"""Infer messages of a client some of whose tensors lie in memory that it shares with the server."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from headrace.core.requests import Parameter
from headrace.core.tensors import Buffer, raw_bytes
from headrace.wire.grpc_contents import varint
from headrace.wire.parameters import PARAMETERS
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.remote_infer import RAW_INPUT, RemoteInput, write_parameters

_REGION, _OFFSET, _SIZE = PARAMETERS
_Tensor: TypeAlias = (
    pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor
)


class Place(NamedTuple):
    """Where a tensor lies, or has room; in bytes."""

    region: str
    offset: int
    size: int


def shared_request(
    model: str,
    version: str,
    inputs: Sequence[RemoteInput],
    outputs: Sequence[str],
    parameters: Mapping[str, Parameter],
    id: str,
    places: Mapping[str, Place],
    rooms: Mapping[str, Place],
) -> list[Buffer]:
    """A ModelInferRequest whose inputs are at `places`, and whose outputs go to `rooms`.

    Others are in the message, as views.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    pieces: list[Buffer] = []
    for item in inputs:
        tensor = message.inputs.add(name=item.name, datatype=item.datatype.value, shape=item.shape)
        place = places.get(item.name)
        if place is not None:
            _point(tensor, place)
            continue
        data = [raw_bytes(part) for part in item.parts]
        pieces += (RAW_INPUT + varint(sum(map(len, data))), *data)
    for name in outputs:
        wanted = message.outputs.add(name=name)
        if name in rooms:
            _point(wanted, rooms[name])
    write_parameters(message, parameters)
    return [message.SerializeToString(), *pieces]


def register_request(name: str, key: str, size: int) -> bytes:
    """Has the server open a region."""
    message = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=0, byte_size=size)
    return message.SerializeToString()


def unregister_request(name: str) -> bytes:
    """Has the server close a region."""
    return pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString()


def registered(data: Buffer) -> Mapping[str, str]:
    """The keys of the regions that a server says it has, by their names; raises `DecodeError`."""
    message = pb.SystemSharedMemoryStatusResponse.FromString(bytes(data))
    return {name: region.key for name, region in message.regions.items()}


def _point(tensor: _Tensor, place: Place) -> None:
    tensor.parameters[_REGION].string_param = place.region
    tensor.parameters[_SIZE].int64_param = place.size
    if place.offset:
        tensor.parameters[_OFFSET].int64_param = place.offset
