"""Inference over HTTP with binary tensors, as a raw body, and compressed."""

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


def _binary(size: int, **more: object) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4]}
    return {"inputs": [tensor | {"parameters": {"binary_data_size": size}}], **more}


def _post(server: ServerProcess, model: str, body: bytes, **headers: str) -> RawAnswer:
    return ask(server.http, "POST", f"/v2/models/{model}/infer", body, **headers)


def _send(
    server: ServerProcess, document: object, tail: bytes, model: str = "convert", **headers: str
) -> RawAnswer:
    head = json.dumps(document).encode()
    return _post(server, model, head + tail, **{_SIZE: str(len(head)), **headers})


def _parts(answer: RawAnswer) -> tuple[dict[str, Any], bytes]:
    """The JSON of a binary answer, and what follows it."""
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    document: dict[str, Any] = json.loads(answer.body[:size])
    return document, answer.body[size:]


# --- binary tensors


def test_binary_in_json_out(server: ServerProcess) -> None:
    answer = _send(server, _binary(16), _ROW.tobytes())
    outputs = {item["name"]: item["data"] for item in answer.document["outputs"]}
    assert outputs == {"FP32": [0, 1, 2, 3], "INT64": [0, 1, 2, 3], "BYTES": ["0", "1", "2", "3"]}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None


@pytest.mark.parametrize("elements", [10_000, 70_000, 1_000_000])
def test_large_bodies_among_small_ones(server: ServerProcess, elements: int) -> None:
    """Bodies of three sizes come in three ways from the socket; nothing else may change."""
    data = np.arange(elements, dtype=np.float32).tobytes()
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, elements]}
    head = json.dumps(
        {
            "inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    path = "/v2/models/identity_FP32/infer"
    large = request("POST", path, head + data, **{_SIZE: str(len(head))})
    wrong = request("POST", "/v2/models/nope/infer", head + data, **{_SIZE: str(len(head))})
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


def test_json_in_binary_out(server: ServerProcess) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [0, 1, 2, 3]}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head, tail = _parts(_post(server, "convert", json.dumps(document).encode()))
    assert [item["parameters"] for item in head["outputs"]] == [
        {"binary_data_size": 16}, {"binary_data_size": 32}, {"binary_data_size": 20},
    ]  # fmt: skip
    assert not any("data" in item for item in head["outputs"])
    assert tail[:16] == _ROW.astype(np.float32).tobytes()
    assert tail[16:48] == _ROW.astype(np.int64).tobytes()
    assert tail[48:] == b"".join(b"\x01\x00\x00\x00%d" % n for n in range(4))


def test_each_output_as_it_was_asked_for(server: ServerProcess) -> None:
    """`binary_data_output` is for outputs that are not named; a named one is JSON by default."""
    wanted = [{"name": "FP32"}, {"name": "INT64", "parameters": {"binary_data": True}}]
    document = _binary(16, outputs=wanted, parameters={"binary_data_output": True})
    head, tail = _parts(_send(server, document, _ROW.tobytes()))
    outputs = {item["name"]: item for item in head["outputs"]}
    assert set(outputs) == {"FP32", "INT64"}
    assert outputs["FP32"]["data"] == [0, 1, 2, 3]
    assert outputs["INT64"]["parameters"] == {"binary_data_size": 32}
    assert tail == _ROW.astype(np.int64).tobytes()


def test_json_and_binary_inputs_together(server: ServerProcess) -> None:
    ones = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
    rest = {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16]}
    document = {"inputs": [ones, rest | {"parameters": {"binary_data_size": 64}}]}
    tail = np.arange(16, dtype=np.int32).tobytes()
    answer = _send(server, document, tail, model="simple")
    assert answer.document["outputs"][0]["data"] == list(range(1, 17))


def test_empty_binary_output(server: ServerProcess) -> None:
    """Nothing follows the JSON, so there is no length header; yet each output has a size of 0."""
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [0, 4], "data": []}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    answer = _post(server, "convert", json.dumps(document).encode())
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["inference-header-content-length"] is None
    for item in answer.document["outputs"]:
        assert item["parameters"] == {"binary_data_size": 0}
        assert item["shape"] == [0, 4]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_json(server: ServerProcess, datatype: str) -> None:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, 2]}
    document = {"inputs": [tensor | {"parameters": {"binary_data_size": 4}}]}
    answer = _send(server, document, b"\x00\x3c\x00\x00", model=f"identity_{datatype}")
    assert answer.status == 400
    assert answer.error.startswith(
        f"sending {datatype} data via JSON is not supported."
        " Please use the binary data format for output"
    )


