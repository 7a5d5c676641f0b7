"""The metrics port."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

_OF_A_MODEL = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
    "nv_model_load_duration_secs",
    "headrace_queue_duration_seconds_bucket",
    "headrace_queue_duration_seconds_sum",
    "headrace_compute_duration_seconds_count",
    "headrace_request_duration_seconds_count",
    "headrace_batch_rows_count",
)
_OF_THE_SERVER = (
    "headrace_ready",
    "headrace_admitted_requests",
    "headrace_admitted_bytes",
    "headrace_admitted_bytes_peak",
    "headrace_admitted_requests_limit",
    "headrace_admitted_bytes_limit",
    "headrace_overloaded_total",
    "headrace_log_lines_dropped_total",
    "headrace_model_loads_total",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
    "process_resident_memory_bytes",
    "python_gc_collections_total",
)


def test_names_and_labels(metrics: Scraper) -> None:
    now = metrics.now()
    for name in _OF_A_MODEL:
        now.value(name, model="simple", version="1", _team="contract")
        now.value(name, model="versions_all", version="10")
    for name in _OF_THE_SERVER:
        now.value(name)
    assert now.value("headrace_ready") == 1


def test_failure_reasons_are_there_from_the_start(narrow: ServerProcess) -> None:
    with Scraper(narrow.metrics) as metrics:
        now = metrics.now()
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        labels = {"model": "identity", "version": "1", "reason": reason}
        assert now.value("nv_inference_request_failure", **labels) == 0


def test_types_are_announced_under_the_names_of_the_samples(metrics: Scraper) -> None:
    lines = metrics.now().text.splitlines()
    assert "# TYPE nv_inference_request_success counter" in lines
    assert "# TYPE nv_inference_pending_request_count gauge" in lines
    assert "# TYPE headrace_request_duration_seconds histogram" in lines
    announced = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(announced) == len(set(announced))


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


def test_histograms_are_cumulative(metrics: Scraper) -> None:
    now = metrics.now()
    buckets = [
        (float(labels["le"]), value)
        for labels, value in now.samples("headrace_request_duration_seconds_bucket")
        if labels["model"] == "row_sum"
    ]
    assert buckets == sorted(buckets)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    total = now.value("headrace_request_duration_seconds_count", model="row_sum")
    assert buckets[-1] == (float("inf"), total)


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics?x=1"])
def test_content_type(server: ServerProcess, path: str) -> None:
    answer = ask(server.metrics, "GET", path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2", 404),
        ("GET", "/metrics/x", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/metrics", 405),
    ],
)
def test_what_the_port_does_not_answer(
    server: ServerProcess, method: str, path: str, status: int
) -> None:
    answer = ask(server.metrics, method, path)
    assert answer.status == status
    assert b"metrics" in answer.body or status == 405


def test_metrics_are_not_on_the_other_ports(server: ServerProcess) -> None:
    assert ask(server.http, "GET", "/metrics").status == 404


def test_metrics_of_latencies_that_were_asked_for(small_repository: Path) -> None:
    options = (
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.99",
    )
    with ServerProcess(small_repository, options=options) as process:
        with GrpcClient(process.grpc) as client:
            client.infer("identity", {"INPUT0": np.zeros((3, 2), np.float32)})
        with Scraper(process.metrics) as metrics:
            now = metrics.now()
        assert process.stop() == 0
    of_identity = {"model": "identity", "version": "1"}
    for kind in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"nv_inference_{kind}_summary_us"
        assert now.value(f"{name}_count", **of_identity) == 1
        for quantile in ("0.5", "0.99"):
            value = now.value(name, quantile=quantile, **of_identity)
            assert value == pytest.approx(now.value(f"{name}_sum", **of_identity), abs=1)
    assert "nv_inference_request_duration_us" not in now.text
    assert now.value("nv_inference_request_success", **of_identity) == 1
    assert "# TYPE nv_inference_queue_summary_us summary" in now.text
