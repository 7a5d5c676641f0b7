"""HTTP alone: paths and methods, framing, and reuse of connections."""

import json
import re
from urllib.parse import quote

import pytest

from headrace import __version__
from tests.support.http_socket import HttpSocket, RawAnswer, ask, request
from tests.support.server_process import ServerProcess

_INFER = "/v2/models/row_sum/infer"
_GOOD = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
_SPACED = "spaced out \u00fc+%"


def _is_sum(answer: RawAnswer) -> bool:
    return bool(answer.document["outputs"][0]["data"] == [3.0])


# --- routes


def test_documents(server: ServerProcess) -> None:
    for path in ("/v2", "/v2/", "/v2?x=1"):
        answer = ask(server.http, "GET", path)
        assert answer.document["name"] == "headrace"
        assert answer.headers["content-type"] == "application/json"
    assert ask(server.http, "GET", "/v2/health/live").document == {"live": True}
    assert ask(server.http, "GET", "/v2/health/ready").document == {"ready": True}
    for path in ("/v2/models/simple/ready", "/v2/models/simple/versions/1/ready"):
        assert ask(server.http, "GET", path).document == {"name": "simple", "ready": True}
    assert _is_sum(ask(server.http, "POST", f"{_INFER}?verbose=1&x=/infer", _GOOD))
    answer = ask(server.http, "GET", "/v2/models/nope/ready")
    assert answer.status == 503
    assert json.loads(answer.body) == {
        "name": "nope", "ready": False, "error": "Model version not ready",
        "reason": "Request for unknown model: 'nope' is not found",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2"), ("DELETE", "/v2/models/simple"), ("GET", _INFER), ("OPTIONS", _INFER),
        ("GET", "/v2/repository/index"), ("HEAD", "/v2"), ("HEAD", _INFER),
    ],
)  # fmt: skip
def test_wrong_method(server: ServerProcess, method: str, path: str) -> None:
    answer = ask(server.http, method, path)
    assert answer.status == 405
    assert method == "HEAD" or answer.error.startswith("Method Not Allowed: this path takes ")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v3"), ("GET", "/V2"), ("GET", "/v2/health/live/"),
        ("GET", "/v2/models/simple/versions/-1/config"),
        ("GET", "/v2/models/simple/versions/1/trace/setting"), ("POST", "/v2/models//infer"),
        ("POST", "/v2/models/simple/infer/"), ("POST", "/v2/models/simple/versions/1.0/infer"),
        ("POST", "/v2/models/simple/more/infer"), ("GET", "/v2/models/../../etc/passwd"),
    ],
)  # fmt: skip
def test_no_such_route(server: ServerProcess, method: str, path: str) -> None:
    answer = ask(server.http, method, path)
    assert answer.status == 404
    assert answer.error.startswith("Not Found: /docs describes all paths")