def test_the_header_may_cover_the_whole_body(server: ServerProcess) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [0, 1, 2, 3]}
    assert _send(server, {"inputs": [tensor]}, b"").status == 200


@pytest.mark.parametrize(
    ("size", "tail", "text"),
    [
        (16, b"x" * 15, "unexpected size for input 'INPUT0', expecting 1 additional bytes"),
        (16, b"", "unexpected size for input 'INPUT0', expecting 16 additional bytes"),
        (16, b"x" * 17, "unexpected additional input data for model 'convert'"),
        (12, b"x" * 12, "input byte size mismatch for input 'INPUT0'"),
        (20, b"x" * 20, "input byte size mismatch for input 'INPUT0'"),
        (0, b"", "input byte size mismatch for input 'INPUT0'"),
        (-1, b"", "'binary_data_size' of input 'INPUT0' must be a non-negative integer"),
        (1.5, b"", "'binary_data_size' of input 'INPUT0' must be a non-negative integer"),
        ("16", b"", "'binary_data_size' of input 'INPUT0' must be a non-negative integer"),
        (True, b"x", "'binary_data_size' of input 'INPUT0' must be a non-negative integer"),
        (2**30, b"", "unexpected size for input 'INPUT0', expecting"),
    ],
)
def test_sizes_that_do_not_fit(server: ServerProcess, size: Any, tail: bytes, text: str) -> None:
    answer = _send(server, _binary(size), tail)
    assert answer.status == 400
    assert text in answer.error


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"\x01\x00\x00\x00a\x01\x00\x00", "incomplete string length indicator"),
        (b"\x01\x00\x00\x00a\x05\x00\x00\x00b", "incomplete string data"),
        (b"\x01\x00\x00\x00a\xff\xff\xff\xff", "incomplete string data"),
        (b"\x05\x00\x00\x00abcde", "expected 2 string elements"),
        (b"\x00\x00\x00\x00" * 3, "unexpected number of string elements 3"),
        (b"\x01\x00\x00", "expected 2 string elements"),
    ],
)
def test_strings_that_do_not_fit(server: ServerProcess, tail: bytes, text: str) -> None:
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 2]}
    document = {"inputs": [tensor | {"parameters": {"binary_data_size": len(tail)}}]}
    answer = _send(server, document, tail, model="identity_BYTES")
    assert answer.status == 400
    assert text in answer.error
    assert "'INPUT0'" in answer.error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        ("1.5", "Unable to parse Inference-Header-Content-Length"),
        ("", "Unable to parse Inference-Header-Content-Length"),
        ("99999999999", "Unable to parse Inference-Header-Content-Length"),
        ("3", "inference header size should be in range (0, 2), got: 3"),
        ("-1", "inference header size should be in range (0, 2), got: -1"),
    ],
)
def test_length_headers_that_do_not_fit(server: ServerProcess, value: str, text: str) -> None:
    answer = _post(server, "convert", b"{}", **{_SIZE: value})
    assert answer.status == 400
    assert answer.error.startswith(text)


# --- raw bodies


def test_raw_body(server: ServerProcess) -> None:
    """One row of the only input; everything comes back in binary form."""
    head, tail = _parts(_post(server, "convert", _ROW.tobytes(), **{_SIZE: "0"}))
    assert [item["shape"] for item in head["outputs"]] == [[1, 4]] * 3
    assert tail[:16] == _ROW.astype(np.float32).tobytes()


@pytest.mark.parametrize("length", [0, 1, 5])
def test_raw_body_of_a_variable_size(server: ServerProcess, length: int) -> None:
    raw = np.arange(length, dtype=np.float32).tobytes()
    answer = _post(server, "identity_FP32", raw, **{_SIZE: "0"})
    assert answer.status == 200
    document = json.loads(answer.body.removesuffix(raw))
    assert document["outputs"][0]["shape"] == [1, length]
    assert answer.body.endswith(raw)


