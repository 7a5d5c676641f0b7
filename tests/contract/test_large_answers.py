"""Answers beyond `--max-response-bytes`: each fails alone, in the form of its door."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from headrace.core.errors import ServerError
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract import graphs
from tests.contract.conftest import CARRIERS, EACH_CARRIER
from tests.models.onnx_graphs import identity, write_model
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.http_socket import ask
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

LIMIT = 1 << 20
SMALL, LONG_AS_TEXT, LARGE, HUGE = 10, 200_000, 300_000, 5_000_000  # FP32 elements
SPLIT = 'parameters { key: "split_requests" value { string_value: "on" } }'
SAID = f"--max-response-bytes ({LIMIT})"


@pytest.fixture(scope="module", params=EACH_CARRIER)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root: Path = tmp_path_factory.mktemp("answers")
    write_model(root, "tenths", graphs.tenths(), "max_batch_size: 0")
    write_model(root, "rows", identity(dims=("rows", 4_000)), f"max_batch_size: 2 {SPLIT}")
    options = (*CARRIERS[request.param], f"--max-response-bytes={LIMIT}")
    with clean_server(root, options=options) as process:
        yield process
    assert "bug" not in process.output


def inputs(count: int) -> dict[str, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    return {"INPUT0": np.array([count])}


def check(client: Client, longest: int) -> None:
    with client:
        for count in (LARGE, HUGE, longest + 100_000):
            with pytest.raises(ServerError) as refused:
                client.infer("tenths", inputs(count))
            assert SAID in str(refused.value)
            assert "model 'tenths'" in str(refused.value)
            for good in (SMALL, longest):  # over the same connection
                assert len(client.infer("tenths", inputs(good))["OUTPUT0"]) == good


def test_over_http(server: ServerProcess) -> None:
    check(HttpClient(server.url, binary=False), 60_000)
    check(HttpClient(server.url, binary=True), LONG_AS_TEXT)


def test_over_grpc(server: ServerProcess) -> None:
    check(GrpcClient(server.grpc), LONG_AS_TEXT)


def test_status_over_http(server: ServerProcess) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT64", "shape": [1], "data": [LONG_AS_TEXT]}
    body = json.dumps({"inputs": [tensor]}).encode()
    answer = ask(server.http, "POST", "/v2/models/tenths/infer", body)
    assert (answer.status, SAID in answer.error) == (500, True)


def request(count: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="tenths", id=str(count))
    message.inputs.add(name="INPUT0", datatype="INT64", shape=[1])
    message.raw_input_contents.append(np.array([count]).tobytes())
    return message


def test_status_over_grpc(server: ServerProcess) -> None:
    with GrpcClient(server.grpc) as client, pytest.raises(grpc.RpcError) as refused:
        client.procedure("ModelInfer", pb.ModelInferResponse)(request(LARGE), timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_in_a_stream(server: ServerProcess) -> None:
    """Other requests of the stream are answered."""
    counts = [SMALL, LARGE, LONG_AS_TEXT, HUGE, SMALL]
    with GrpcClient(server.grpc) as client:
        found = list(client.stream(map(request, counts)))
    sizes = [len(b"".join(one.infer_response.raw_output_contents)) // 4 for one in found]
    assert sizes == [SMALL, 0, LONG_AS_TEXT, 0, SMALL]
    assert [SAID in one.error_message for one in found] == [False, True, False, True, False]


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
@pytest.mark.parametrize(("count", "status"), [(SMALL, 200), (LONG_AS_TEXT, 500), (HUGE, 500)])
def test_generate(server: ServerProcess, action: str, count: int, status: int) -> None:
    body = json.dumps({"INPUT0": count}).encode()
    answer = ask(server.http, "POST", f"/v2/models/tenths/{action}", body)
    assert (answer.status, SAID in answer.body.decode()) == (status, status == 500)


def test_a_divided_request(server: ServerProcess) -> None:
    """The parts of an answer count together, before they are joined."""
    with GrpcClient(server.grpc) as client:
        rows = np.zeros((100, 4_000), np.float32)
        with pytest.raises(ServerError) as refused:
            client.infer("rows", {"INPUT0": rows})
        assert SAID in str(refused.value)
        found = int(str(refused.value).split(" bytes or more")[0].rpartition(" ")[2])
        assert found < rows.nbytes  # the remaining parts are not computed
        assert client.infer("rows", {"INPUT0": rows[:50]})["OUTPUT0"].shape == (50, 4_000)


def test_nothing_stays_charged(server: ServerProcess) -> None:
    check(HttpClient(server.url, binary=False), 60_000)
    with Scraper(server.metrics) as metrics:
        metrics.until_idle()
        assert metrics.now().value("headrace_admitted_bytes") == 0
