"""TensorFlow Serving as an upstream, over gRPC and HTTP.

Over gRPC the rows of a batch's requests are added to a message without copying.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from google.protobuf.message import DecodeError

from headrace.core.bytes_array import bytes_array
from headrace.core.datatypes import ITEM_SIZES, NUMPY, Datatype
from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.signature import Signature
from headrace.core.tensors import Buffer, Tensor, TensorArray, element_count, raw_bytes
from headrace.placement.upstream.connection import (
    RemoteDescription,
    RemoteRequest,
    nonsense,
)
from headrace.placement.upstream.grpc_client import Ask, GrpcMessages, Question
from headrace.placement.upstream.http_client import (
    HttpAsk,
    Rest,
    failed_by,
    json_of,
    message_of,
    read_description,
)
from headrace.placement.upstream.options import RemoteOptions
from headrace.protocol.elements import array_of_nested, nested_json
from headrace.protocol.http1 import HttpRequest, HttpResponse
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb import tfserving_pb2 as tf
from headrace.protocol.protobuf_contents import varint
from headrace.protocol.v2_protobuf import RemoteAnswer, RemoteInput

_PREDICTIONS = b"/tensorflow.serving.PredictionService/"
_MODELS = b"/tensorflow.serving.ModelService/"
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
_MOST_FILLED = 1 << 24  # elements that a few bytes may expand to
_INPUT, _NAME, _TENSOR, _CONTENT = b"\x12", b"\x0a", b"\x12", b"\x22"


def model_spec(name: str, version: str, label: str, signature: str = "") -> tf.ModelSpec:
    """The ModelSpec; `version` is a number, "" for any, as is `label`."""
    spec = tf.ModelSpec(name=name, signature_name=signature)
    if version:
        spec.version.value = int(version)
    elif label:
        spec.version_label = label
    return spec


def predict_request(
    spec: tf.ModelSpec, inputs: Sequence[RemoteInput], outputs: Sequence[str]
) -> list[Buffer]:
    """A PredictRequest, in consecutive pieces; its tensors are views."""
    message = tf.PredictRequest(model_spec=spec, output_filter=outputs)
    pieces: list[Buffer] = [message.SerializeToString()]
    for item in inputs:
        tensor = tf.Tensor(dtype=tf.DataType.ValueType(_NUMBERS[item.datatype]))
        tensor.tensor_shape.SetInParent()  # set even without dimensions
        for count in item.shape:
            tensor.tensor_shape.dim.add(size=count)
        data, size = _content(item)
        head, name = tensor.SerializeToString(), item.name.encode()
        entry = _NAME + varint(len(name)) + name + _TENSOR + varint(len(head) + size) + head
        pieces += (_INPUT + varint(len(entry) + size) + entry, *data)
    return pieces


def read_predictions(data: Buffer) -> RemoteAnswer:
    """Decode the response in `data`; raises `InvalidRequest`."""
    try:
        message = tf.PredictResponse.FromString(bytes(data))
    except DecodeError as error:
        raise InvalidRequest(f"not a PredictResponse: {error}") from None
    outputs = {name: _array(name, tensor) for name, tensor in message.outputs.items()}
    return RemoteAnswer(outputs, {})


def metadata_of(signatures: tf.SignatureDefMap, name: str) -> pb.ModelMetadataResponse:
    """The inputs and outputs of a signature; raises `InvalidRequest` if it does not exist.

    If a tensor has an unknown rank, all tensors of its kind are left out.
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
    """The name of an unsupported datatype; newer servers may have further ones."""
    return tf.DataType.Name(number) if number in tf.DataType.values() else f"DataType {number}"


def available(status: tf.GetModelStatusResponse) -> bool:
    """True if any of the requested versions is available."""
    return any(
        version.state == tf.ModelVersionStatus.AVAILABLE for version in status.model_version_status
    )


def _content(item: RemoteInput) -> tuple[list[Buffer], int]:
    """The fields of a tensor's data, and their size."""
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
    if len(content) == count * ITEM_SIZES[datatype]:  # the usual case
        return Tensor.from_bytes(name, datatype, shape, content).array
    if content:
        raise InvalidRequest(f"output '{name}' of shape {shape} has {len(content)} bytes")
    values = list(getattr(tensor, _FIELDS.get(datatype, "int_val")))
    values = _filled(name, values, count, 0)
    try:
        if datatype in _HALF:  # stored as bits
            return np.array(values, "<u2").view(NUMPY[datatype]).reshape(shape)
        return np.array(values, NUMPY[datatype]).reshape(shape)
    except OverflowError:
        raise InvalidRequest(f"output '{name}' has a number out of its range") from None


def _filled(name: str, values: list[Any], count: int, nothing: Any) -> list[Any]:
    """Expand values to `count`: the last one stands for all missing ones."""
    if len(values) > count or (count - len(values) > _MOST_FILLED):
        raise InvalidRequest(f"output '{name}' has {len(values)} values, not {count}")
    last = values[-1] if values else nothing
    return values + [last] * (count - len(values))


