"""Requests as bytes on the wire, made before the clock runs, and answers back to arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import orjson

from benchmarks.http1 import HttpWire, build_request, header
from benchmarks.http2 import GrpcWire, grpc_message
from benchmarks.models import Array, Case, Model
from benchmarks.wire import Answer, Wire
from headrace.protocol.pb import grpc_service_pb2 as pb

_DTYPES: Mapping[str, type[np.generic]] = {"FP32": np.float32, "INT32": np.int32}
_DATATYPES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_TOLERANCE = 1e-4  # a sum in another order, as in a larger batch, differs in the last bits
_JSON_NUMBER = 32  # bytes that a number takes at most
_OVERHEAD = 4096  # bytes of an answer beside its tensors, at most

Reader = Callable[[Answer], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request ready to be sent, and what is known of its answer."""

    message: bytes
    outputs: Mapping[str, Array]
    smallest: int
    largest: int
    read: Reader

    def fault(self, answer: Answer) -> str:
        """The first error in an answer's contents; empty if there is none."""
        try:
            got = self.read(answer)
        except Exception as error:  # whatever it stumbles over: a bad answer
            return f"unreadable answer: {type(error).__name__}: {error}"
        for name, expected in self.outputs.items():
            array = got.get(name)
            if array is None or array.shape != expected.shape:
                return f"output '{name}' is missing or has another shape"
            if not np.allclose(array, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return f"output '{name}' has wrong values"
        return ""


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """One way to put the same request: a column of the table."""

    name: str
    transport: str
    multiplexes: bool
    wire: Callable[[str, int], Wire]
    exchange: Callable[[str, str, Case], Exchange]

    def exchanges(self, host: str, model: Model) -> list[Exchange]:
        """The requests for a model, as often as it has cases."""
        return [self.exchange(host, model.name, case) for case in model.cases()]


def _http_json(host: str, model: str, case: Case) -> Exchange:
    inputs = [_declare(name, a) | {"data": a.ravel()} for name, a in case.inputs.items()]
    body = orjson.dumps({"inputs": inputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"Content-Type": "application/json"}
    elements = sum(array.size for array in case.outputs.values())
    return Exchange(
        build_request(host, f"/v2/models/{model}/infer", headers, body),
        case.outputs, 2 * elements, _JSON_NUMBER * elements + _OVERHEAD, _read_http,
    )  # fmt: skip


def _http_binary(host: str, model: str, case: Case) -> Exchange:
    inputs = [
        _declare(name, array) | {"parameters": {"binary_data_size": array.nbytes}}
        for name, array in case.inputs.items()
    ]
    document = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    body = document + b"".join(array.tobytes() for array in case.inputs.values())
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(document)),
    }
    request = build_request(host, f"/v2/models/{model}/infer", headers, body)
    return Exchange(request, case.outputs, *_raw_sizes(case), _read_http)


def _grpc(host: str, model: str, case: Case) -> Exchange:
    message = pb.ModelInferRequest(model_name=model)
    for name, array in case.inputs.items():
        message.inputs.add(name=name, datatype=_DATATYPES[array.dtype], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    framed = grpc_message(message.SerializeToString())
    return Exchange(framed, case.outputs, *_raw_sizes(case), _read_grpc)


def _declare(name: str, array: Array) -> dict[str, object]:
    return {"name": name, "datatype": _DATATYPES[array.dtype], "shape": list(array.shape)}


def _raw_sizes(case: Case) -> tuple[int, int]:
    size = sum(array.nbytes for array in case.outputs.values())
    return size, size + _OVERHEAD


def _read_http(answer: Answer) -> dict[str, Array]:
    size = header(answer.head, b"inference-header-content-length")
    end = len(answer.body) if size is None else int(size)
    arrays: dict[str, Array] = {}
    for item in orjson.loads(answer.body[:end])["outputs"]:
        dtype = _DTYPES[item["datatype"]]
        if "data" in item:
            array = np.array(item["data"], dtype)
        else:
            begin, end = end, end + item["parameters"]["binary_data_size"]
            array = np.frombuffer(answer.body[begin:end], dtype)
        arrays[item["name"]] = array.reshape(item["shape"])
    return arrays


def _read_grpc(answer: Answer) -> dict[str, Array]:
    message = pb.ModelInferResponse.FromString(answer.body)
    arrays: dict[str, Array] = {}
    for index, item in enumerate(message.outputs):
        dtype = _DTYPES[item.datatype]
        if message.raw_output_contents:
            array: Array = np.frombuffer(message.raw_output_contents[index], dtype)
        else:
            contents = item.contents
            array = np.array(contents.fp32_contents or contents.int_contents, dtype)
        arrays[item.name] = array.reshape(tuple(item.shape))
    return arrays


def _grpc_wire(host: str, calls: int) -> Wire:
    return GrpcWire(host, "/inference.GRPCInferenceService/ModelInfer", calls)


def _http_wire(host: str, calls: int) -> Wire:
    return HttpWire()


PROTOCOLS: Mapping[str, WireProtocol] = {
    protocol.name: protocol
    for protocol in (
        WireProtocol("http-json", "http", False, _http_wire, _http_json),
        WireProtocol("http-binary", "http", False, _http_wire, _http_binary),
        WireProtocol("grpc", "grpc", True, _grpc_wire, _grpc),
    )
}