def test_a_404_names_the_nearest_route(server: ServerProcess) -> None:
    answer = ask(server.http, "POST", "/models/simple/predict")
    text = "Not Found: /docs describes all paths; did you mean /v2/models/simple/infer?"
    assert (answer.status, answer.error) == (404, text)
    answer = ask(server.http, "GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = answer.body.decode()
    assert f"headrace <small>{__version__}</small>" in page
    links = re.findall(r"<a href=([^'\s]+?)>", page)
    assert "docs" in links
    assert {ask(server.http, "GET", f"/{link}").status for link in links} == {200}


@pytest.mark.parametrize(("method", "ending"), [("GET", "/ready"), ("POST", "/infer")])
def test_a_version_of_thousands_of_digits(server: ServerProcess, method: str, ending: str) -> None:
    path = f"/v2/models/simple/versions/{'9' * 5_000}{ending}"
    answer = ask(server.http, method, path, _GOOD if method == "POST" else b"")
    assert answer.status == 400
    assert "version should be an integral value > 0" in answer.error


def test_names_are_decoded(server: ServerProcess) -> None:
    path = f"/v2/models/{quote(_SPACED)}"
    assert ask(server.http, "GET", path).document["name"] == _SPACED
    assert ask(server.http, "GET", f"{path}/ready").document["name"] == _SPACED
    assert ask(server.http, "GET", f"{path}/config").document["name"] == _SPACED
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    answer = ask(server.http, "POST", f"{path}/infer", json.dumps(body).encode())
    assert answer.document["model_name"] == _SPACED


def test_errors_are_json_everywhere(server: ServerProcess) -> None:
    """Clients look for the text only where the content type is exactly this."""
    for method, path in (
        ("GET", "/v2/models/nope"),
        ("GET", "/v2/models/nope/config"),
        ("GET", "/v2/models/nope/stats"),
        ("POST", "/v2/models/nope/infer"),
        ("POST", _INFER),
        ("POST", "/v2/repository/models/simple/load"),
        ("POST", "/v2/repository/somewhere/models/simple/unload"),
    ):
        answer = ask(server.http, method, path)
        assert answer.status >= 400
        assert answer.error


# --- documents


def test_config_as_json(server: ServerProcess) -> None:
    """Snake case, integers also for 64 bits, names of enum values, defaults written out."""
    config = ask(server.http, "GET", "/v2/models/spin_delay/config").document
    batching = config["dynamic_batching"]
    assert config["max_batch_size"] == 1
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["input"][0]["data_type"] == "TYPE_INT64"
    assert config["input"][0]["dims"] == [1]
    assert config["input"][0]["optional"] is False
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert config["instance_group"][0]["gpus"] == []
    assert config["parameters"] == {"execution": {"string_value": "thread"}}
    assert config["metric_tags"] == {}
    assert batching["preferred_batch_size"] == [1]
    assert batching["max_queue_delay_microseconds"] == 0
    assert batching["default_queue_policy"] == {
        "timeout_action": "DELAY", "default_timeout_microseconds": 60000000,
        "allow_timeout_override": True, "max_queue_size": 0,
    }  # fmt: skip
    assert "sequence_batching" not in config


def test_statistics_and_index_as_json(server: ServerProcess) -> None:
    ask(server.http, "POST", _INFER, _GOOD)
    for path in ("/v2/models/row_sum/stats", "/v2/models/row_sum/versions/1/stats"):
        [model] = ask(server.http, "GET", path).document["model_stats"]
        assert (model["name"], model["version"]) == ("row_sum", "1")
        assert type(model["last_inference"]) is int
        assert set(model["inference_stats"]) == {
            "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
            "cache_hit", "cache_miss",
        }  # fmt: skip
        assert model["inference_stats"]["cache_hit"] == {"count": 0, "ns": 0}
        assert set(model["batch_stats"][0]) == {
            "batch_size", "compute_input", "compute_infer", "compute_output",
        }  # fmt: skip
    for path in ("/v2/repository/index", "/v2/repository/any/index"):
        for body in (b"", b"{}", b'{"ready": false}', b'{"ready": true, "more": 1}'):
            models = json.loads(ask(server.http, "POST", path, body).body)
            assert {"name": "simple", "version": "1", "state": "READY"} in models


@pytest.mark.parametrize(("body", "status", "text"), [
    (b'{"ready": 1}', 400, "Invalid value for 'ready': expected a boolean"),
    (b"[]", 400, "the request must be a JSON object"),
    (b"{", 400, "failed to parse the request JSON buffer"),
    (b" " * 2_000_000, 413, "the request body exceeds the maximum of 65536 bytes"),
])  # fmt: skip
def test_index_with_a_bad_body(server: ServerProcess, body: bytes, status: int, text: str) -> None:
    answer = ask(server.http, "POST", "/v2/repository/index", body)
    assert answer.status == status
    assert answer.error.startswith(text)


# --- connections


def test_bodies_in_chunks_and_on_demand(server: ServerProcess) -> None:
    pieces = [_GOOD[:1], _GOOD[1:40], _GOOD[40:]]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    head = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with HttpSocket(server.http) as connection:
        for part in (head, chunks, b"0\r\n\r\n"):
            connection.send(part)
        assert _is_sum(connection.receive())
        assert _is_sum(connection.ask("POST", _INFER, _GOOD))
    with HttpSocket(server.http) as connection:
        length = str(len(_GOOD))
        asking = request("POST", _INFER, Expect="100-continue", Content_Length=length)
        connection.send(asking)
        assert connection.receive().status == 100
        connection.send(_GOOD)
        assert _is_sum(connection.receive())


_BAD_REQUESTS: list[tuple[bytes, int]] = [
    (request("POST", _INFER, b"{"), 400),
    (request("POST", _INFER, b"{}"), 400),
    (request("POST", "/v2/models/nope/infer", _GOOD), 404),
    (request("POST", "/v2/nothing", _GOOD), 404),
    (request("PUT", _INFER, _GOOD), 405),
    (request("POST", "/v2/health/live", _GOOD), 405),
    (request("POST", _INFER, _GOOD, Content_Encoding="br"), 501),
    (request("POST", _INFER, _GOOD, Content_Encoding="gzip"), 400),
    (request("POST", _INFER, _GOOD, Inference_Header_Content_Length="x"), 400),
    (request("POST", "/v2/repository/models/simple/load", b"{}"), 503),
]


def test_a_connection_survives_errors(server: ServerProcess) -> None:
    with HttpSocket(server.http) as connection:
        for bad, status in _BAD_REQUESTS:
            connection.send(bad)
            assert connection.receive().status == status
            assert _is_sum(connection.ask("POST", _INFER, _GOOD))


def test_pipelined_requests(server: ServerProcess) -> None:
    good = request("POST", _INFER, _GOOD)
    expected: list[int] = []
    data = b""
    for bad, status in _BAD_REQUESTS:
        data += good + bad
        expected += [200, status]
    with HttpSocket(server.http) as connection:
        connection.send(data)
        assert [connection.receive().status for _ in expected] == expected


def test_pipelined_requests_cut_anywhere(server: ServerProcess) -> None:
    """On both routes: partial heads and bodies, and answers in order."""
    other = request("GET", "/v2/health/live")
    data = b"".join([request("POST", _INFER, _GOOD), other, request("POST", _INFER, _GOOD)] * 3)
    expected = ["sum", "live", "sum"] * 3
    for size in (1, 3, 50, 100, 170, 200, 333, len(data)):
        with HttpSocket(server.http) as connection:
            for start in range(0, len(data), size):
                connection.send(data[start : start + size])
            answers = [connection.receive() for _ in expected]
        assert ["live" if "live" in a.document else "sum" for a in answers] == expected
        assert all(_is_sum(a) for a, kind in zip(answers, expected, strict=True) if kind == "sum")


def test_more_pipelined_requests_than_run_at_once(server: ServerProcess) -> None:
    count = 300
    bodies = [_GOOD.replace(b"[1, 2]}]", b"[1, %d]}]" % n) for n in range(count)]
    with HttpSocket(server.http) as connection:
        connection.send(b"".join(request("POST", _INFER, body) for body in bodies))
        for n in range(count):
            assert connection.receive().document["outputs"][0]["data"] == [1.0 + n]


def test_request_heads_that_differ_in_one_header(server: ServerProcess) -> None:
    """A remembered head must not stand for another one."""
    with HttpSocket(server.http) as connection:
        for encoding in ("identity", "gzip", "identity", "deflate", "gzip"):
            answer = connection.ask("POST", _INFER, _GOOD, Accept_Encoding=encoding)
            found = answer.headers["content-encoding"]
            assert (found or "identity") == encoding


@pytest.mark.parametrize("token", ["h2c", "websocket"])
@pytest.mark.parametrize("path", [_INFER, "/v2/repository/index"])
def test_a_request_to_upgrade_is_ignored(server: ServerProcess, token: str, path: str) -> None:
    """Java's client sends one with every request."""
    body = _GOOD if path == _INFER else b"{}"
    data = request(
        "POST", path, body,
        Connection="Upgrade, HTTP2-Settings", Upgrade=token, HTTP2_Settings="AAEAAEAA",
    )  # fmt: skip
    with HttpSocket(server.http) as connection:
        for _ in range(2):
            connection.send(data)
            assert connection.receive().status == 200
        head = len(data) - len(body)
        connection.send(data[:head])
        connection.send(data[head:])
        assert connection.receive().status == 200


def test_a_split_request_to_upgrade_hides_no_other_request(server: ServerProcess) -> None:
    inner = request("GET", "/v2/health/live")
    data = request("POST", _INFER, inner, Connection="Upgrade", Upgrade="h2c")
    with HttpSocket(server.http) as connection:
        connection.send(inner + data[:40])
        assert connection.receive().status == 200  # so the first piece has been read
        connection.send(data[40:])
        assert connection.receive().status == 400
        assert connection.at_end()


def test_connection_close_is_honoured(server: ServerProcess) -> None:
    with HttpSocket(server.http) as connection:
        assert _is_sum(connection.ask("POST", _INFER, _GOOD, Connection="close"))
        assert connection.at_end()


@pytest.mark.parametrize("data", [
    b"nonsense\r\n\r\n", b"POST /v2 HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,  # a TLS handshake
])  # fmt: skip
def test_invalid_http(server: ServerProcess, data: bytes) -> None:
    with HttpSocket(server.http) as connection:
        connection.send(data)
        answer = connection.receive()
        assert (answer.status, answer.error) == (400, "Invalid HTTP request received.")
        assert connection.at_end()
    assert ask(server.http, "GET", "/v2/health/live").status == 200


def test_odd_content_lengths(server: ServerProcess) -> None:
    with HttpSocket(server.http) as connection:
        # As much as the parser accepts; more is invalid HTTP.
        head = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**64 - 1}\r\n\r\n"
        connection.send(head.encode() + b"hello")
        answer = connection.receive()
        assert answer.status == 400
        assert "Content-Length must be a number of bytes" in answer.error
        assert connection.at_end()
    with HttpSocket(server.http) as connection:
        head = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nContent-Length:  {len(_GOOD)} \t \r\n\r\n"
        connection.send(head.encode() + _GOOD)
        assert _is_sum(connection.receive())


