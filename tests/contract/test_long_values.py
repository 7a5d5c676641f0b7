"""Errors quote long values of clients in part, over every door."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headrace.core.texts import MAX_ERROR
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.models.onnx_graphs import write_model
from tests.support.grpc_client import OPTIONS, GrpcClient, procedure
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess, clean_server

LONG = "é" * 100_000  # two bytes each
HEADER = "h" * 20_000
NAME = "n" * 30_000
MOST = MAX_ERROR + 3
GOOD = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}


@pytest.fixture(
    scope="module",
    params=["default", "frontends", pytest.param("reference", marks=pytest.mark.slow)],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("long")
    write_model(root, "m", graphs.add_constant(1), "max_batch_size: 4")
    options = (
        *CARRIERS[request.param], "--model-control-mode=explicit", "--load-model=m",
        "--allow-client-shm=true",
    )  # fmt: skip
    with clean_server(root, options=options, tracebacks=False) as process:
        yield process


DOCUMENTS: dict[str, dict[str, Any]] = {
    "input name": {"inputs": [GOOD | {"name": LONG}]},
    "datatype": {"inputs": [GOOD | {"datatype": LONG}]},
    "shape": {"inputs": [GOOD | {"shape": [1] * 100_000}]},
    "output name": {"inputs": [GOOD], "outputs": [{"name": LONG}]},
    "parameter name": {"inputs": [GOOD], "parameters": {"triton_" + LONG: 1}},
    "parameter value": {"inputs": [GOOD], "parameters": {"sequence_start": [LONG]}},
    "long list": {"inputs": [GOOD], "parameters": {"timeout": [1] * 100_000}},
    "classes": {
        "inputs": [GOOD],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": LONG}}],
    },
    "region": {
        "inputs": [
            {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}
            | {"parameters": {"shared_memory_region": LONG, "shared_memory_byte_size": 4}}
        ]
    },
}


CONTROL: dict[str, dict[str, Any]] = {
    "/v2/logging": {LONG: 1}, "/v2/trace/setting": {"trace_rate": LONG},
    "/v2/models/m/traffic": {"split": LONG}, "/v2/models/m/traffic/promote": {"version": [LONG]},
    "/v2/repository/models/m/load": {"parameters": {LONG: 1}},
    "/v2/systemsharedmemory/region/r/register": {"key": LONG, "byte_size": 1},
    f"/v2/models/{NAME}/infer": {}, f"/v2/models/{NAME}/generate": {},
    f"/v2/repository/models/{NAME}/load": {},
}  # fmt: skip


def test_requests_over_http(server: ServerProcess) -> None:
    asked = [("/v2/models/m/infer", document) for document in DOCUMENTS.values()]
    for path, document in [*asked, *CONTROL.items()]:
        body = json.dumps(document, ensure_ascii=False).encode()
        answer = ask(server.http, "POST", path, body)
        assert answer.status >= 400
        assert 0 < len(answer.error.encode()) <= MOST, (path[:80], body[:80])
    for path in (
        f"/v2/models/{NAME}", f"/v2/models/{NAME}/stats", f"/v2/models/{NAME}/traffic",
        f"/v2/models/m/versions/{'9' * 30_000}/config",
        f"/v2/systemsharedmemory/region/{NAME}/status",
    ):  # fmt: skip
        answer = ask(server.http, "GET", path)
        assert 400 <= answer.status < 500
        assert 0 < len(answer.error.encode()) <= MOST, path[:80]
    for header in ("inference-header-content-length", "content-encoding"):
        answer = ask(server.http, "POST", "/v2/models/m/infer", b"{}", **{header: HEADER})
        assert answer.status in (400, 415, 501)
        assert 0 < len(answer.error.encode()) <= MOST, header


def test_calls_and_streams(server: ServerProcess) -> None:
    for name, message in (
        ("ModelInfer", pb.ModelInferRequest(model_name=LONG)),
        ("ModelMetadata", pb.ModelMetadataRequest(name=LONG)),
        ("ModelConfig", pb.ModelConfigRequest(name="m", version=LONG)),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=LONG)),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=LONG)),
    ):
        with grpc.insecure_channel(server.grpc, OPTIONS) as channel:
            path = f"/inference.GRPCInferenceService/{name}"
            call = procedure(channel, path, pb.ModelInferResponse).future(message, timeout=60)
            assert call.code() is not grpc.StatusCode.OK
            assert 0 < len((call.details() or "").encode()) <= MOST, name
    with GrpcClient(server.grpc) as client:
        [response] = client.stream([pb.ModelInferRequest(model_name=LONG)])
        assert 0 < len(response.error_message.encode()) <= MOST


def test_short_values_are_quoted_in_full(server: ServerProcess) -> None:
    answer = ask(server.http, "GET", f"/v2/models/{'n' * 1_000}")
    assert "n" * 1_000 in answer.error
    assert not answer.error.endswith("…")
