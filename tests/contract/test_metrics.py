"""The metrics port."""

import re
from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.workers.triton_api import MetricFamily, TritonModelException
from tests.support.client import Client, Input
from tests.support.grpc_client import GrpcClient, infer_message, procedure
from tests.support.http_socket import HttpSocket, ask
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

_OF_A_MODEL = (
    "nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count",
    "nv_inference_request_duration_us", "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us", "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us", "nv_inference_pending_request_count",
    "nv_model_load_duration_secs", "headrace_queue_duration_seconds_bucket",
    "headrace_queue_duration_seconds_sum", "headrace_compute_duration_seconds_count",
    "headrace_request_duration_seconds_count", "headrace_batch_rows_count",
)  # fmt: skip
_OF_THE_SERVER = (
    "headrace_ready", "headrace_admitted_requests", "headrace_admitted_bytes",
    "headrace_admitted_bytes_peak", "headrace_admitted_requests_limit",
    "headrace_admitted_bytes_limit", "headrace_overloaded_total",
    "headrace_log_lines_dropped_total", "headrace_model_loads_total", "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes", "process_resident_memory_bytes",
    "python_gc_collections_total",
)  # fmt: skip


def test_names_and_labels(metrics: Scraper) -> None:
    now = metrics.now()
    for name in _OF_A_MODEL:
        now.value(name, model="simple", version="1", _team="contract")
        now.value(name, model="versions_all", version="10")
    for name in _OF_THE_SERVER:
        now.value(name)
    assert now.value("headrace_ready") == 1


def test_a_model_takes_no_name_of_the_server(metrics: Scraper) -> None:
    families = re.findall("^# TYPE ([^ ]+)", metrics.now().text, re.MULTILINE)
    assert "http_server_request_duration_seconds" in families
    for name in families:
        with pytest.raises(TritonModelException, match="cannot be the name of a model's metric"):
            MetricFamily(name, "", MetricFamily.GAUGE)


def test_integers_look_like_integers(metrics: Scraper) -> None:
    """Clients read them as such, and have no patience for a point or an exponent."""
    lines = [line for line in metrics.now().text.splitlines() if not line.startswith("#")]
    values = [line.rpartition(" ")[2] for line in lines]
    assert not [v for v in values if v.endswith(".0") or ("e" in v and float(v).is_integer())]
    for name in ("nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"):
        (value,) = [line.removeprefix(f"{name} ") for line in lines if line.startswith(name)]
        assert int(value) > 1 << 20


def test_failure_reasons_are_there_from_the_start(narrow: ServerProcess) -> None:
    with Scraper(narrow.metrics) as metrics:
        now = metrics.now()
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        labels = {"model": "identity", "version": "1", "reason": reason}
        assert now.value("nv_inference_request_failure", **labels) == 0


