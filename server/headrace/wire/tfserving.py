"""Messages of TensorFlow Serving, as a client of it writes and reads them.

What requests of the same names, datatypes and shapes have in common is serialised once; the rows of
a batch's requests go into the message as they lie.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer, Tensor, TensorArray, element_count, raw_bytes
from headrace.wire.grpc_contents import varint
from headrace.wire.pb import grpc_service_pb2 as pb
from headrace.wire.pb import tfserving_pb2 as tf
from headrace.wire.remote_infer import RemoteAnswer, RemoteInput

SIGNATURE = "serving_default"
SIGNATURE_FIELD = "signature_def"
_NUMBERS: dict[Datatype, int] = {
    Datatype.FP32: tf.DT_FLOAT, Datatype.FP64: tf.DT_DOUBLE, Datatype.FP16: tf.DT_HALF,
    Datatype.BF16: tf.DT_BFLOAT16, Datatype.INT8: tf.DT_INT8, Datatype.INT16: tf.DT_INT16,
    Datatype.INT32: tf.DT_INT32, Datatype.INT64: tf.DT_INT64, Datatype.UINT8: tf.DT_UINT8,
    Datatype.UINT16: tf.DT_UINT16, Datatype.UINT32: tf.DT_UINT32, Datatype.UINT64: tf.DT_UINT64,
    Datatype.BOOL: tf.DT_BOOL, Datatype.BYTES: tf.DT_STRING,
}  # fmt: skip
_DATATYPES = {number: datatype for datatype, number in _NUMBERS.items()}
_FIELDS: dict[Datatype, str] = {
    Datatype.FP32: "float_val", Datatype.FP64: "double_val", Datatype.FP16: "half_val",
    Datatype.BF16: "half_val", Datatype.INT64: "int64_val", Datatype.BOOL: "bool_val",
    Datatype.UINT32: "uint32_val", Datatype.UINT64: "uint64_val",
}  # fmt: skip
_HALF = (Datatype.FP16, Datatype.BF16)
_REMEMBERED = 256  # kinds of request
_INPUT, _NAME, _TENSOR, _CONTENT = b"\x12", b"\x0a", b"\x12", b"\x22"


def model_spec(name: str, version: str, label: str, signature: str = "") -> tf.ModelSpec:
    """Which model is meant; `version` is a number, empty for any, as is `label`."""
    spec = tf.ModelSpec(name=name, signature_name=signature)
    if version:
        spec.version.value = int(version)
    elif label:
        spec.version_label = label
    return spec


class PredictMessages:
    """Writes requests for one signature of one model."""

    def __init__(self, spec: tf.ModelSpec) -> None:
        self._spec = spec
        self._known: dict[object, tuple[bytes, list[bytes]]] = {}

    def request(self, inputs: Sequence[RemoteInput], outputs: Sequence[str]) -> list[Buffer]:
        """A PredictRequest, one piece behind the other."""
        key = (tuple(outputs), *[(i.name, i.datatype, i.shape) for i in inputs])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = self._common(inputs, outputs)
        first, heads = known
        pieces: list[Buffer] = [first]
        for item, head in zip(inputs, heads, strict=True):
            name = item.name.encode()
            data, size = _content(item)
            tensor = len(head) + size
            entry = _NAME + varint(len(name)) + name + _TENSOR + varint(tensor) + head
            pieces += (_INPUT + varint(len(entry) + size) + entry, *data)
        return pieces

    def _common(
        self, inputs: Sequence[RemoteInput], outputs: Sequence[str]
    ) -> tuple[bytes, list[bytes]]:
        first = tf.PredictRequest(model_spec=self._spec, output_filter=outputs)
        heads = []
        for item in inputs:
            tensor = tf.Tensor(dtype=tf.DataType.ValueType(_NUMBERS[item.datatype]))
            tensor.tensor_shape.SetInParent()  # also if there are no dimensions
            for size in item.shape:
                tensor.tensor_shape.dim.add(size=size)
            heads.append(tensor.SerializeToString())
        return first.SerializeToString(), heads


def read_predictions(data: Buffer) -> RemoteAnswer:
    """The response in `data`; raises `InvalidRequest`."""
    try:
        message = tf.PredictResponse.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidRequest(f"not a PredictResponse: {error}") from None
    outputs = {name: _array(name, tensor) for name, tensor in message.outputs.items()}
    return RemoteAnswer(outputs, {})


def metadata_of(signatures: tf.SignatureDefMap, name: str) -> pb.ModelMetadataResponse:
    """One of a model's signatures; raises `InvalidRequest` if there is no such one.

    What has a tensor whose rank is unknown is left out, with all others beside it.
    """
    found = signatures.signature_def
    if name not in found:
        known = ", ".join(f"'{one}'" for one in sorted(found)) or "none"
        raise InvalidRequest(f"the model has no signature '{name}', it has {known}")
    result = pb.ModelMetadataResponse()
    for infos, tensors in (
        (found[name].inputs, result.inputs),
        (found[name].outputs, result.outputs),
    ):
        if any(info.tensor_shape.unknown_rank for info in infos.values()):
            continue
        for alias, info in sorted(infos.items()):
            datatype = _DATATYPES.get(info.dtype)
            shape = [dim.size for dim in info.tensor_shape.dim]
            known = datatype.value if datatype is not None else _foreign(info.dtype)
            tensors.add(name=alias, datatype=known, shape=shape)
    return result


def _foreign(number: int) -> str:
    """What a datatype is called that is none here; later servers may have others than these."""
    return tf.DataType.Name(number) if number in tf.DataType.values() else f"DataType {number}"


def available(status: tf.GetModelStatusResponse) -> bool:
    """Whether any version of those that were asked for serves."""
    return any(
        version.state == tf.ModelVersionStatus.AVAILABLE for version in status.model_version_status
    )


def _content(item: RemoteInput) -> tuple[list[Buffer], int]:
    """The data of a tensor as fields of its message, and their size."""
    if item.datatype is Datatype.BYTES:
        tensor = tf.Tensor()
        for part in item.parts:
            tensor.string_val.extend(part.ravel().tolist())
        data = tensor.SerializeToString()
        return [data], len(data)
    pieces = [raw_bytes(part) for part in item.parts]
    size = sum(map(len, pieces))
    if not size:
        return [], 0
    head = _CONTENT + varint(size)
    return [head, *pieces], len(head) + size


def _array(name: str, tensor: tf.Tensor) -> TensorArray:
    datatype = _DATATYPES.get(tensor.dtype)
    if datatype is None:
        raise InvalidRequest(f"output '{name}' has the datatype {tensor.dtype}")
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    count = element_count(name, shape)
    if datatype is Datatype.BYTES:
        return bytes_array(_filled(name, list(tensor.string_val), count, b""), shape)
    content = tensor.tensor_content
    if len(content) == count * ITEM_SIZES[datatype]:  # so nearly always where it is used
        return Tensor.from_bytes(name, datatype, shape, content).array
    if content:
        raise InvalidRequest(f"output '{name}' of shape {shape} has {len(content)} bytes")
    values = list(getattr(tensor, _FIELDS.get(datatype, "int_val")))
    values = _filled(name, values, count, 0)
    try:
        if datatype in _HALF:  # these are bits
            return np.array(values, "<u2").view(NUMPY[datatype]).reshape(shape)
        return np.array(values, NUMPY[datatype]).reshape(shape)
    except OverflowError:
        raise InvalidRequest(f"output '{name}' has a number out of its range") from None


def _filled(name: str, values: list[Any], count: int, nothing: Any) -> list[Any]:
    """As many values as a shape asks for, of which the last one may stand for many."""
    if len(values) > count or (count - len(values) > _MOST_FILLED):
        raise InvalidRequest(f"output '{name}' has {len(values)} values, not {count}")
    last = values[-1] if values else nothing
    return values + [last] * (count - len(values))


_MOST_FILLED = 1 << 24  # elements that a few bytes may become


def signatures_of(metadata: Mapping[str, tf.Any]) -> tf.SignatureDefMap:
    """Those in a GetModelMetadataResponse; raises `InvalidRequest`."""
    if SIGNATURE_FIELD not in metadata:
        raise InvalidRequest("metadata without signatures")
    try:
        return tf.SignatureDefMap.FromString(metadata[SIGNATURE_FIELD].value)
    except DecodeError as error:
        raise InvalidRequest(f"not a SignatureDefMap: {error}") from None
