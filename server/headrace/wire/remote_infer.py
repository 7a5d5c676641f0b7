"""Infer messages as a client of another server writes and reads them.

What requests of the same names, datatypes and shapes have in common is serialised once, and what
answers have in common is read once. Requests are written as buffers that lie behind one another, so
that the rows of a batch's requests need not be joined. In an answer, raw tensors are views into
what was received.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from headrace.core.bytes_array import BytesArray
from headrace.core.call import Parameter
from headrace.core.datatypes import BY_NAME, ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import (
    Array,
    Buffer,
    Tensor,
    TensorArray,
    concatenated,
    element_count,
    raw_bytes,
)
from headrace.wire.elements import tensor_from_values
from headrace.wire.grpc_contents import CONTENTS, read_varint, varint
from headrace.wire.grpc_infer import parameter_values, set_parameter
from headrace.wire.parameters import PARAMETERS
from headrace.wire.pb import grpc_service_pb2 as pb

RAW_INPUT = b"\x3a"
_ID, _RAW_OUTPUT = 0x1A, 0x32  # tags of a ModelInferResponse: id, raw_output_contents
_STREAM_RESPONSE = 0x12  # the tag of a ModelStreamInferResponse: infer_response
_REMEMBERED = 256  # heads
_REMEMBERED_SIZE = 4096  # bytes of a head


class RemoteInput(NamedTuple):
    """One input of a call: `parts` lie behind one another along axis 0 of `shape`."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parts: Sequence[TensorArray]

    def array(self) -> Array:
        """The rows as one array."""
        parts = self.parts
        whole = parts[0] if len(parts) == 1 else concatenated([part.ravel() for part in parts])
        return np.asarray(whole).reshape(self.shape)


class RemoteAnswer(NamedTuple):
    """The outputs of a response by name, its parameters, and the id of its request."""

    outputs: Mapping[str, TensorArray]
    parameters: dict[str, Parameter]
    id: str = ""


class _Head(NamedTuple):
    """What requests have in common up to the data of the first input, and what goes before others.

    There is nothing before the data of inputs whose size the shape does not tell.
    """

    start: bytes
    prefixes: Sequence[bytes]


class RemoteMessages:
    """Writes requests for one version of a model elsewhere."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self._heads: dict[object, _Head] = {}

    def request(
        self,
        inputs: Sequence[RemoteInput],
        outputs: Sequence[str],
        parameters: Mapping[str, Parameter],
        id: str = "",
    ) -> list[Buffer]:
        """A ModelInferRequest; all outputs are wanted as raw bytes. Its tensors are views."""
        key = (tuple(outputs), *[(i.name, i.datatype, i.shape) for i in inputs])
        head = self._heads.get(key)
        if head is None:
            head = self._remember(key, inputs, outputs)
        pieces: list[Buffer] = [head.start]
        if id or parameters:
            own = pb.ModelInferRequest(id=id)
            write_parameters(own, parameters)
            pieces.append(own.SerializeToString())
        for item, prefix in zip(inputs, head.prefixes, strict=True):
            if prefix:
                pieces.append(prefix)
                pieces += [raw_bytes(part) for part in item.parts]
            else:
                data = [raw_bytes(part) for part in item.parts]
                pieces += (RAW_INPUT + varint(sum(map(len, data))), *data)
        return pieces

    def _remember(
        self, key: object, inputs: Sequence[RemoteInput], outputs: Sequence[str]
    ) -> _Head:
        message = pb.ModelInferRequest(model_name=self._model, model_version=self._version)
        prefixes = []
        for item in inputs:
            message.inputs.add(name=item.name, datatype=item.datatype.value, shape=item.shape)
            prefix = b""
            if item.datatype is not Datatype.BYTES:
                prefix = RAW_INPUT + varint(math.prod(item.shape) * ITEM_SIZES[item.datatype])
            prefixes.append(prefix)
        for name in outputs:
            message.outputs.add(name=name)
        head = _Head(message.SerializeToString(), prefixes)
        if len(self._heads) >= _REMEMBERED:
            self._heads.clear()
        self._heads[key] = head
        return head


def write_parameters(message: pb.ModelInferRequest, parameters: Mapping[str, Parameter]) -> None:
    """Put parameters of a request into its message."""
    for name, value in parameters.items():
        if name == "sequence_id" and isinstance(value, int) and value >> 63 > 0:
            value -= 1 << 64  # it has 64 bits without a sign, and travels with one
        set_parameter(message, name, value)


class _Known(NamedTuple):
    """What is known of answers by their head: outputs, as name, datatype, shape and size in bytes.

    The size is -1 where the shape does not tell. Data is not among the raw contents but in the
    head itself if `inline`.
    """

    outputs: Sequence[tuple[str, Datatype, tuple[int, ...], int]]
    parameters: dict[str, Parameter]
    inline: Mapping[str, TensorArray] | None


class AnswerReader:
    """Reads ModelInferResponses; one with a head like an earlier one's without parsing it."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def read(self, data: Buffer, shared: Mapping[str, memoryview] | None = None) -> RemoteAnswer:
        """The response in `data`, whose tensors are views into it; raises `InvalidRequest`.

        An output that is `shared` is a view into what is there, unless the response has it.
        """
        head, id, raw = _apart(data)
        known = self._known.get(head)
        if known is None:
            known = _read_head(head, bool(raw))
            if len(head) <= _REMEMBERED_SIZE:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[head] = known
        outputs: dict[str, TensorArray] = {}
        if known.inline is not None:
            if raw:
                raise InvalidRequest("outputs have both typed and raw contents")
            outputs.update(known.inline)
        elif len(raw) != 2 * len(known.outputs):
            raise InvalidRequest(f"{len(known.outputs)} outputs, but {len(raw) // 2} raw contents")
        else:
            position = 0
            for name, datatype, shape, nbytes in known.outputs:
                start, stop = raw[position : position + 2]
                position += 2
                if stop - start == nbytes:
                    outputs[name] = np.ndarray(shape, NUMPY[datatype], data, start)
                elif shared and name in shared and start == stop and nbytes > 0:
                    raw_output = shared[name][:nbytes]
                    outputs[name] = Tensor.from_bytes(name, datatype, shape, raw_output).array
                else:
                    raw_output = memoryview(data)[start:stop]  # or the error says what is wrong
                    outputs[name] = Tensor.from_bytes(name, datatype, shape, raw_output).array
        return RemoteAnswer(outputs, dict(known.parameters), id)