def test_raw_body_of_a_string(server: ServerProcess) -> None:
    """The body is the element; the server adds its length."""
    head, tail = _parts(_post(server, "one_string", b"one string", **{_SIZE: "0"}))
    assert head["outputs"][0]["shape"] == [1, 1]
    assert tail == b"\x0a\x00\x00\x00one string"


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        ("simple", b"x" * 64,
         "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple'"
         " model configuration"),
        ("two_unknown", b"x" * 16,
         "can not be deduced because there are more than one variable-sized dimension"),
        ("identity_BYTES", b"any",
         "For BYTE datatype raw input 'INPUT0', the model must have input shape [1], not [-1]"),
        ("convert", b"x" * 15, "[request id: <id_unknown>] input byte size mismatch for input"
         " 'INPUT0' for model 'convert'. Expected 16, got 15"),
        ("convert", b"", "input byte size mismatch for input 'INPUT0' for model 'convert'"),
        ("identity_FP32", b"x" * 7, "input byte size mismatch for input 'INPUT0'"),
    ],
)  # fmt: skip
def test_raw_bodies_that_do_not_fit(
    server: ServerProcess, model: str, body: bytes, text: str
) -> None:
    answer = _post(server, model, body, **{_SIZE: "0"})
    assert answer.status == 400
    assert text in answer.error


# --- compression

Change = Callable[[bytes], bytes]
_PACK: dict[str, Change] = {"gzip": gzip.compress, "deflate": zlib.compress}
_UNPACK: dict[str, Change] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
def test_compressed_request(server: ServerProcess, encoding: str) -> None:
    """The length header counts JSON before compression; JSON and tensors are compressed as one."""
    head = json.dumps(_binary(16)).encode()
    body = head + _ROW.tobytes()
    packed = _PACK[encoding.lower()](body) if encoding != "identity" else body
    headers = {_SIZE: str(len(head)), "Content_Encoding": encoding}
    answer = _post(server, "convert", packed, **headers)
    assert answer.document["outputs"][0]["data"] == [0, 1, 2, 3]


def test_compressed_raw_body(server: ServerProcess) -> None:
    packed = gzip.compress(_ROW.tobytes())
    answer = _post(server, "convert", packed, **{_SIZE: "0", "Content_Encoding": "gzip"})
    assert _parts(answer)[1][:16] == _ROW.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.9", "deflate"),
        ("br;q=1.0, gzip;q=0.1", "gzip"),
        ("gzip;q=0", None),
        ("identity;q=1, gzip;q=0.5", None),
        ("br", None),
        ("*", None),
        ("", None),
        ("gzip;q=nonsense", None),
    ],
)
def test_compressed_response(server: ServerProcess, accept: str, encoding: str | None) -> None:
    head = json.dumps(_binary(16, parameters={"binary_data_output": True})).encode()
    headers = {_SIZE: str(len(head)), "Accept_Encoding": accept}
    answer = _post(server, "convert", head + _ROW.tobytes(), **headers)
    assert answer.headers["content-encoding"] == encoding
    body = _UNPACK[encoding](answer.body) if encoding else answer.body
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(body[:size])["model_name"] == "convert"
    assert body[size : size + 16] == _ROW.astype(np.float32).tobytes()


def test_compressed_json_response(server: ServerProcess) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [0, 1, 2, 3]}
    body = json.dumps({"inputs": [tensor]}).encode()
    answer = _post(server, "convert", body, Accept_Encoding="gzip, deflate, br")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == [0, 1, 2, 3]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "nonsense"])
def test_unknown_encoding(server: ServerProcess, encoding: str) -> None:
    answer = _post(server, "convert", b"{}", Content_Encoding=encoding)
    assert answer.status == 501
    assert answer.error.startswith("Unsupported compression type")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: b"",
        lambda packed: b"{}",
        lambda packed: packed[:-1],
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:-6] + bytes(6),
    ],
    ids=["nothing", "not packed", "cut", "half", "wrong sum"],
)
def test_damaged_compression(server: ServerProcess, encoding: str, damage: Change) -> None:
    packed = damage(_PACK[encoding](json.dumps(_binary(16)).encode()))
    answer = _post(server, "convert", packed, Content_Encoding=encoding)
    assert answer.status == 400
    assert encoding in answer.error


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_small_body_cannot_become_a_large_one(server: ServerProcess, encoding: str) -> None:
    bomb = _PACK[encoding](bytes(200 << 20))
    assert len(bomb) < 1 << 20
    answer = _post(server, "convert", bomb, Content_Encoding=encoding)
    assert answer.status == 413
    assert "the decompressed request body exceeds the maximum allowed value" in answer.error


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_a_body_unpacks_to_has_a_limit(server: ServerProcess, encoding: str) -> None:
    sparse = np.zeros(70 << 20, np.uint8)
    sparse[::16] = np.random.default_rng(1).integers(0, 256, len(sparse) // 16)
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    answer = _post(server, "convert", pack(sparse.tobytes(), 1), Content_Encoding=encoding)
    assert answer.status == 413
    assert "decompressed request body" in answer.error
    assert "--max-request-bytes" in answer.error
