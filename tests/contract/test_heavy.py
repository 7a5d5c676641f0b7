"""Requests that take long to decode or encode do not block others."""

import gzip
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.tensors import Array
from headrace.ipc.elements import split
from headrace.protocol.classification import MAX_CLASSES
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.protobuf_contents import MAX_FIELDS, varint
from tests.contract.repository import write_repository
from tests.models.python_models import IDENTITY, tensors, write_python_model
from tests.support.http_socket import HttpSocket, ask, request
from tests.support.raw_clients import SERVICE
from tests.support.server_process import ServerProcess, clean_server

pytestmark = pytest.mark.slow

_INFER = "/v2/models/{}/infer"
_COUNT = 3_000_000


@pytest.fixture(scope="module", params=["default", "frontends"])
def heavy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server without other requests."""
    root = tmp_path_factory.mktemp("heavy")
    write_repository(root)
    texts = tensors("input", ("INPUT0", "STRING", "-1"))
    texts += tensors("output", ("OUTPUT0", "STRING", "-1"))
    write_python_model(root, "worker", IDENTITY, "max_batch_size: 8\n" + texts)
    # One front end, so that a request and the health request beside it are in the same process.
    options = ("--frontends=1",) if request.param == "frontends" else ()
    with clean_server(root, options=options) as process:
        yield process


def _json(data: bytes, datatype: str, count: int, outputs: object = None) -> bytes:
    head = json.dumps({"outputs": outputs or []})[:-1].encode()
    return head + b',"inputs":[{"name":"INPUT0","datatype":"%b","shape":[1,%d],"data":[%b]}]}' % (
        datatype.encode(), count, data,
    )  # fmt: skip


def _binary(
    array: Array, outputs: object, headers: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, str]]:
    item = {
        "name": "INPUT0", "datatype": "FP32", "shape": array.shape,
        "parameters": {"binary_data_size": array.nbytes},
    }  # fmt: skip
    head = json.dumps({"inputs": [item], "outputs": outputs}).encode()
    return head + array.tobytes(), {
        "inference-header-content-length": str(len(head)), **(headers or {})
    }  # fmt: skip


_IN_BINARY = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
_NUMBERS = np.arange(_COUNT, dtype=np.float32).reshape(1, -1)


def _zeros() -> bytes:
    return _json(b",".join([b"0"] * _COUNT * 4), "FP32", _COUNT * 4, _IN_BINARY)


_HEAVY: dict[str, Callable[[], tuple[bytes, dict[str, str]]]] = {
    "zeros": lambda: (_zeros(), {}),
    "nested": lambda: (_json(b",".join([b"[0,1]"] * _COUNT), "FP32", 2 * _COUNT, _IN_BINARY), {}),
    "nan": lambda: (_json(b",".join([b"NaN"] * _COUNT), "FP32", _COUNT, _IN_BINARY), {}),
    "compressed": lambda: (gzip.compress(_zeros(), 1), {"content-encoding": "gzip"}),
    "answer": lambda: _binary(_NUMBERS, [{"name": "OUTPUT0"}]),
    "compressed answer": lambda: _binary(_NUMBERS, _IN_BINARY, {"accept-encoding": "gzip"}),
}


@pytest.mark.parametrize("kind", list(_HEAVY))
def test_health_is_answered_before_a_heavy_request(heavy: ServerProcess, kind: str) -> None:
    body, headers = _HEAVY[kind]()
    with HttpSocket(heavy.http, 60) as one, HttpSocket(heavy.http) as other:
        one.send(request("POST", _INFER.format("identity_FP32"), body, **headers))
        # The first may be answered before the last of the body is read; the others are not.
        for _ in range(5):
            assert other.ask("GET", "/v2/health/live").status == 200
            assert not one.readable()
        assert one.receive().status == 200


def test_a_pipelined_request_is_answered_behind_a_heavy_one(heavy: ServerProcess) -> None:
    body = _zeros()
    path = _INFER.format("identity_FP32")
    with HttpSocket(heavy.http, 60) as socket:
        small = _json(b"7", "FP32", 1)
        socket.send(request("POST", path, body) + request("POST", path, small))
        assert socket.receive().headers["inference-header-content-length"] is not None
        assert socket.receive().document["outputs"][0]["data"] == [7.0]


def test_a_heavy_request_of_a_disconnected_client(heavy: ServerProcess) -> None:
    """Its charges are released; `clean_server` asserts that no bug was logged."""
    body = _zeros()
    with HttpSocket(heavy.http) as socket:
        socket.send(request("POST", _INFER.format("identity_FP32"), body))
    small = _json(b"7", "FP32", 1)
    assert ask(heavy.http, "POST", _INFER.format("identity_FP32"), small).status == 200


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"parameters": {str(n): n for n in range(1025)}}, "may have 1024 parameters, got 1025"),
        ({"outputs": [{"name": "OUTPUT0", "parameters": {"classification": MAX_CLASSES + 1}}]},
         f"must be at most {MAX_CLASSES}"),
    ],
)  # fmt: skip
def test_decoding_limits_over_http(
    heavy: ServerProcess, parameters: dict[str, object], text: str
) -> None:
    document = json.loads(_json(b"7", "FP32", 1)) | parameters
    answer = ask(heavy.http, "POST", _INFER.format("identity_FP32"), json.dumps(document).encode())
    assert answer.status == 400
    assert text in answer.error


def _call(server: ServerProcess, message: bytes, packed: bool = False) -> pb.ModelInferResponse:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        infer: Any = channel.unary_unary(f"{SERVICE}/ModelInfer")
        compression = grpc.Compression.Gzip if packed else None
        return pb.ModelInferResponse.FromString(infer(message, 60, compression=compression))


def _typed(datatype: str, field: int, packed: bytes, count: int) -> bytes:
    contents = bytes([field << 3 | 2]) + varint(len(packed)) + packed
    head = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype, shape=[1, count])
    item = head.SerializeToString() + b"\x2a" + varint(len(contents)) + contents
    model = pb.ModelInferRequest(model_name=f"identity_{datatype}").SerializeToString()
    return model + b"\x2a" + varint(len(item)) + item


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_large_typed_contents(heavy: ServerProcess, packed: bool) -> None:
    found = _call(heavy, _typed("FP32", 6, _NUMBERS.tobytes(), _COUNT), packed)
    assert found.raw_output_contents[0] == _NUMBERS.tobytes()
    found = _call(heavy, _typed("INT64", 3, b"\x05" * _COUNT, _COUNT), packed)
    assert found.raw_output_contents[0] == struct.pack("<q", 5) * _COUNT


_WORDS = [b"", b"a", "ä€".encode(), b"seven!!"] * 250_000


@pytest.mark.parametrize("model", ["identity_BYTES", "worker"])
def test_a_million_strings(heavy: ServerProcess, model: str) -> None:
    """Through each door, to a worker, and back."""
    message = pb.ModelInferRequest(model_name=model)
    given = message.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, len(_WORDS)])
    given.contents.bytes_contents.extend(_WORDS)
    [raw] = _call(heavy, message.SerializeToString()).raw_output_contents
    assert split(raw, len(_WORDS)) == _WORDS
    given.ClearField("contents")
    message.raw_input_contents.append(raw)
    assert _call(heavy, message.SerializeToString()).raw_output_contents[0] == raw
    message.raw_input_contents[0] = raw[:-1] + b"\xff"  # an invalid one
    if model == "identity_BYTES":
        with pytest.raises(grpc.RpcError, match="holds an element that is not UTF-8"):
            _call(heavy, message.SerializeToString())
    texts = [word.decode() for word in _WORDS]
    body = _json(json.dumps(texts)[1:-1].encode(), "BYTES", len(texts))
    answer = ask(heavy.http, "POST", _INFER.format(model), body)
    assert answer.document["outputs"][0]["data"] == texts


def test_a_tensor_of_one_value_is_accepted(heavy: ServerProcess) -> None:
    message = pb.ModelInferRequest(model_name="identity_FP32")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 8_000_000])
    message.raw_input_contents.append(bytes(32_000_000))
    found = _call(heavy, message.SerializeToString(), packed=True)
    assert found.raw_output_contents[0] == bytes(32_000_000)


def _map_entries(count: int) -> bytes:
    entry = b"\x22\x07\x0a\x01a\x12\x02\x10\x01"
    item = b"\x0a\x06INPUT0\x12\x04FP32\x1a\x02\x01\x01" + entry * count
    return b"\x0a\x0didentity_FP32\x2a" + varint(len(item)) + item


@pytest.mark.parametrize(("message", "text"), [
    (_map_entries(500_000), f"may have {MAX_FIELDS} fields"),
    (_typed("INT64", 3, b"\x01" * 20_000_000, 20_000_000), "bytes once it is decoded"),
    (_typed("FP32", 3, b"\x01" * 1_000_000, 1_000_000), "expected fp32_contents"),
], ids=["map entries", "varints", "other contents"])  # fmt: skip
def test_decoding_limits_over_grpc(heavy: ServerProcess, message: bytes, text: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _call(heavy, message)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in str(raised.value.details())


def test_a_stream_keeps_its_order_behind_a_heavy_message(heavy: ServerProcess) -> None:
    big = _typed("FP32", 6, _NUMBERS.tobytes(), _COUNT) + b"\x1a\x03big"
    small = pb.ModelInferRequest(model_name="identity_FP32", id="small")
    small.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    small.raw_input_contents.append(bytes(4))
    options = [("grpc.max_receive_message_length", -1)]
    for compression in (None, grpc.Compression.Gzip):
        with grpc.insecure_channel(heavy.grpc, options=options) as channel:
            stream: Any = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
            messages = [big, small.SerializeToString()] * 3
            answers = stream(iter(messages), 60, compression=compression)
            found = [pb.ModelStreamInferResponse.FromString(data) for data in answers]
        assert [f.infer_response.id for f in found] == ["big", "small"] * 3
        assert found[0].infer_response.raw_output_contents[0] == _NUMBERS.tobytes()


def test_classes_of_many_elements(heavy: ServerProcess) -> None:
    count = 1_000_000
    wanted = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    body, headers = _binary(np.arange(count, dtype=np.float32).reshape(1, -1), wanted)
    answer = ask(heavy.http, "POST", _INFER.format("identity_FP32"), body, **headers)
    assert answer.document["outputs"][0]["data"] == ["999999.000000:999999", "999998.000000:999998"]


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_large_generate_request(heavy: ServerProcess, datatype: str) -> None:
    """Front ends forward it undecoded to the engine."""
    values: list[object] = [1.5, 2.0] if datatype == "FP32" else ["a", "b"]
    body = json.dumps({"INPUT0": values * 300_000}).encode()
    with HttpSocket(heavy.http, 60) as one, HttpSocket(heavy.http) as other:
        one.send(request("POST", f"/v2/models/identity_{datatype}/generate", body))
        assert other.ask("GET", "/v2/health/live").status == 200
        answer = one.receive()
    assert answer.status == 200
    assert answer.document["OUTPUT0"] == values * 300_000


def test_large_requests_in_other_forms(heavy: ServerProcess) -> None:
    """The whole body is the one element of one row."""
    headers = {"inference-header-content-length": "0"}
    answer = ask(heavy.http, "POST", _INFER.format("one_string"), b"a" * 1_000_000, **headers)
    assert answer.status == 200
    assert answer.body.endswith(struct.pack("<I", 1_000_000) + b"a" * 1_000_000)
    body = json.dumps({"INPUT0": [1.5] * 300_000 + ["a"]}).encode()
    answer = ask(heavy.http, "POST", "/v2/models/identity_FP32/generate", body)
    assert answer.status == 400
    assert "takes numbers" in answer.error