def test_counters_follow_the_requests(metrics: Scraper, grpc_client: GrpcClient) -> None:
    labels = {"model": "row_sum", "version": "1"}
    before = metrics.now()
    grpc_client.infer("row_sum", {"INPUT0": np.zeros((3, 2), np.float32)})
    after = metrics.now()

    def grown(name: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("nv_inference_request_success") == 1
    assert grown("nv_inference_count") == 3
    assert grown("nv_inference_exec_count") == 1
    assert grown("nv_inference_request_failure") == 0
    assert grown("headrace_request_duration_seconds_count") == 1
    assert grown("headrace_batch_rows_count") == 1
    assert grown("headrace_batch_rows_sum") == 3


_INFER = "/v2/models/simple/infer"
_NO_MODEL = "/v2/models/no_such_model/infer"
_UNARY = "/inference.GRPCInferenceService/ModelInfer"


def _ask(
    method: str, path: str, body: bytes = b""
) -> Callable[[ServerProcess, GrpcClient], object]:
    return lambda server, _: ask(server.http, method, path, body)


def _chunked(server: ServerProcess, _: GrpcClient) -> None:
    with HttpSocket(server.http) as client:
        client.send(b"POST %b HTTP/1.1\r\nHost: x\r\n" % _INFER.encode())
        client.send(b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert client.receive().status == 400


def _no_request(server: ServerProcess, _: GrpcClient) -> None:
    with HttpSocket(server.http) as client:
        client.send(b"nonsense\r\n\r\n")
        assert client.receive().status == 400


def _call(path: str, message: bytes) -> Callable[[ServerProcess, GrpcClient], object]:
    def call(server: ServerProcess, client: GrpcClient) -> None:
        with pytest.raises(grpc.RpcError):
            procedure(client.channel, path, pb.ServerMetadataResponse)(message)

    return call


def _stream(server: ServerProcess, client: GrpcClient) -> None:
    rows = infer_message("row_sum", [Input("INPUT0", np.zeros((1, 2), np.float32))])
    answers = list(client.stream([rows, infer_message("no_such_model")]))
    assert [bool(answer.error_message) for answer in answers] == [False, True]


@pytest.mark.parametrize(
    ("send", "counted"),
    [
        (_ask("POST", _INFER, b"{"), [("http", "infer", "400")]),
        (_ask("POST", _NO_MODEL, b'{"inputs": []}'), [("http", "infer", "404")]),
        (_ask("GET", _INFER), [("http", "infer", "405")]),
        (_chunked, [("http", "infer", "400")]),
        (_ask("POST", "/v2/models/simple/generate", b"["), [("http", "generate", "400")]),
        (
            _ask("POST", "/v2/models/simple/generate_stream", b"["),
            [("http", "generate_stream", "400")],
        ),
        (_ask("GET", "/v2/health/live"), [("http", "health", "200")]),
        (_ask("GET", "/v2/models/no_such_model/config"), [("http", "model-config", "404")]),
        (_ask("GET", "/no/such/path"), [("http", "other", "404")]),
        (_no_request, [("http", "other", "400")]),
        (_call(_UNARY, b""), [("grpc", "infer", "NOT_FOUND")]),
        (_call(_UNARY, b"\xff"), [("grpc", "infer", "INVALID_ARGUMENT")]),
        (
            _call("/inference.GRPCInferenceService/ModelMetadata", b""),
            [("grpc", "metadata", "NOT_FOUND")],
        ),
        (
            _stream,
            [
                ("grpc", "infer", "OK"), ("grpc", "infer", "NOT_FOUND"),
                ("grpc", "stream_infer", "OK"),
            ],
        ),
    ],
)  # fmt: skip
def test_requests_are_counted_by_door_operation_and_status(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    metrics: Scraper,
    grpc_client: GrpcClient,
    send: Callable[[ServerProcess, GrpcClient], object],
    counted: list[tuple[str, str, str]],
) -> None:
    """Also requests that never reach the engine; clients cannot invent labels."""
    before = _counts(metrics)
    for _ in range(3):
        send(server, grpc_client)

    def all_counted() -> bool:
        now = _counts(metrics)
        return all(now[key] - before[key] >= 3 for key in counted)

    until(all_counted, f"{counted} counted")  # front ends report every second
    if request.node.callspec.params["server"] != "frontends":  # which report others' requests late
        seen = {status for _, _, status in _counts(metrics) - before} - {"200", "OK"}
        assert seen <= {status for _, _, status in counted}


def test_good_answers_are_counted(server: ServerProcess, metrics: Scraper, client: Client) -> None:
    door = "grpc" if isinstance(client, GrpcClient) else "http"
    key = door, "infer", "OK" if door == "grpc" else "200"
    before = _counts(metrics)[key]
    for _ in range(3):
        client.infer("row_sum", {"INPUT0": np.zeros((1, 2), np.float32)})
    until(lambda: _counts(metrics)[key] >= before + 3, "three good answers counted")


def _counts(metrics: Scraper) -> Counter[tuple[str, str, str]]:
    return Counter(
        {
            (labels["door"], labels["operation"], labels["status"]): int(value)
            for labels, value in metrics.now().samples("headrace_requests_total")
        }
    )


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics?x=1"])
def test_content_type(server: ServerProcess, path: str) -> None:
    answer = ask(server.metrics, "GET", path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/", 404), ("GET", "/v2", 404), ("GET", "/metrics/x", 404), ("POST", "/metrics", 405),
    ("DELETE", "/metrics", 405),
])  # fmt: skip
def test_requests_that_the_metrics_port_refuses(
    server: ServerProcess, method: str, path: str, status: int
) -> None:
    answer = ask(server.metrics, method, path)
    assert answer.status == status
    assert b"metrics" in answer.body or status == 405


def test_metrics_are_not_on_the_other_ports(server: ServerProcess) -> None:
    assert ask(server.http, "GET", "/metrics").status == 404
