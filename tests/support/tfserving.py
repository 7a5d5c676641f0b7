"""A stand-in for TensorFlow Serving, which has no package.

It follows the public definitions of the protocol, over gRPC with grpcio, and over HTTP by the
standard library, with nested arrays that numpy reads. Its models: `half` has `x` in FP32 of
[rows, 2] and returns `y`, twice `x`; `texts` has `text` and `n` of [rows] and returns `upper` of
bytes, and `more`, `n` and one, in INT64. Negative numbers are errors of `half`. The signature
`other` of `half` has an input of unknown rank.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
import numpy as np

from headrace.core.tensors import Array
from headrace.protocol.pb import tfserving_pb2 as tf
from tests.support.stub_server import StubRequest, StubResponse, StubServer

_TYPES: dict[int, Any] = {tf.DT_FLOAT: np.float32, tf.DT_INT64: np.int64, tf.DT_STRING: object}
_SIGNATURES: dict[str, dict[str, tuple[dict[str, int], dict[str, int]]]] = {
    "half": {"serving_default": ({"x": tf.DT_FLOAT}, {"y": tf.DT_FLOAT})},
    "texts": {
        "serving_default": (
            {"text": tf.DT_STRING, "n": tf.DT_INT64},
            {"upper": tf.DT_STRING, "more": tf.DT_INT64},
        )
    },
}


class Wrong(Exception):
    """An invalid request, with its statuses over gRPC and HTTP."""

    def __init__(self, text: str, code: grpc.StatusCode, status: int) -> None:
        super().__init__(text)
        self.code = code
        self.status = status


def _missing(name: str) -> Wrong:
    text = f"Servable not found for request: Latest({name})"
    return Wrong(text, grpc.StatusCode.NOT_FOUND, 404)


def _compute(name: str, inputs: dict[str, Array]) -> dict[str, Array]:
    if name == "half":
        x = inputs["x"]
        if (x < 0).any():
            raise Wrong("negative numbers", grpc.StatusCode.INVALID_ARGUMENT, 400)
        return {"y": x * 2}
    upper = np.empty(inputs["text"].shape, object)
    upper.ravel()[:] = [text.upper() for text in inputs["text"].ravel().tolist()]
    return {"upper": upper, "more": inputs["n"] + 1}


def _signatures(name: str) -> tf.SignatureDefMap:
    found = tf.SignatureDefMap()
    for signature, (inputs, outputs) in _SIGNATURES[name].items():
        definition = found.signature_def[signature]
        definition.method_name = "tensorflow/serving/predict"
        for tensors, given in ((definition.inputs, inputs), (definition.outputs, outputs)):
            for alias, kind in given.items():
                info = tensors[alias]
                info.name = f"{alias}:0"
                info.dtype = tf.DataType.ValueType(kind)
                info.tensor_shape.dim.add(size=-1)
                if kind == tf.DT_FLOAT:
                    info.tensor_shape.dim.add(size=2)
    other = found.signature_def["other"]
    other.inputs["x"].dtype = tf.DT_FLOAT
    other.inputs["x"].tensor_shape.unknown_rank = True
    other.outputs["y"].dtype = tf.DT_FLOAT
    other.outputs["y"].tensor_shape.dim.add(size=2)
    return found


class TfServing(StubServer):
    """Runs while entered. `asked` are the model specifications of predictions.

    `states` are those of the versions of all models.
    """

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.states: dict[int, int] = {1: tf.ModelVersionStatus.AVAILABLE}
        self.specs: list[tf.ModelSpec] = []
        self.paths: list[str] = []
        self._threads = ThreadPoolExecutor(4)
        self._grpc = grpc.server(self._threads, [_Calls(self)])
        self.grpc = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._grpc.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._grpc.stop(None).wait()
        self._threads.shutdown()

    # --- gRPC

    def predict(self, message: bytes) -> bytes:
        request = tf.PredictRequest.FromString(message)
        name = request.model_spec.name
        if name not in _SIGNATURES:
            raise _missing(name)
        self.specs.append(request.model_spec)
        inputs = {alias: _array(tensor) for alias, tensor in request.inputs.items()}
        response = tf.PredictResponse(model_spec=request.model_spec)
        for alias, array in _compute(name, inputs).items():
            if not request.output_filter or alias in request.output_filter:
                response.outputs[alias].CopyFrom(_tensor(array))
        return response.SerializeToString()

    def metadata(self, message: bytes) -> bytes:
        request = tf.GetModelMetadataRequest.FromString(message)
        assert list(request.metadata_field) == ["signature_def"]
        if request.model_spec.name not in _SIGNATURES:
            raise _missing(request.model_spec.name)
        response = tf.GetModelMetadataResponse(model_spec=request.model_spec)
        found = response.metadata["signature_def"]
        found.type_url = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        found.value = _signatures(request.model_spec.name).SerializeToString()
        return response.SerializeToString()

    def status(self, message: bytes) -> bytes:
        request = tf.GetModelStatusRequest.FromString(message)
        if request.model_spec.name not in _SIGNATURES:
            raise _missing(request.model_spec.name)
        response = tf.GetModelStatusResponse()
        for version, state in self.states.items():
            response.model_version_status.add(
                version=version, state=tf.ModelVersionStatus.State.ValueType(state)
            )
        return response.SerializeToString()

    # --- HTTP

    def _respond(self, request: StubRequest) -> StubResponse:
        status = 200
        try:
            if request.method == "GET":
                document = self.get(request.path)
            else:
                document = self.post(request.path, json.loads(request.body))
        except Wrong as error:
            status, document = error.status, {"error": str(error)}
        return status, {"Content-Type": "application/json"}, json.dumps(document).encode()

    def get(self, path: str) -> Any:
        parts = path.removeprefix("/v1/models/").split("/")
        if parts[0] not in _SIGNATURES:
            raise _missing(parts[0])
        if parts[-1] == "metadata":
            return _metadata_document(parts[0])
        return {
            "model_version_status": [
                {
                    "version": str(version),
                    "state": tf.ModelVersionStatus.State.Name(state),
                    "status": {"error_code": "OK", "error_message": ""},
                }
                for version, state in self.states.items()
            ]
        }

    def post(self, path: str, document: Any) -> Any:
        self.paths.append(path)
        name = path.removeprefix("/v1/models/").split("/")[0].removesuffix(":predict")
        if name not in _SIGNATURES:
            raise _missing(name)
        kinds, results = _SIGNATURES[name][document["signature_name"]]
        inputs = {}
        for alias, kind in kinds.items():
            value = document["inputs"][alias]
            if kind == tf.DT_STRING:
                value = [
                    b64decode(item["b64"]) if isinstance(item, dict) else item.encode()
                    for item in value
                ]
            inputs[alias] = np.array(value, _TYPES[kind])
        outputs = {}
        for alias, array in _compute(name, inputs).items():
            outputs[alias] = array.tolist()
            if results[alias] == tf.DT_STRING:
                outputs[alias] = [{"b64": b64encode(item).decode()} for item in array.tolist()]
        return {"outputs": next(iter(outputs.values())) if len(outputs) == 1 else outputs}


def _metadata_document(name: str) -> Any:
    definitions = {}
    for signature, definition in _signatures(name).signature_def.items():
        definitions[signature] = {
            side: {
                alias: {
                    "dtype": tf.DataType.Name(info.dtype),
                    "tensor_shape": {
                        "dim": [
                            {"size": str(dim.size), "name": ""} for dim in info.tensor_shape.dim
                        ],
                        "unknown_rank": info.tensor_shape.unknown_rank,
                    },
                    "name": info.name,
                }
                for alias, info in tensors.items()
            }
            for side, tensors in (("inputs", definition.inputs), ("outputs", definition.outputs))
        }
        definitions[signature]["method_name"] = definition.method_name  # type: ignore[assignment]
    spec = {"name": name, "signature_name": "", "version": "1"}
    return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}}


def _array(tensor: tf.Tensor) -> Array:
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if tensor.dtype == tf.DT_STRING:
        array = np.empty(len(tensor.string_val), object)
        array[:] = list(tensor.string_val)
        return array.reshape(shape)
    return np.frombuffer(tensor.tensor_content, _TYPES[tensor.dtype]).reshape(shape)


def _tensor(array: Array) -> tf.Tensor:
    """The tensor as TensorFlow Serving writes it: with values in the typed field."""
    tensor = tf.Tensor()
    for size in array.shape:
        tensor.tensor_shape.dim.add(size=size)
    if array.dtype == object:
        tensor.dtype = tf.DT_STRING
        tensor.string_val.extend(array.ravel().tolist())
    elif array.dtype == np.float32:
        tensor.dtype = tf.DT_FLOAT
        tensor.float_val.extend(array.ravel().tolist())
    else:
        tensor.dtype = tf.DT_INT64
        tensor.int64_val.extend(array.ravel().tolist())
    return tensor


class _Calls(grpc.GenericRpcHandler):
    def __init__(self, server: TfServing) -> None:
        self._procedures: dict[str, Callable[[bytes], bytes]] = {
            "/tensorflow.serving.PredictionService/Predict": server.predict,
            "/tensorflow.serving.PredictionService/GetModelMetadata": server.metadata,
            "/tensorflow.serving.ModelService/GetModelStatus": server.status,
        }

    def service(self, details: Any) -> Any:
        procedure = self._procedures.get(details.method)
        if procedure is None:
            return None

        def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return procedure(message)
            except Wrong as error:
                context.abort(error.code, str(error))

        return grpc.unary_unary_rpc_method_handler(answer)
