"""Requests of browsers: origins, and the host that they are for."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.models.onnx_graphs import write_model
from tests.support.http_socket import HttpSocket
from tests.support.server_process import ServerProcess, clean_server

EVIL = "evil.example:8000"
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("reference",)]
CHANGES = [
    ("POST", "/v2/repository/models/m/load", {}), ("POST", "/v2/repository/models/m/unload", {}),
    ("POST", "/v2/logging", {"log_verbose_level": 0}), ("POST", "/v2/logging/tail", None),
    ("POST", "/v2/trace/setting", {"trace_rate": "1"}),
    ("POST", "/v2/models/m/trace/setting", {"trace_rate": "1"}),
    ("POST", "/v2/models/m/traffic", {}), ("DELETE", "/v2/models/m/traffic", None),
    ("POST", "/v2/models/m/traffic/promote", {}), ("POST", "/v2/models/m/traffic/rollback", {}),
    ("POST", "/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 1}),
    ("POST", "/v2/systemsharedmemory/unregister", None),
    ("POST", "/v2/cudasharedmemory/region/r/unregister", None),
]  # fmt: skip
BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[1]}]}'


@pytest.fixture(scope="module", params=["default", "frontends", *SLOWLY])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("browsers")
    write_model(root, "m", graphs.add_constant(1), "max_batch_size: 4")
    options = (
        *CARRIERS[request.param], "--model-control-mode=explicit", "--load-model=m",
        "--allow-client-shm=true", "--http-allowed-origin=https://ops.example",
        "--http-allowed-origin=https://other.example:8443",
    )  # fmt: skip
    with clean_server(root, options=options, tracebacks=False) as process:
        yield process


def send(
    server: ServerProcess, method: str, path: str, document: Any, headers: dict[str, str]
) -> httpx.Response:
    # As a form sends it: without a preflight request.
    headers = {"content-type": "text/plain"} | headers
    return httpx.request(method, server.url + path, json=document, headers=headers, verify=False)


@pytest.mark.parametrize(("method", "path", "document"), CHANGES)
def test_pages_of_other_sites_change_nothing(
    server: ServerProcess, method: str, path: str, document: Any
) -> None:
    for headers in (
        {"host": EVIL, "origin": f"http://{EVIL}"},  # DNS rebinding
        {"origin": f"http://{EVIL}"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        answer = send(server, method, path, document, headers)
        assert answer.status_code == 403
        assert "not changed by pages of other sites" in answer.json()["error"]
    assert httpx.get(f"{server.url}/v2/models/m/ready", verify=False).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"host": "headrace.models.svc.cluster.local"}, {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1:3000"}, {"origin": "https://ops.example"},
        {"origin": "https://other.example:8443", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
    ],
)  # fmt: skip
def test_allowed_pages_change_something(server: ServerProcess, headers: dict[str, str]) -> None:
    for path in ("/v2/repository/models/m/load", "/v2/models/m/traffic"):
        assert send(server, "POST", path, {}, headers).status_code == 200
    assert send(server, "POST", "/v2/logging", {"log_info": True}, headers).status_code == 200


def test_inference_and_reading_are_open_to_every_page(server: ServerProcess) -> None:
    headers = {"host": EVIL, "origin": f"http://{EVIL}"}
    url = f"{server.url}/v2/models/m"
    assert (
        httpx.post(f"{url}/infer", content=BODY, headers=headers, verify=False).status_code == 200
    )
    assert httpx.get(f"{url}/traffic", headers=headers, verify=False).status_code == 200
    index = f"{server.url}/v2/repository/index"
    assert httpx.post(index, headers=headers, verify=False).status_code == 200


INFER = "POST /v2/models/m/infer"
LIVE = "GET /v2/health/live"


@pytest.mark.parametrize("request_line", [INFER, LIVE, "POST /v2/logging"])
@pytest.mark.parametrize("hosts", [[], ["a", "b"], ["a", "a"]])
def test_requests_without_exactly_one_host(
    server: ServerProcess, request_line: str, hosts: list[str]
) -> None:
    body = BODY if request_line == INFER else b""
    whole = _request(f"{request_line} HTTP/1.1", hosts, body)
    for _ in range(2):  # heads are known by their bytes the second time
        with HttpSocket(server.http) as connection:
            connection.send(whole)
            answer = connection.receive()
            assert answer.status == 400
            assert f"one Host header, got {len(hosts)}" in answer.error


@pytest.mark.parametrize("request_line", [INFER, LIVE])
def test_an_old_request_without_a_host(server: ServerProcess, request_line: str) -> None:
    body = BODY if request_line == INFER else b""
    with HttpSocket(server.http) as connection:
        connection.send(_request(f"{request_line} HTTP/1.0", [], body))
        assert connection.receive().status == 200
    with HttpSocket(server.http) as connection:
        connection.send(_request(f"{request_line} HTTP/1.0", ["a", "b"], body))
        assert connection.receive().status == 400


def _request(line: str, hosts: list[str], body: bytes) -> bytes:
    lines = [line, *(f"Host: {host}" for host in hosts), f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body
