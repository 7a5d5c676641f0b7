"""Trace settings over both protocols, and the resulting trace files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, ServerError, Unsupported
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.support.client import Input
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.http_socket import HttpSocket, ask
from tests.support.http_socket import request as request_bytes
from tests.support.server_process import ServerProcess, clean_server
from tests.support.traces import Traced, grpc_settings, http_settings, read_traces

DEFAULTS: dict[str, Any] = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0",
    "trace_mode": "triton", "trace_file": "",
}  # fmt: skip
Settings = Callable[..., dict[str, Any]]
EVERY = ("--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=1")


SETTINGS = {"http": http_settings, "grpc": grpc_settings}
both = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "simple", add_sub(Datatype.INT32, 4), "max_batch_size: 8")
    write_model(root, "identity", identity(Datatype.FP32, ["rows", 3]), "max_batch_size: 8")
    return root


@both
def test_settings_of_a_server_that_traces_nothing(
    server: ServerProcess, settings: Settings
) -> None:
    assert settings(server) == settings(server, "simple") == DEFAULTS
    assert settings(server, trace_rate="5") == DEFAULTS | {"trace_rate": "5"}
    assert settings(server, "simple", log_frequency="3", trace_count="9") == DEFAULTS | {
        "trace_rate": "5", "log_frequency": "3", "trace_count": "9"
    }  # fmt: skip
    assert settings(server, trace_rate=None) == DEFAULTS
    assert settings(server, "simple", log_frequency=None, trace_count=None) == DEFAULTS


@both
@pytest.mark.parametrize(("change", "error", "text"), [
    ({"trace_file": "x"}, Unsupported, "trace file location can not be updated through net"),
    ({"trace_level": ["OFF", "TENSORS"]}, InvalidRequest, "Expect only one trace level 'OFF'"),
    ({"trace_rate": "x"}, InvalidRequest, "Unable to parse 'trace_rate', got: x"),
    ({"trace_count": "10000000000"}, InvalidRequest, "'trace_count', value is out of range"),
    ({"trace_nothing": "1"}, InvalidRequest, "unknown trace setting 'trace_nothing'"),
    ({"trace_level": ["TENSORS"]}, InvalidRequest, "trace setting :trace file name is not"),
])  # fmt: skip
def test_invalid_settings(
    server: ServerProcess,
    settings: Settings,
    change: dict[str, Any],
    error: type[ServerError],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        settings(server, "simple", **({"log_frequency": "3"} | change))
    assert settings(server, "simple") == DEFAULTS


@both
def test_unknown_models(server: ServerProcess, settings: Settings) -> None:
    for changes in ({}, {"trace_rate": "1"}):
        with pytest.raises(InvalidRequest, match="Request for unknown model : nope"):
            settings(server, "nope", **changes)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"trace_level": "OFF"}', b'{"trace_rate": 5}', b'{"trace_rate": ["5"]}']
)
def test_invalid_bodies(server: ServerProcess, body: bytes) -> None:
    assert ask(server.http, "POST", "/v2/trace/setting", body).status == 400


# --- trace files


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def traced(
    request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Traced]]:
    """Traces of requests of every kind by id, which is the kind."""
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    options = ("--trace-config", f"triton,file={file}", *EVERY, *CARRIERS[request.param])
    with ServerProcess(small, options=options) as server:
        _ask_in_every_way(server)
        assert server.stop() == 0
        assert "bug " not in server.log
    found: dict[str, list[Traced]] = {}
    for trace in read_traces(file):
        found.setdefault(trace.head.get("request_id", ""), []).append(trace)
    return found


def _ask_in_every_way(server: ServerProcess) -> None:
    values = np.arange(3, dtype=np.float32).reshape(1, 3)
    for kind, make in CLIENTS.items():
        with make(server) as client:
            client.infer("identity", {"INPUT0": values}, id=kind)
            large = np.zeros((8, 3), np.float32)
            client.infer("identity", {"INPUT0": large}, id=f"{kind} large")
            with pytest.raises(InvalidRequest):
                client.infer("identity", {"INPUT0": values[0]}, id=f"{kind} wrong")
    flat = {"id": "generate", "INPUT0": [1, 2, 3]}
    assert ask(
        server.http, "POST", "/v2/models/identity/generate", json.dumps(flat).encode()
    ).document
    tensor = {"name": "INPUT0", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    body = json.dumps({"id": "chunked", "inputs": [tensor]}).encode()
    with HttpSocket(server.http) as connection:
        connection.send(
            b"POST /v2/models/identity/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
        assert connection.receive().status == 200
    pieces = json.dumps({"id": "pieces", "inputs": [tensor]}).encode()
    with HttpSocket(server.http) as connection:
        connection.send(request_bytes("POST", "/v2/models/identity/infer", pieces)[:-9])
        assert ask(server.http, "GET", "/v2/health/live").status == 200  # it has the first piece
        connection.send(pieces[-9:])
        assert connection.receive().status == 200
    with GrpcClient(server.grpc) as client:
        stream = Stream(client)
        for _ in range(2):
            stream.send(infer_message("identity", [Input("INPUT0", values)], id="stream"))
        stream.half_close()
        assert len(stream.rest()) == 2


def test_every_door_is_traced(traced: dict[str, list[Traced]]) -> None:
    doors = {kind: [trace.door for trace in found] for kind, found in traced.items()}
    assert doors.pop("stream") == ["GRPC", "GRPC"]
    assert doors == {
        kind: ["GRPC" if kind.startswith("grpc") else "HTTP"]
        for kind in doors
    }  # fmt: skip
    assert {"http", "http-binary large", "grpc wrong", "generate"} <= set(doors)


def test_a_trace_has_the_times_of_a_request(traced: dict[str, list[Traced]]) -> None:
    good = [t for kind, found in traced.items() if "wrong" not in kind for t in found]
    for trace in good:
        assert trace.head["model_name"] == "identity"
        assert trace.head["model_version"] == 1
        spans = trace.spans()
        assert spans["request"] >= spans["queue"] + spans["compute"]
        assert spans["exchange"] >= spans["receive"] + spans["request"] + spans["send"]
        assert "INFER_RESPONSE_COMPLETE" in trace.times


def test_a_request_that_fails_is_traced(traced: dict[str, list[Traced]]) -> None:
    [trace] = traced["http wrong"]
    assert {"HTTP_RECV_START", "REQUEST_START", "REQUEST_END"} <= set(trace.times)
    assert "COMPUTE_START" not in trace.times


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def tracing(small: Path, folder: Path) -> Iterator[ServerProcess]:
    """A server that traces every request to `folder`/t."""
    options = ("--trace-config", f"triton,file={folder / 't'}", *EVERY)
    with ServerProcess(small, options=options) as process:
        yield process


def infer(server: ServerProcess, model: str = "identity", times: int = 1) -> None:
    name, shape = ("INPUT0", (1, 3)) if model == "identity" else ("INPUT0", (1, 4))
    values = np.ones(shape, np.float32 if model == "identity" else np.int32)
    inputs = {name: values} | ({} if model == "identity" else {"INPUT1": values})
    with GrpcClient(server.grpc) as client:
        for _ in range(times):
            client.infer(model, inputs)


def test_settings_take_effect_at_once(tracing: ServerProcess, folder: Path) -> None:
    infer(tracing, times=2)
    http_settings(tracing, "identity", trace_level=["OFF"])
    infer(tracing, times=3)
    infer(tracing, "simple")
    assert http_settings(tracing, trace_count="2")["trace_count"] == "2"
    infer(tracing, "simple", times=5)
    assert http_settings(tracing, "simple")["trace_count"] == "0"
    grpc_settings(tracing, "identity", trace_level=["TENSORS"], log_frequency="2", trace_count="-1")
    infer(tracing, times=3)
    assert tracing.stop() == 0
    assert sorted(path.name for path in folder.iterdir()) == ["t", "t.0", "t.1", "t.2"]
    models = {
        path.name: [trace.head["model_name"] for trace in read_traces(path)]
        for path in folder.iterdir()
    }
    assert models == {
        "t": ["identity"] * 2 + ["simple"], "t.0": ["simple"] * 2, "t.1": ["identity"] * 2,
        "t.2": ["identity"],
    }  # fmt: skip
    [first, _] = read_traces(folder / "t.1")
    assert first.times == {}
    data = {"data": "1.0,1.0,1.0", "shape": "1,3", "dtype": "FP32"}
    assert first.tensors == [
        ("TENSOR_QUEUE_INPUT", {"name": "INPUT0"} | data),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUTPUT0"} | data),
    ]


TAIL = (
    "rate=0", "failed=true", "chosen=header:x-trace", "chosen=parameter:trace", "chosen=id:look-*",
)  # fmt: skip


@pytest.mark.parametrize("more", [(), pytest.param(("--frontends=1",), marks=pytest.mark.slow)])
def test_requests_that_fail_or_are_chosen_are_traced(
    small: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    file = tmp_path / "trace.json"
    options = [f"--trace-config={text}" for text in (*TAIL, "level=TIMESTAMPS")]
    options += [f"--trace-config=triton,file={file}", *more]
    good = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    with clean_server(small, options=options) as server, HttpSocket(server.http) as http:

        def infer(given: dict[str, Any], name: str, parameters: Any = None, **headers: str) -> int:
            document = {"id": name, "inputs": [given], "parameters": parameters or {}}
            path, body = "/v2/models/identity/infer", json.dumps(document).encode()
            return http.ask("POST", path, body, **headers).status

        wrong = good | {"shape": [1, 2], "data": [1, 2]}
        for number in range(3):
            assert infer(good, f"good {number}") == 200
        assert infer(wrong, "failed") == 400
        assert infer(good, "by header", **{"x-trace": "1"}) == 200
        assert infer(good, "not by header", **{"x-trace": "0"}) == 200
        assert infer(good, "by parameter", {"trace": True}) == 200
        assert infer(good, "look-here") == 200
        for kind, make in CLIENTS.items():
            with make(server) as client:
                values = np.ones((1, 3), np.float32)
                client.infer("identity", {"INPUT0": values}, id=f"look-{kind}")
                client.infer("identity", {"INPUT0": values}, id=f"good {kind}")
    chosen = {f"look-{kind}" for kind in CLIENTS}
    names = {trace.head["request_id"] for trace in read_traces(file)}
    assert names == {"failed", "by header", "by parameter", "look-here", *chosen}