def signatures_of(metadata: Mapping[str, tf.Any]) -> tf.SignatureDefMap:
    """The signatures in a GetModelMetadataResponse; raises `InvalidRequest`."""
    if SIGNATURE_FIELD not in metadata:
        raise InvalidRequest("metadata without signatures")
    try:
        return tf.SignatureDefMap.FromString(metadata[SIGNATURE_FIELD].value)
    except DecodeError as error:
        raise InvalidRequest(f"not a SignatureDefMap: {error}") from None


class TfServingGrpc(GrpcMessages):
    """`GrpcMessages` for TensorFlow Serving's procedures."""

    infer_path = _PREDICTIONS + b"Predict"

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """Raises `InvalidOption` for an invalid certificate or key."""
        super().__init__(options, model)
        self._signature_name = options.own.get("signature_name", SIGNATURE)

    async def describe(self, ask: Ask) -> RemoteDescription:
        """Query the model's signature."""
        asked = tf.GetModelMetadataRequest(
            model_spec=self._spec(), metadata_field=[SIGNATURE_FIELD]
        )
        path = _PREDICTIONS + b"GetModelMetadata"
        said = self.given(*await ask(path, asked.SerializeToString()))
        try:
            signatures = signatures_of(self.parsed(tf.GetModelMetadataResponse, said).metadata)
        except InvalidRequest as error:
            raise self.nonsense(error) from None
        return _described(signatures, self._signature_name)

    def readiness(self) -> Question:
        """The request for the states of the model's versions."""
        asked = tf.GetModelStatusRequest(model_spec=self._spec())
        return _MODELS + b"GetModelStatus", asked.SerializeToString()

    def is_ready(self, data: Buffer) -> bool:
        """True if any version is available; raises `CallFailed`."""
        return available(self.parsed(tf.GetModelStatusResponse, data))

    def message(self, request: RemoteRequest) -> list[Buffer]:
        """A PredictRequest; it has no id and no parameters."""
        return predict_request(self._spec(self._signature_name), request.inputs, request.outputs)

    def answer(self, data: Buffer) -> RemoteAnswer:
        """The outputs in a PredictResponse; raises `CallFailed`."""
        try:
            return read_predictions(data)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def _spec(self, signature: str = "") -> tf.ModelSpec:
        options = self.options
        label = options.own.get("remote_label", "")
        return model_spec(options.model, options.version, label, signature)


class TfServingRest(Rest):
    """TensorFlow Serving over HTTP: all inputs and outputs as columnar JSON."""

    def __init__(self, options: RemoteOptions, model: str, signature: Signature) -> None:
        super().__init__(options, model, signature)
        which, label = "", options.own.get("remote_label")
        if options.version:
            which = f"/versions/{options.version}"
        elif label:
            which = f"/labels/{quote(label, safe='')}"
        self._path = f"/v1/models/{quote(options.model, safe='')}{which}"
        self._signature_name = options.own.get("signature_name", SIGNATURE)
        self._head = b'{"signature_name":' + orjson.dumps(self._signature_name) + b',"inputs":{'

    async def describe(self, ask: HttpAsk) -> RemoteDescription:
        """Query the model's signature, from its metadata."""
        response = await ask(HttpRequest("GET", f"{self._path}/metadata"))
        metadata = self._object(response).get("metadata")
        found = metadata.get(SIGNATURE_FIELD) if isinstance(metadata, dict) else None
        signatures = await read_description(
            response, lambda: message_of(self.model, found, tf.SignatureDefMap())
        )
        return _described(signatures, self._signature_name)

    async def ready(self, ask: HttpAsk) -> bool:
        """True if a version is available."""
        response = await ask(HttpRequest("GET", self._path))
        if response.status == 404:
            return False
        document = self._object(response)
        return available(message_of(self.model, document, tf.GetModelStatusResponse()))

    def request(self, request: RemoteRequest) -> HttpRequest:
        """The columnar form, whose tensors have the V2 layout."""
        tensors = [
            orjson.dumps(item.name) + b":" + nested_json(item.datatype, item.array())
            for item in request.inputs
        ]
        body: list[Buffer] = [self._head + b",".join(tensors) + b"}}"]
        headers = {"content-type": "application/json"}
        return HttpRequest("POST", f"{self._path}:predict", headers, body)

    def answer(self, response: HttpResponse) -> RemoteAnswer:
        """The outputs; a single output has no name in the response."""
        found = self._object(response).get("outputs")
        specs = self.signature.outputs
        if not isinstance(found, dict) or found.keys() == {"b64"}:
            if len(specs) != 1:
                raise nonsense(self.model, InvalidRequest("outputs without names"))
            found = {specs[0].name: found}
        try:
            outputs = {
                spec.name: array_of_nested(spec.name, spec.datatype, found[spec.name])
                for spec in specs
                if spec.name in found
            }
        except InvalidRequest as error:
            raise nonsense(self.model, error) from None
        return RemoteAnswer(outputs, {})

    def _object(self, response: HttpResponse) -> Mapping[str, Any]:
        document = json_of(self.model, response)
        if not isinstance(document, dict):
            raise nonsense(self.model, InvalidRequest("no JSON object"))
        return document


def _described(signatures: tf.SignatureDefMap, name: str) -> RemoteDescription:
    try:
        return RemoteDescription(metadata_of(signatures, name), None)
    except InvalidRequest as error:
        raise failed_by(ExecutionFailed(str(error))) from None
