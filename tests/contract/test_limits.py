"""A server limited to one request of 4096 bytes, with a JSON access log."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from headrace.core.errors import PayloadTooLarge, Unavailable
from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.held import Gates
from tests.support.http_socket import HttpSocket, ask, request
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

_ONE: dict[str, Array] = {"INPUT0": np.ones((1, 1), np.float32)}


@pytest.fixture(scope="module")
def server(narrow: ServerProcess) -> ServerProcess:
    return narrow


def test_too_large_a_request(client: Client) -> None:
    with pytest.raises(PayloadTooLarge) as refused:
        client.infer("identity", {"INPUT0": np.ones((8, 150), np.float32)})
    assert "exceeds the maximum allowed value of 4096 bytes" in str(refused.value)
    assert "--max-request-bytes" in str(refused.value)


def test_one_request_too_many(
    client: Client, metrics: Scraper, pool: ThreadPoolExecutor, number: int, gates: Gates
) -> None:
    refused = metrics.now().value("headrace_overloaded_total")
    running = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
    metrics.until_running("held")
    with pytest.raises(Unavailable, match="the server is at its limit of 1 requests") as refusal:
        client.infer("identity", _ONE)
    assert refusal.value.retry_after == 1
    assert client.live()
    assert client.ready()
    gates.open()
    assert running.result()["OUTPUT0"].tolist() == [[number]]
    metrics.until_idle()
    assert client.infer("identity", _ONE)["OUTPUT0"].tolist() == [[1]]
    assert metrics.now().value("headrace_overloaded_total") - refused == 1


def test_overload_says_when_to_come_back(
    server: ServerProcess, metrics: Scraper, number: int, gates: Gates
) -> None:
    """Retry-After over HTTP; the connection of a refused request can be used again."""
    tensor = {"name": "VALUE", "datatype": "INT64", "shape": [1, 1], "data": [number]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with HttpSocket(server.http) as busy, HttpSocket(server.http) as other:
        busy.send(request("POST", "/v2/models/held/infer", body))
        metrics.until_running("held")
        answer = other.ask("POST", "/v2/models/held/infer", body)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        gates.open()
        assert busy.receive().status == 200
        assert other.ask("GET", "/v2/health/ready").status == 200


def test_access_log(server: ServerProcess) -> None:
    """One JSON object per request, over both transports."""
    with GrpcClient(server.grpc) as client:
        client.infer("identity", _ONE)
        with pytest.raises(PayloadTooLarge):
            client.infer("identity", {"INPUT0": np.ones((8, 150), np.float32)})
    ask(server.http, "GET", "/v2/models/access_log_probe")

    def lines() -> list[dict[str, object]]:
        entries = [json.loads(line) for line in server.log.splitlines()]
        return [entry for entry in entries if entry["logger"] == "headrace.access"]

    probe = "/v2/models/access_log_probe"
    until(lambda: any(entry["path"] == probe for entry in lines()), "the access log's line")
    found = lines()
    [http] = [entry for entry in found if entry["path"] == probe]
    assert (http["method"], http["status"], http["client"]) == ("GET", 404, "127.0.0.1")
    assert http["level"] == "info"
    assert isinstance(http["duration_ms"], float)
    [ok, *_] = [e for e in found if e.get("model") == "identity" and e["status"] == "OK"]
    assert (ok["method"], ok["version"], ok["client"]) == ("gRPC", "1", "127.0.0.1")
    statuses = {
        entry["status"]
        for entry in found
        if entry["path"] == "/inference.GRPCInferenceService/ModelInfer"
    }
    assert {"OK", "RESOURCE_EXHAUSTED"} <= statuses
    # Every line of the log is JSON.
    for line in server.log.splitlines():
        document = json.loads(line)
        assert {"time", "level", "logger", "message"} <= set(document)
        assert document["time"].endswith("Z")


def test_requests_are_not_logged_by_default(servers: Callable[[str], ServerProcess]) -> None:
    server = servers("default")
    ask(server.http, "GET", "/v2/models/access_log_probe")
    ask(server.http, "GET", "/v2")
    assert "access_log_probe" not in server.log


@pytest.mark.slow
def test_message_far_beyond_the_limit(servers: Callable[[str], ServerProcess]) -> None:
    """grpcio refuses this one itself, before it is read; its text names no setting."""
    server = servers("reference")
    with GrpcClient(server.grpc) as client:
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        call = infer.future(bytes(100 << 20), timeout=60)
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