def response_in(data: Buffer) -> Buffer | None:
    """The response in a ModelStreamInferResponse that has nothing else; None if it is not so."""
    if len(data) < 2 or data[0] != _STREAM_RESPONSE:
        return None
    length, start = read_varint(data, 1)
    return data[start:] if start and start + length == len(data) else None


def _read_head(head: bytes, raw: bool) -> _Known:
    """What a response without its raw contents says; raises `InvalidRequest`."""
    try:
        message = pb.ModelInferResponse.FromString(head)
    except DecodeError as error:
        raise InvalidRequest(f"not a ModelInferResponse: {error}") from None
    outputs = []
    for item in message.outputs:
        datatype = BY_NAME.get(item.datatype)
        if datatype is None:
            raise InvalidRequest(f"output '{item.name}' has the unknown datatype {item.datatype!r}")
        shape = tuple(item.shape)
        count = element_count(item.name, shape)
        size = -1 if datatype is Datatype.BYTES else count * ITEM_SIZES[datatype]
        outputs.append((item.name, datatype, shape, size))
    inline: dict[str, TensorArray] | None = None
    if outputs and not raw:
        inline = {}
        for item, (name, datatype, shape, _) in zip(message.outputs, outputs, strict=True):
            field = CONTENTS.get(datatype)  # some have raw contents only
            values = [] if field is None else list(getattr(item.contents, field))
            if len(values) != element_count(name, shape):
                raise InvalidRequest(f"output '{name}' has {len(values)} values")
            array = tensor_from_values(name, datatype, list(shape), values).array
            if not isinstance(array, BytesArray):
                array.flags.writeable = False  # others may get it, too
            inline[name] = array
    return _Known(outputs, parameter_values(message.parameters), inline)


def _apart(data: Buffer) -> tuple[bytes, str, list[int]]:
    """A response without id and raw contents, the id, and where each raw content begins and ends.

    Raises `InvalidRequest`.
    """
    size = len(data)
    head: list[Buffer] = []
    raw: list[int] = []
    id = ""
    position = kept = 0
    while position < size:
        tag = data[position]
        start = position + 2
        if tag < 128 and tag & 7 == 2 and start <= size and data[position + 1] < 128:
            stop = start + data[position + 1]  # as nearly always
        else:
            tag, start = read_varint(data, position)
            if start and tag & 7 == 2:
                length, start = read_varint(data, start)
                stop = start + length if start else size + 1
            elif start and tag & 7 == 0:
                stop = read_varint(data, start)[1] or size + 1
            else:  # no field of this message is written in another way
                stop = size + 1
        if stop > size:
            raise InvalidRequest("not a ModelInferResponse")
        if tag in (_RAW_OUTPUT, _ID):
            if kept < position:
                head.append(data[kept:position])
            kept = stop
            if tag == _RAW_OUTPUT:
                raw += (start, stop)
            else:
                id = str(data[start:stop], "utf-8", "replace")
        position = stop
    if kept < size:
        head.append(data[kept:])
    return b"".join(head), id, raw


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
