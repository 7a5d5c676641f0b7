"""What the two protocols call the same error, of every operation beside inference."""

import json
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from headrace.core.errors import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    ServerError,
    Unavailable,
    Unsupported,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb import traffic_pb2
from headrace.protocol.status import STATUS
from tests.support.grpc_client import OPTIONS, SERVICE, procedure
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess
from tests.support.shared_memory import SharedFile

TRAFFIC = "/headrace.v1.TrafficService"


@dataclass(frozen=True)
class Operation:
    """One request, in both protocols' words; `text` is the gRPC message in protobuf's text form."""

    path: str
    body: Any
    call: str
    text: str = ""
    method: str = "POST"


def _register(name: str, key: str) -> Operation:
    return Operation(
        f"/v2/systemsharedmemory/region/{name}/register",
        {"key": key, "byte_size": 8},
        "SystemSharedMemoryRegister",
        f'name: "{name}" key: "{key}" byte_size: 8',
    )


def _get(path: str, call: str, text: str = "") -> Operation:
    return Operation(path, None, call, text, "GET")


_LOAD = Operation(
    "/v2/repository/models/simple/load", {}, "RepositoryModelLoad", 'model_name: "simple"'
)
_UNLOAD = Operation(
    "/v2/repository/models/simple/unload", {}, "RepositoryModelUnload", 'model_name: "simple"'
)
_LOAD_THERE = Operation(
    "/v2/repository/there/models/simple/load",
    {},
    "RepositoryModelLoad",
    'repository_name: "there" model_name: "simple"',
)
_BAD_REGION = _register("r", "/none-of-this-name")
_REGION = _get("/v2/systemsharedmemory/region/r/status", "SystemSharedMemoryStatus", 'name: "r"')
_CUDA = _get("/v2/cudasharedmemory/region/r/status", "CudaSharedMemoryStatus", 'name: "r"')
_REGISTER_CUDA = Operation(
    "/v2/cudasharedmemory/region/r/register",
    {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 8},
    "CudaSharedMemoryRegister",
    'name: "r" raw_handle: "abc" byte_size: 8',
)
_FORGET = Operation("/v2/systemsharedmemory/unregister", None, "SystemSharedMemoryUnregister")
_TRACES_OF_NOTHING = _get(
    "/v2/models/nope/trace/setting", "TraceSetting", 'model_name: "nope"'
)  # fmt: skip


def _trace(name: str, value: object, text: str) -> Operation:
    message = f'settings {{ key: "{name}" value {{ {text} }} }}'
    return Operation("/v2/trace/setting", {name: value}, "TraceSetting", message)


def _log(name: str, value: object, text: str) -> Operation:
    message = f'settings {{ key: "{name}" value {{ {text} }} }}'
    return Operation("/v2/logging", {name: value}, "LogSettings", message)


_TRAFFIC_OF_NOTHING = _get(
    "/v2/models/nope/traffic", f"{TRAFFIC}/ModelTraffic", 'name: "nope"'
)  # fmt: skip
_NO_TRAFFIC = Operation(
    "/v2/models/simple/traffic", {}, f"{TRAFFIC}/SetModelTraffic", 'name: "simple"'
)
_PROMOTE = Operation(
    "/v2/models/simple/traffic/promote", {}, f"{TRAFFIC}/PromoteModelVersion", 'name: "simple"'
)


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (_get("/v2/models/nope", "ModelMetadata", 'name: "nope"'), NotFound),
        (_get("/v2/models/nope/config", "ModelConfig", 'name: "nope"'), NotFound),
        (_get("/v2/models/nope/stats", "ModelStatistics", 'name: "nope"'), InvalidRequest),
        (_LOAD, Unavailable),
        (_UNLOAD, Unavailable),
        (_LOAD_THERE, Unsupported),
        (_BAD_REGION, InvalidRequest),
        (_REGION, NotFound),
        (_CUDA, NotFound),
        (_REGISTER_CUDA, InvalidRequest),
        (_TRACES_OF_NOTHING, InvalidRequest),
        (_trace("trace_rate", "x", 'value: "x"'), InvalidRequest),
        (_trace("trace_level", ["OFF", "TENSORS"], 'value: ["OFF", "TENSORS"]'), InvalidRequest),
        (_trace("trace_nothing", "1", 'value: "1"'), InvalidRequest),
        (_trace("trace_file", "x", 'value: "x"'), Unsupported),
        (_trace("trace_mode", "triton", 'value: "triton"'), Unsupported),
        (_log("log_info", "x", 'string_param: "x"'), InvalidRequest),
        (_log("log_nothing", "x", 'string_param: "x"'), InvalidRequest),
        (_log("log_file", "x", 'string_param: "x"'), Unsupported),
        (_TRAFFIC_OF_NOTHING, NotFound),
        (_NO_TRAFFIC, Unavailable),
        (_PROMOTE, Unavailable),
    ],
)
def test_errors_have_one_status_in_each_protocol(
    server: ServerProcess, operation: Operation, error: type[ServerError]
) -> None:
    statuses, texts = _ask(server, operation)
    assert statuses == (STATUS[error].http, STATUS[error].grpc)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("operation", [_BAD_REGION, _REGISTER_CUDA, _FORGET])
def test_what_is_not_allowed_is_not_offered(narrow: ServerProcess, operation: Operation) -> None:
    statuses, texts = _ask(narrow, operation)
    assert statuses == (501, grpc.StatusCode.UNIMPLEMENTED.value[0])
    assert texts[0] == texts[1]


def test_a_region_that_is_there(server: ServerProcess) -> None:
    """The one class that HTTP has no status of its own for."""
    with SharedFile(64) as file:
        operation = _register("there", file.key)
        body = json.dumps(operation.body).encode()
        assert ask(server.http, "POST", operation.path, body).status == 200
        assert _ask(server, operation)[0] == (400, STATUS[AlreadyExists].grpc)
        path = "/v2/systemsharedmemory/region/there/unregister"
        assert ask(server.http, "POST", path).status == 200


def test_bodies_without_an_end(narrow: ServerProcess) -> None:
    large = "x" * 2_000_000
    for operation in (
        _log("log_format", large, f'string_param: "{large}"'),
        _trace("trace_rate", large, f'value: "{large}"'),
        _register("r", large),
    ):
        assert _ask(narrow, operation)[0] == (413, STATUS[PayloadTooLarge].grpc), operation.path


def _ask(
    server: ServerProcess, operation: Operation
) -> tuple[tuple[int, int], tuple[str, str | None]]:
    """The statuses and the texts over HTTP and gRPC."""
    body = b"" if operation.body is None else json.dumps(operation.body).encode()
    answer = ask(server.http, operation.method, operation.path, body)
    path = operation.call if "/" in operation.call else f"{SERVICE}/{operation.call}"
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        message = text_format.Parse(operation.text, _message(operation.call))
        call = procedure(channel, path, pb.ModelInferResponse).future(message, timeout=60)
        return (answer.status, call.code().value[0]), (answer.error, call.details())


def _message(call: str) -> Message:
    """An empty request for a procedure."""
    service, _, name = call.rpartition("/")
    if not service:
        found: Message = getattr(pb, f"{name}Request")()
        return found
    names = {"ModelTraffic": "ModelTraffic", "PromoteModelVersion": "ModelVersion"}
    message: Message = getattr(traffic_pb2, f"{names.get(name, name)}Request")()
    return message
