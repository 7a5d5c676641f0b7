"""Infer messages as a client of another server writes and reads them.

What requests of the same names, datatypes and shapes have in common is serialised once. The rows of
a batch's requests are joined into the message itself: that is the only copy of a fixed-size tensor.
In an answer, raw tensors are views into what was received.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from headrace.core.datatypes import BY_NAME, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.requests import Parameter
from headrace.core.tensors import Array, Buffer, Tensor, element_count, raw_bytes
from headrace.wire.bytes_tensor import decode_bytes_tensor, encode_bytes_tensor
from headrace.wire.elements import tensor_from_values
from headrace.wire.grpc_infer import CONTENTS, parameter_values, read_varint, set_parameter
from headrace.wire.grpc_messages import varint
from headrace.wire.pb import grpc_service_pb2 as pb

_RAW_INPUT = b"\x3a"
_RAW_OUTPUT = 0x32  # the tag of a ModelInferResponse's raw_output_contents
_REMEMBERED = 256  # heads
_REMEMBERED_SIZE = 4096  # bytes of a head


class RemoteInput(NamedTuple):
    """One input of a call: `parts` lie behind one another along axis 0 of `shape`."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parts: Sequence[Array]


class RemoteAnswer(NamedTuple):
    """The outputs of a response by name, and its parameters."""

    outputs: Mapping[str, Array]
    parameters: dict[str, Parameter]


class RemoteMessages:
    """Writes requests for one version of a model elsewhere, and reads the responses."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self._heads: dict[object, bytes] = {}

    def request(
        self,
        inputs: Sequence[RemoteInput],
        outputs: Sequence[str],
        parameters: Mapping[str, Parameter],
        id: str = "",
    ) -> bytes:
        """A ModelInferRequest; all outputs are wanted as raw bytes."""
        key = (tuple(outputs), *[(i.name, i.datatype, i.shape) for i in inputs])
        head = self._heads.get(key)
        if head is None:
            head = self._remember(key, inputs, outputs)
        pieces: list[Buffer] = [head]
        if id or parameters:
            own = pb.ModelInferRequest(id=id)
            for name, value in parameters.items():
                set_parameter(own, name, value)
            pieces.append(own.SerializeToString())
        for item in inputs:
            if item.datatype is Datatype.BYTES:
                data: list[Buffer] = [encode_bytes_tensor(part) for part in item.parts]
            else:
                data = [raw_bytes(part) for part in item.parts]
            pieces += (_RAW_INPUT, varint(sum(map(len, data))), *data)
        return b"".join(pieces)

    def _remember(
        self, key: object, inputs: Sequence[RemoteInput], outputs: Sequence[str]
    ) -> bytes:
        message = pb.ModelInferRequest(model_name=self._model, model_version=self._version)
        for item in inputs:
            message.inputs.add(name=item.name, datatype=item.datatype.value, shape=item.shape)
        for name in outputs:
            message.outputs.add(name=name)
        head = message.SerializeToString()
        if len(self._heads) >= _REMEMBERED:
            self._heads.clear()
        self._heads[key] = head
        return head


def read_answer(data: bytes) -> RemoteAnswer:
    """The response in `data`, whose tensors are views into it; raises `InvalidRequest`."""
    head, raw = _apart(data)
    try:
        message = pb.ModelInferResponse.FromString(head)
    except DecodeError as error:
        raise InvalidRequest(f"not a ModelInferResponse: {error}") from None
    if raw and len(raw) != len(message.outputs):
        raise InvalidRequest(f"{len(message.outputs)} outputs, but {len(raw)} raw contents")
    outputs: dict[str, Array] = {}
    for index, item in enumerate(message.outputs):
        datatype = BY_NAME.get(item.datatype)
        if datatype is None:
            raise InvalidRequest(f"output '{item.name}' has the unknown datatype {item.datatype!r}")
        shape = tuple(item.shape)
        if not raw:
            values = list(getattr(item.contents, CONTENTS.get(datatype, "bytes_contents")))
            if len(values) != element_count(item.name, shape):
                raise InvalidRequest(f"output '{item.name}' has {len(values)} values")
            tensor = tensor_from_values(item.name, datatype, list(shape), values)
        elif datatype is Datatype.BYTES:
            tensor = decode_bytes_tensor(item.name, shape, raw[index])
        else:
            tensor = Tensor.from_bytes(item.name, datatype, shape, raw[index])
        outputs[item.name] = tensor.array
    return RemoteAnswer(outputs, parameter_values(message.parameters))


def _apart(data: bytes) -> tuple[bytes, list[memoryview]]:
    """A message without its raw contents, and those; raises `InvalidRequest`."""
    view, size = memoryview(data), len(data)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    position = kept = 0
    while position < size:
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
        if tag == _RAW_OUTPUT:
            rest.append(view[kept:position])
            raw.append(view[start:stop])
            kept = stop
        position = stop
    rest.append(view[kept:])
    return b"".join(rest), raw
