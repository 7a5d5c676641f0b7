"""Inference over HTTP: JSON, binary tensors, raw bodies, compression.

The cases of each class are in `tests/protocol`.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.support.http_socket import HttpSocket, RawAnswer, ask, request
from tests.support.server_process import ServerProcess

_SIZE = "Inference_Header_Content_Length"
_ROW = np.arange(4, dtype=np.int32)
_COUNTED = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [0, 1, 2, 3]}
_Change = Callable[[bytes], bytes]
_PACK: dict[str, _Change] = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}
_UNPACK: dict[str | None, _Change] = {
    "gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes,
}  # fmt: skip


def _request(data: object, shape: object, datatype: object = "FP32", **more: object) -> object:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": shape, "data": data}
    return {"inputs": [tensor], **more}


def _binary(size: int, **more: object) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4]}
    return {"inputs": [tensor | {"parameters": {"binary_data_size": size}}], **more}


def _post(server: ServerProcess, model: str, document: object, **headers: str) -> RawAnswer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return ask(server.http, "POST", f"/v2/models/{model}/infer", body, **headers)


def _send(server: ServerProcess, document: object, tail: bytes, **headers: str) -> RawAnswer:
    head = json.dumps(document).encode()
    return _post(server, "convert", head + tail, **{_SIZE: str(len(head)), **headers})


def _parts(answer: RawAnswer) -> tuple[dict[str, Any], bytes]:
    """The JSON of a binary answer, and the bytes after it."""
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    document: dict[str, Any] = json.loads(answer.body[:size])
    return document, answer.body[size:]


def _data(answer: RawAnswer) -> object:
    return answer.document["outputs"][0]["data"]


# --- JSON


def test_the_exact_text_of_an_answer(server: ServerProcess) -> None:
    answer = _post(server, "row_sum", _request([1, 2], [1, 2], id="7"))
    assert answer.body == (
        b'{"id":"7","model_name":"row_sum","model_version":"1","outputs":'
        b'[{"name":"OUTPUT0","datatype":"FP32","shape":[1,1],"data":[3.0]}]}'
    )
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None
    assert answer.headers["content-encoding"] is None
    assert answer.headers["server-timing"].startswith("queue;dur=")


def test_null_members_and_special_numbers(server: ServerProcess) -> None:
    nothing = {"id": None, "parameters": None, "outputs": None}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    answer = _post(server, "identity_FP32", {"inputs": [tensor | {"parameters": None}]} | nothing)
    assert _data(answer) == [1.0]
    assert list(answer.document) == ["model_name", "model_version", "outputs"]
    numbers = _request([1.5, float("nan"), float("-inf")], [1, 3], id="Inf or NaN")
    answer = _post(server, "identity_FP32", numbers)
    assert b'"data":[1.5,NaN,-Infinity]' in answer.body
    assert answer.document["id"] == "Inf or NaN"


@pytest.mark.parametrize(("document", "text"), [
    (b"{", "failed to parse the request JSON buffer"),
    (b'{"x":[' + b"{}," * 4_000_000 + b"{}]}", "at most 4000000 are allowed"),
    (_request([1], [1, 1], id=7), "Unable to parse 'id': expected a string, got an integer"),
    (_request([1], [1, 2]), "Failed to parse 'data' field: shape does not match true shape"),
    (_request([1], [[0], 250_000_000]), "Unable to parse 'shape' of input 'INPUT0'"),
    (_request(["1"], [1, 1]), "of datatype FP32 takes numbers, but its data holds a string"),
    (_request([10**400], [1, 1]), ""),
    (json.dumps(_request([7], [1, 1], id="NaN")).replace("7", "1e400").encode(), "is infinity"),
    (_request([1], [1, 1], parameters={"x": [1]}), "parameter 'x' has invalid type"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_requests_that_are_refused(server: ServerProcess, document: object, text: str) -> None:
    answer = _post(server, "identity_FP32", document)
    assert answer.status == 400
    assert text in answer.error
    assert len(answer.body) < 1000


def test_names_with_half_surrogates(server: ServerProcess) -> None:
    """JSON can escape half a surrogate pair, also beside NaN."""
    for place in ("id", "input", "output", "parameter"):
        bad = {place: "\ud800"}
        document: Any = _request([float("nan")], [1, 1], id=bad.get("id", "x"))
        document["inputs"][0]["name"] = bad.get("input", "INPUT0")
        document["outputs"] = [{"name": bad.get("output", "OUTPUT0")}]
        document["parameters"] = {bad.get("parameter", "x"): 1}
        answer = _post(server, "identity_FP32", document)
        assert answer.status == 400
        assert "failed to parse the request JSON buffer" in answer.error


def test_content_type_of_the_request_does_not_matter(server: ServerProcess) -> None:
    for content_type in ("application/json", "text/plain", "application/octet-stream"):
        answer = _post(server, "row_sum", _request([1, 2], [1, 2]), Content_Type=content_type)
        assert _data(answer) == [3.0]


# --- binary tensors


def test_binary_on_one_side_alone(server: ServerProcess) -> None:
    answer = _send(server, _binary(16), _ROW.tobytes())
    outputs = {item["name"]: item["data"] for item in answer.document["outputs"]}
    assert outputs == {"FP32": [0, 1, 2, 3], "INT64": [0, 1, 2, 3], "BYTES": ["0", "1", "2", "3"]}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None
    document = {"inputs": [_COUNTED], "parameters": {"binary_data_output": True}}
    head, tail = _parts(_post(server, "convert", document))
    assert [item["parameters"] for item in head["outputs"]] == [
        {"binary_data_size": 16}, {"binary_data_size": 32}, {"binary_data_size": 20},
    ]  # fmt: skip
    assert not any("data" in item for item in head["outputs"])
    assert tail[:16] == _ROW.astype(np.float32).tobytes()
    assert tail[16:48] == _ROW.astype(np.int64).tobytes()
    assert tail[48:] == b"".join(b"\x01\x00\x00\x00%d" % n for n in range(4))


def test_outputs_without_data_or_json(server: ServerProcess) -> None:
    """Without data after the JSON there is no length header; each output has a size of 0."""
    document = _request([], [0, 4], "INT32", parameters={"binary_data_output": True})
    answer = _post(server, "convert", document)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None
    assert [i["parameters"] for i in answer.document["outputs"]] == [{"binary_data_size": 0}] * 3
    tensor = {"name": "INPUT0", "datatype": "FP16", "shape": [1, 2]}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": 4}}]}).encode()
    sized = {_SIZE: str(len(head))}
    answer = _post(server, "identity_FP16", head + b"\x00\x3c\x00\x00", **sized)
    assert answer.status == 400
    assert answer.error.startswith("sending FP16 data via JSON is not supported. Please use the")


@pytest.mark.parametrize("elements", [10_000, 70_000, 1_000_000])
def test_large_bodies_among_small_ones(server: ServerProcess, elements: int) -> None:
    """Bodies of three sizes are received in three ways; nothing else may change."""
    data = np.arange(elements, dtype=np.float32).tobytes()
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, elements]}
    document = {
        "inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    sized = {_SIZE: str(len(head))}
    large = request("POST", "/v2/models/identity_FP32/infer", head + data, **sized)
    wrong = request("POST", "/v2/models/nope/infer", head + data, **sized)
    live = request("GET", "/v2/health/live")
    with HttpSocket(server.http) as connection:
        sender = Thread(target=connection.send, args=[(large + live + wrong + live) * 2])
        sender.start()
        for _ in range(2):
            answer = connection.receive()
            assert answer.status == 200
            assert _parts(answer)[1] == data
            assert connection.receive().document == {"live": True}
            assert connection.receive().status == 404
            assert connection.receive().document == {"live": True}
        sender.join()


def test_sizes_that_do_not_fit(server: ServerProcess) -> None:
    refused = (
        (_send(server, _binary(16), b"x" * 15), "expecting 1 additional bytes"),
        (_send(server, _binary(16), b"x" * 17), "unexpected additional input data for model"),
        (_send(server, _binary(12), b"x" * 12), "input byte size mismatch for input 'INPUT0'"),
        (_post(server, "convert", {}, **{_SIZE: "abc"}), "Unable to parse Inference-Header-Con"),
        (_post(server, "convert", {}, **{_SIZE: "3"}), "should be in range (0, 2), got: 3"),
    )
    for answer, text in refused:
        assert answer.status == 400
        assert text in answer.error


# --- raw bodies


def test_a_raw_body_is_one_row_of_the_only_input(server: ServerProcess) -> None:
    head, tail = _parts(_post(server, "convert", _ROW.tobytes(), **{_SIZE: "0"}))
    assert [item["shape"] for item in head["outputs"]] == [[1, 4]] * 3
    assert tail[:16] == _ROW.astype(np.float32).tobytes()
    head, tail = _parts(_post(server, "one_string", b"one string", **{_SIZE: "0"}))
    assert head["outputs"][0]["shape"] == [1, 1]
    assert tail == b"\x0a\x00\x00\x00one string"
    for model, body, text in (
        ("simple", b"x" * 64, "Raw request must only have 1 input (found 1) to be deduced but got"),
        ("convert", b"x" * 15, "[request id: <id_unknown>] input byte size mismatch for input"),
    ):
        answer = _post(server, model, body, **{_SIZE: "0"})
        assert answer.status == 400
        assert text in answer.error


# --- compression


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
def test_compressed_request(server: ServerProcess, encoding: str) -> None:
    """The length header counts JSON before compression; JSON and tensors are compressed as one."""
    head, pack = json.dumps(_binary(16)).encode(), _PACK[encoding.lower()]
    headers = {_SIZE: str(len(head)), "Content_Encoding": encoding}
    answer = _post(server, "convert", pack(head + _ROW.tobytes()), **headers)
    assert _data(answer) == [0, 1, 2, 3]
    headers[_SIZE] = "0"  # a raw body
    assert _parts(_post(server, "convert", pack(_ROW.tobytes()), **headers))[1][:4] == bytes(4)


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("gzip", "gzip"), ("gzip;q=0.5, deflate;q=0.9", "deflate"), ("br", None), ("gzip;q=0", None)],
)
def test_compressed_response(server: ServerProcess, accept: str, encoding: str | None) -> None:
    unpack = _UNPACK[encoding]
    document = _binary(16, parameters={"binary_data_output": True})
    answer = _send(server, document, _ROW.tobytes(), Accept_Encoding=accept)
    assert answer.headers["content-encoding"] == encoding
    body, size = unpack(answer.body), int(answer.headers["inference-header-content-length"])
    assert json.loads(body[:size])["model_name"] == "convert"
    assert body[size : size + 16] == _ROW.astype(np.float32).tobytes()
    answer = _post(server, "convert", {"inputs": [_COUNTED]}, Accept_Encoding=accept)
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(unpack(answer.body))["outputs"][0]["data"] == [0, 1, 2, 3]


def test_bodies_that_cannot_be_decompressed(server: ServerProcess) -> None:
    answer = _post(server, "convert", b"{}", Content_Encoding="br")
    assert answer.status == 501
    assert answer.error.startswith("Unsupported compression type")
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    for encoding in ("gzip", "deflate"):
        for packed in (b"", _PACK[encoding](json.dumps(_binary(16)).encode())[:-1]):
            answer = _post(server, "convert", packed, Content_Encoding=encoding)
            assert answer.status == 400
            assert encoding in answer.error


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_decompression_is_limited(server: ServerProcess, encoding: str) -> None:
    bomb = _PACK[encoding](bytes(200 << 20))
    assert len(bomb) < 1 << 20
    answer = _post(server, "convert", bomb, Content_Encoding=encoding)
    assert answer.status == 413
    assert "the decompressed request body exceeds the maximum allowed value" in answer.error
