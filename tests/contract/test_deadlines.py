"""Deadlines of requests for a model without a queue policy.

Deadlines of gRPC calls are in `test_grpc_transport`, queue policies in `test_scheduling`.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import Unavailable
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.support.grpc_client import GrpcClient
from tests.support.held import Gates
from tests.support.http_socket import RawAnswer, ask
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

_INFER, _GENERATE = "/v2/models/held/infer", "/v2/models/held/generate"
_ROW = {"name": "VALUE", "datatype": "INT64", "shape": [1, 1], "data": [7]}
_BODIES = {
    "json": (_INFER, json.dumps({"inputs": [_ROW]}).encode(), {}),
    "raw": (_INFER, np.array([7]).tobytes(), {"Inference_Header_Content_Length": "0"}),
    "old": (_INFER, json.dumps({"inputs": [_ROW]}).encode(), {"Connection": "close"}),
    "generate": (_GENERATE, b'{"VALUE": 7}', {}),
}


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def busy(
    request: pytest.FixtureRequest, busy_repository: Path, gates: Gates
) -> Iterator[ServerProcess]:
    """A server with slow models, for each carrier."""
    options = ("--allow-in-process-python", *CARRIERS[request.param])
    with clean_server(busy_repository, options=options) as process:
        yield process


@pytest.fixture
def held(
    busy: ServerProcess, number: int, gates: Gates, pool: ThreadPoolExecutor
) -> Iterator[ServerProcess]:
    """The server while the model `held` runs."""
    with GrpcClient(busy.grpc) as client, Scraper(busy.metrics) as metrics:
        infer = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
        metrics.until_running("held")
        yield busy
        assert not infer.done()
        metrics.until_queued("held", 0)
        gates.open()
        assert infer.result()["OUTPUT0"].tolist() == [[number]]
        metrics.until_idle()


def refusal(answer: RawAnswer) -> str:
    """Text of a transient refusal."""
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    return answer.error


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_timeout_of_a_request(held: ServerProcess, transport: str) -> None:
    given = {"VALUE": np.array([[1]])}
    expired = pytest.raises(Unavailable, match="Request timeout expired")
    with CLIENTS[transport](held) as client, expired:
        client.infer("held", given, parameters={"timeout": 100_000})


@pytest.mark.parametrize("body", _BODIES)
@pytest.mark.parametrize("header", [
    {"Grpc_Timeout": "100m"}, {"X_Envoy_Expected_Rq_Timeout_Ms": "100"},
], ids=["grpc", "envoy"])  # fmt: skip
def test_a_header_over_http(held: ServerProcess, body: str, header: dict[str, str]) -> None:
    path, content, headers = _BODIES[body]
    answer = ask(held.http, "POST", path, content, **headers, **header)
    assert "Request timeout expired" in refusal(answer)


def test_the_shorter_of_header_and_parameter(held: ServerProcess) -> None:
    body = json.dumps({"inputs": [_ROW], "parameters": {"timeout": 100_000}}).encode()
    answer = ask(held.http, "POST", _INFER, body, Grpc_Timeout="1H")
    assert "Request timeout expired" in refusal(answer)


@pytest.mark.parametrize("path", [_INFER, _GENERATE])
@pytest.mark.parametrize(("name", "value", "expected"), [
    ("Grpc_Timeout", "100ms", "grpc-timeout must be up to 8 digits and a unit"),
    ("X_Envoy_Expected_Rq_Timeout_Ms", "1.5", "must be a number of milliseconds"),
])  # fmt: skip
def test_invalid_timeout_headers(
    busy: ServerProcess, path: str, name: str, value: str, expected: str
) -> None:
    answer = ask(busy.http, "POST", path, b"{}", **{name: value})
    assert answer.status == 400
    assert expected in answer.error
    assert repr(value) in answer.error


def test_a_request_that_is_in_time(busy: ServerProcess) -> None:
    for body in ("json", "raw", "generate"):
        path, content, headers = _BODIES[body]
        answer = ask(busy.http, "POST", path, content, **headers, Grpc_Timeout="1M")
        assert answer.status == 200, answer.body
    longest = json.dumps({"inputs": [_ROW], "parameters": {"timeout": 2**64 - 1}})
    assert ask(busy.http, "POST", _INFER, longest.encode()).status == 200