def test_trailers_are_read_and_dropped(server: ServerProcess) -> None:
    head = f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b"%x\r\n%b\r\n0\r\n" % (len(_GOOD), _GOOD)
    with HttpSocket(server.http) as connection:
        connection.send(head + body + b"X-Digest: 1\r\n\r\n")
        assert _is_sum(connection.receive())
        # The body is complete and is answered; further bytes are ignored.
        connection.send(head + body + b"X-Digest: 1\r\n" * 10_000 + b"\r\n")
        answers = [connection.receive()]
        if answers[0].status == 200:  # it was sent before the trailers
            answers.append(connection.receive())
        assert answers[-1].status == 400
        assert connection.at_end()
    assert ask(server.http, "GET", "/v2/health/live").status == 200


# --- limits


def test_too_large_a_body(narrow: ServerProcess) -> None:
    answer = ask(narrow.http, "POST", "/v2/models/identity/infer", b" " * 5000)
    assert answer.status == 413
    assert answer.error == (
        "the request body (5000 bytes) exceeds the maximum allowed value of 4096 bytes."
        " Use --max-request-bytes to increase the limit"
    )
    # It is refused before it is sent.
    with HttpSocket(narrow.http) as connection:
        connection.send(request("POST", "/v2/models/identity/infer", Content_Length=str(10 << 30)))
        assert connection.receive().status == 413
        assert connection.at_end()
    # In chunks.
    with HttpSocket(narrow.http) as connection:
        connection.send(
            b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        connection.send(b"1388\r\n" + b" " * 5000 + b"\r\n")
        answer = connection.receive()
    assert answer.status == 413
    assert "--max-request-bytes" in answer.error
