"""Statuses of errors over both protocols, for every operation beside inference."""

import json
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from headrace.core.errors import (
    AlreadyExists,
    InvalidRequest,
    MemoryUnavailable,
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


class Operation(NamedTuple):
    """One request over both protocols; `text` is the gRPC message in protobuf's text form."""

    path: str
    body: Any  # None for a GET
    call: str
    text: str = ""


def _register(name: str, key: str) -> Operation:
    path, body = f"region/{name}/register", {"key": key, "byte_size": 8}
    text = f'name: "{name}" key: "{key}" byte_size: 8'
    return Operation(f"/v2/systemsharedmemory/{path}", body, "SystemSharedMemoryRegister", text)


def _setting(path: str, call: str, name: str, value: object, text: str) -> Operation:
    message = f'settings {{ key: "{name}" value {{ {text} }} }}'
    return Operation(path, {name: value}, call, message)


_trace = partial(_setting, "/v2/trace/setting", "TraceSetting")
_log = partial(_setting, "/v2/logging", "LogSettings")
_SIMPLE, _NOPE = 'model_name: "simple"', 'name: "nope"'
_REPOSITORY, _MEMORY = "/v2/repository/models/simple", "/v2/systemsharedmemory"
_BAD_REGION = _register("r", "/none-of-this-name")
_REGISTER_CUDA = Operation(
    "/v2/cudasharedmemory/region/r/register",
    {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 8},
    "CudaSharedMemoryRegister", 'name: "r" raw_handle: "abc" byte_size: 8',
)  # fmt: skip
_FORGET = Operation(f"{_MEMORY}/unregister", {}, "SystemSharedMemoryUnregister")


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (Operation("/v2/models/nope", None, "ModelMetadata", _NOPE), NotFound),
        (Operation("/v2/models/nope/config", None, "ModelConfig", _NOPE), NotFound),
        (Operation("/v2/models/nope/stats", None, "ModelStatistics", _NOPE), InvalidRequest),
        (Operation(f"{_REPOSITORY}/load", {}, "RepositoryModelLoad", _SIMPLE), Unavailable),
        (Operation(f"{_REPOSITORY}/unload", {}, "RepositoryModelUnload", _SIMPLE), Unavailable),
        (Operation("/v2/repository/there/models/simple/load", {}, "RepositoryModelLoad",
                   f'repository_name: "there" {_SIMPLE}'), Unavailable),
        (_BAD_REGION, MemoryUnavailable),
        (Operation(f"{_MEMORY}/region/r/status", None, "SystemSharedMemoryStatus", 'name: "r"'),
         NotFound),
        (Operation("/v2/cudasharedmemory/region/r/status", None, "CudaSharedMemoryStatus",
                   'name: "r"'), NotFound),
        (_REGISTER_CUDA, InvalidRequest),
        (Operation("/v2/models/nope/trace/setting", None, "TraceSetting", 'model_name: "nope"'),
         InvalidRequest),
        (_trace("trace_rate", "x", 'value: "x"'), InvalidRequest),
        (_trace("trace_level", ["OFF", "TENSORS"], 'value: ["OFF", "TENSORS"]'), InvalidRequest),
        (_trace("trace_file", "x", 'value: "x"'), Unsupported),
        (_log("log_info", "x", 'string_param: "x"'), InvalidRequest),
        (_log("log_file", "x", 'string_param: "x"'), Unsupported),
        pytest.param(
            Operation("/v2/models/nope/traffic", None, f"{TRAFFIC}/ModelTraffic", _NOPE), NotFound,
            id="traffic",
        ),
        (Operation("/v2/models/simple/traffic", {}, f"{TRAFFIC}/SetModelTraffic",
                   'name: "simple"'), Unavailable),
        (Operation("/v2/models/simple/traffic/promote", {}, f"{TRAFFIC}/PromoteModelVersion",
                   'name: "simple"'), Unavailable),
    ],
)  # fmt: skip
def test_errors_have_one_status_in_each_protocol(
    server: ServerProcess, operation: Operation, error: type[ServerError]
) -> None:
    statuses, texts = _ask(server, operation)
    assert statuses == (STATUS[error].http, STATUS[error].grpc)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("operation", [_BAD_REGION, _REGISTER_CUDA, _FORGET])
def test_disabled_operations_are_unknown(narrow: ServerProcess, operation: Operation) -> None:
    statuses, texts = _ask(narrow, operation)
    assert statuses == (501, grpc.StatusCode.UNIMPLEMENTED.value[0])
    assert texts[0] == texts[1]


def test_an_existing_region(server: ServerProcess) -> None:
    """The one error class without an HTTP status of its own."""
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
    """Statuses and texts over HTTP and gRPC."""
    method = "GET" if operation.body is None else "POST"
    body = json.dumps(operation.body).encode() if operation.body else b""
    answer = ask(server.http, method, operation.path, body)
    path = operation.call if "/" in operation.call else f"{SERVICE}/{operation.call}"
    with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
        message = text_format.Parse(operation.text, _message(operation.call))
        call = procedure(channel, path, pb.ModelInferResponse).future(message, timeout=60)
        return (answer.status, call.code().value[0]), (answer.error, call.details())


def _message(call: str) -> Message:
    service, _, name = call.rpartition("/")
    if not service:
        found: Message = getattr(pb, f"{name}Request")()
        return found
    names = {"ModelTraffic": "ModelTraffic", "PromoteModelVersion": "ModelVersion"}
    message: Message = getattr(traffic_pb2, f"{names.get(name, name)}Request")()
    return message
