"""`headrace top`: figures of known metrics and traffic, their table, and its display."""

import fcntl
import io
import json
import math
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console

from headrace.api.operations import Document
from headrace.cli.commands.top import Scrape, activity, drawn, ordered, parse, plain, quantile
from headrace.core.datatypes import Datatype
from tests.cli.conftest import Headrace
from tests.models.onnx_graphs import identity, write_model
from tests.protocol.strategies import PROPERTY
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess, clean_server

_BEFORE = """
nv_inference_request_success{model="m",version="1"} 10
nv_inference_request_failure{model="m",version="1",reason="OTHER"} 1
nv_inference_request_failure{model="m",version="1",reason="BACKEND"} 1
nv_inference_count{model="m",version="1"} 30
nv_inference_exec_count{model="m",version="1"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.001"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.01"} 10
headrace_request_duration_seconds_bucket{model="m",version="1",le="+Inf"} 10
headrace_requests_total{door="http",operation="infer",status="200"} 5
headrace_requests_total{door="grpc",operation="infer",status="OK"} 7
headrace_overloaded_total 0
process_cpu_seconds_total 1
"""
_AFTER = """
nv_inference_request_success{model="m",version="1",_team="a"} 30
nv_inference_request_success{model="m",version="2"} 4
nv_inference_request_failure{model="m",version="1",reason="OTHER"} 2
nv_inference_request_failure{model="m",version="1",reason="BACKEND"} 2
nv_inference_count{model="m",version="1"} 110
nv_inference_exec_count{model="m",version="1"} 30
nv_inference_pending_request_count{model="m",version="1"} 5
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.001"} 20
headrace_request_duration_seconds_bucket{model="m",version="1",le="0.01"} 30
headrace_request_duration_seconds_bucket{model="m",version="1",le="+Inf"} 30
headrace_model_memory_bytes{model="m",version="1"} 1048576
headrace_model_instances{model="m",version="1",kind="thread"} 2
headrace_backend_active{model="m",version="1",backend="triton"} 1
headrace_endpoint_healthy{model="m",version="1",endpoint="a:1"} 0
headrace_requests_total{door="http",operation="infer",status="200"} 9
headrace_requests_total{door="http",operation="infer",status="400"} 6
headrace_requests_total{door="grpc",operation="infer",status="OK"} 7
headrace_requests_total{door="grpc",operation="infer",status="NOT_FOUND"} 2
headrace_overloaded_total 6
headrace_ready 1
headrace_admitted_requests 3
headrace_admitted_requests_limit 100
process_cpu_seconds_total 2
process_resident_memory_bytes 2097152
"""
_NONE = {"p50": None, "p90": None, "p99": None}


def test_rates_between_two_scrapes() -> None:
    now = activity(Scrape(10.0, parse(_BEFORE)), Scrape(12.0, parse(_AFTER)))
    first, second = now["models"]
    assert first == {
        "model": "m", "version": "1", "requests_per_second": 10, "failures_per_second": 1,
        "failures_per_second_by_reason": {"OTHER": 0.5, "BACKEND": 0.5},
        "rows_per_second": 40, "batches_per_second": 10, "rows_per_batch": 4,
        "waiting_requests": 5, "queue_seconds": _NONE, "compute_seconds": _NONE,
        "latency_seconds": {
            "p50": 0.001, "p90": pytest.approx(0.0082), "p99": pytest.approx(0.00982),
        },
        "memory_bytes": 1 << 20, "instances": {"thread": 2}, "backends": {"triton": True},
        "servers": {"a:1": False},
    }  # fmt: skip
    assert (second["version"], second["requests_per_second"], second["instances"]) == ("2", 2, {})
    assert second["rows_per_batch"] is second["memory_bytes"] is None
    answers = [("http", "400", 3), ("http", "200", 2), ("grpc", "NOT_FOUND", 1)]
    assert (now["seconds"], now["server"]) == (2, {
        "ready": True, "requests_per_second": 12, "failures_per_second": 1,
        "refused_per_second": 3, "admitted_requests": 3, "admitted_requests_limit": 100,
        "resident_bytes": 2 << 20, "cpu": 0.5, "answers": [
            {"door": door, "operation": "infer", "status": status, "per_second": rate}
            for door, status, rate in answers
        ],
    })  # fmt: skip


def test_counters_of_a_restarted_server() -> None:
    now = activity(Scrape(10.0, parse(_AFTER)), Scrape(11.0, parse(_BEFORE)))
    [version] = now["models"]
    assert (version["requests_per_second"], version["rows_per_second"]) == (10, 30)
    assert version["failures_per_second"] == 2
    assert version["latency_seconds"]["p50"] == 0.0005
    server = now["server"]
    assert (server["ready"], server["resident_bytes"], server["cpu"]) == (False, None, 1)


def test_an_empty_scrape() -> None:
    now = activity(Scrape(1.0, {}), Scrape(1.0, {}))
    assert (now["models"], now["server"]["answers"], now["server"]["cpu"]) == ([], [], None)


@pytest.mark.parametrize(("counts", "share", "value"), [
    ([], 0.5, None), ([(1, 0), (math.inf, 0)], 0.5, None), ([(1, 4), (math.inf, 4)], 0.5, 0.5),
    ([(1, 0), (2, 4), (math.inf, 4)], 0.25, 1.25),
    ([(1, 1), (2, 1), (math.inf, 2)], 0.99, 2),  # above all bounds
    ([(math.inf, 2)], 0.5, 0),
])  # fmt: skip
def test_quantiles(counts: list[tuple[float, float]], share: float, value: float | None) -> None:
    assert quantile(counts, share) == value


@PROPERTY
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.floats(0.01, 1))
def test_a_quantile_lies_in_its_bucket(steps: list[int], share: float) -> None:
    total, counts = 0, []
    for bound, step in enumerate(steps, 1):
        total += step
        counts.append((float(bound), float(total)))
    value = quantile(counts, share)
    if not total:
        assert value is None
        return
    assert value is not None
    holding = next(bound for bound, count in counts if count >= share * total)
    assert holding - 1 <= value <= holding


# --- Prometheus' text format, as prometheus_client writes it


_VALUES = st.text(st.characters(exclude_categories=["Cs"]))


@PROPERTY
@given(st.dictionaries(st.tuples(_VALUES, _VALUES), st.floats(allow_nan=False), max_size=5))
def test_written_metrics_are_read(values: dict[tuple[str, str], float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "Help\nwith lines", ["model", "kind"], registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    found = parse(generate_latest(registry).decode())
    read = {(m, kind): v for (_, m), of_kind in found.items() for kind, v in of_kind.items()}
    assert read == values


def test_timestamps_and_unknown_labels() -> None:
    text = 'x{door="}",} 3 1700000000\nx{_door="a",door="}"} 4\n'
    assert parse(text) == {("x",): {"}": 7}}


@PROPERTY
@given(st.text())
def test_any_text_is_parsed(text: str) -> None:
    parse(text)


# --- the table


def model(name: str, version: str, rate: float = 0, **more: Any) -> Document:
    """One of `models` of the document."""
    none = dict.fromkeys(("rows_per_batch", "memory_bytes"))
    times = dict.fromkeys(("latency_seconds", "queue_seconds", "compute_seconds"), _NONE)
    zero = dict.fromkeys(("failures_per_second", "rows_per_second", "waiting_requests"), 0)
    empty: Document = {
        name: {} for name in ("failures_per_second_by_reason", "instances", "backends", "servers")
    }
    own = {"model": name, "version": version, "requests_per_second": rate}
    return none | times | zero | empty | own | more


_BUSY = {"p50": 0.0008, "p90": 0.0041, "p99": 0.0123}
MODELS = [
    model(
        "a_model_with_a_long_name_that_does_not_fit", "10", 1234.5, failures_per_second=2.25,
        waiting_requests=17, latency_seconds=_BUSY, rows_per_batch=15.6, memory_bytes=310 * 2**20,
    ),
    model("small", "2", 3.5, latency_seconds=_BUSY, memory_bytes=2000, instances={"process": 2}),
    model("small", "10", 3.5, latency_seconds=_BUSY, memory_bytes=3000),
    model("idle", "1"),
]  # fmt: skip
SERVER: Document = {
    "ready": True, "requests_per_second": 1241.5, "failures_per_second": 2.25,
    "refused_per_second": 0, "admitted_requests": 12, "admitted_requests_limit": 1000,
    "resident_bytes": 400 * 2**20, "cpu": 0.43, "answers": [],
}  # fmt: skip
TITLE = "http://127.0.0.1:8000"
HEAD = """\
http://127.0.0.1:8000  ready
1242 req/s  2.25 err/s  0 refused/s  12 of 1000 under way  400 MiB  43% CPU
"""
ROWS = """\
MODEL             VER  REQ/S  ERR/S  WAIT     P50      P99  BATCH  INST    MEMORY
a_model_with_a_…   10   1234   2.25    17  800 µs  12.3 ms   15.6     -   310 MiB
small               2   3.50      0     0  800 µs  12.3 ms      -     2  1.95 KiB
small              10   3.50      0     0  800 µs  12.3 ms      -     -  2.93 KiB
idle                1      0      0     0       -        -      -     -         -
"""


def view(models: list[Document], **more: Any) -> Document:
    """A document of these models."""
    return {"seconds": 2.0, "server": SERVER | more, "models": models}


def shown(now: Document, **options: Any) -> str:
    """The table as printed by rich."""
    console = Console(file=io.StringIO(), width=81, **options)
    console.print(drawn(TITLE, now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


COLOURS = {"force_terminal": True, "color_system": "standard"}


def test_by_rich() -> None:
    lines = [line.rstrip() for line in shown(view(MODELS)).splitlines()]
    assert lines == [*HEAD.splitlines(), "", *ROWS.splitlines()]
    assert "\x1b[1;31m 2.25\x1b[0m" in shown(view(MODELS), **COLOURS)  # errors are red


def test_plain_text() -> None:
    """The whole names are shown, below the same lines."""
    lines = plain(TITLE, view(MODELS))
    assert lines[:3] == [*HEAD.splitlines(), ""]
    assert [line.split()[1:] for line in lines[3:]] == [
        row.split()[1:] for row in ROWS.splitlines()
    ]
    assert lines[4].startswith("a_model_with_a_long_name_that_does_not_fit   10")


def test_models_on_upstreams() -> None:
    """Models with several backends or upstreams have more columns; problems stand out."""
    well = model("well", "1", backends={"triton": True}, servers={"a:1": True})
    there = model(
        "there", "1", backends={"triton": False, "onnxruntime": True},
        servers={"a:1": False, "b:1": True},
    )  # fmt: skip
    now = view([model("idle", "1"), there, well])
    told = [line.split()[-2:] for line in plain(TITLE, now)[3:]]
    assert told == [["BACKEND", "SERVERS"], ["-", "-"], ["onnxruntime", "1/2"], ["triton", "1/1"]]
    coloured = shown(now, **COLOURS)
    assert coloured.count("\x1b[1;31m") == 2
    assert "1/2\x1b[0m" in coloured


def test_errors_by_reason() -> None:
    """Errors that no model has seen count too; the main reason of a model's failures is named."""
    kinds = [("http", "infer", "400"), ("grpc", "infer", "NOT_FOUND"), ("http", "infer", "200")]
    answers = [
        dict(zip(("door", "operation", "status"), kind, strict=True)) | {"per_second": 3.0}
        for kind in kinds
    ]
    reasons = {"OTHER": 0.5, "BACKEND": 1.5}
    failing = model("idle", "1", failures_per_second=2.0, failures_per_second_by_reason=reasons)
    lines = plain(TITLE, view([failing], answers=answers))
    assert lines[2] == "answered with errors: 3/s http infer 400, 3/s grpc infer NOT_FOUND"
    assert lines[4].split()[:5] == ["MODEL", "VER", "REQ/S", "ERR/S", "REASON"]
    assert lines[5].split()[:5] == ["idle", "1", "0", "2", "BACKEND"]


@pytest.mark.parametrize(("orders", "places"), [
    (("requests", "p99"), [0, 1, 2, 3]), (("rows", "name", "waiting"), [0, 3, 1, 2]),
    (("memory",), [0, 2, 1, 3]),
])  # fmt: skip
def test_sort_orders(orders: tuple[str, ...], places: list[int]) -> None:
    """Equal ones stand by name, and by version as a number."""
    for order in orders:
        assert ordered(MODELS[::-1], order) == [MODELS[place] for place in places], order


# --- the command


def test_once(headrace: Headrace, server: ServerProcess) -> None:
    words = ("top", "--once", "--interval=0.05", f"--metrics-url={server.metrics}", "--sort=name")
    ended = headrace(*words)
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == f"{server.url}  ready"
    assert lines[3].split()[:3] == ["MODEL", "VER", "REQ/S"]
    assert lines[4].split()[:2] == ["digits", "1"]
    document = headrace(*words, "--json").document
    assert list(document) == ["time", "seconds", "server", "models"]
    assert document["server"]["ready"]
    digits = document["models"][0]
    # A slow machine has it run on a thread.
    assert (digits["model"], digits["instances"]) in [
        ("digits", {"inline": 1}), ("digits", {"thread": 1}),
    ]  # fmt: skip
    assert digits["latency_seconds"] == _NONE


@contextmanager
def top(server: ServerProcess, *words: str) -> Iterator[IO[str]]:
    """Output of the command in a process of its own, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "top", f"--url={server.url}",
         f"--metrics-url=http://{server.metrics}/metrics", *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            yield lines
    finally:
        process.terminate()
        process.wait(10)


def test_known_traffic(headrace: Headrace, server: ServerProcess) -> None:
    with top(server, "--json", "--interval=0.1") as lines:
        json.loads(lines.readline())  # two scrapes
        headrace("infer", "simple", "--random", "--rows=3", "--repeat=20")
        requests = rows = batches = 0.0
        while round(requests) < 20:
            document = json.loads(lines.readline())
            found = next(m for m in document["models"] if m["model"] == "simple")
            requests += found["requests_per_second"] * document["seconds"]
            rows += found["rows_per_second"] * document["seconds"]
            batches += found["batches_per_second"] * document["seconds"]
            if found["requests_per_second"]:
                assert found["rows_per_batch"] == pytest.approx(3)
                assert 0 < found["latency_seconds"]["p50"] <= found["latency_seconds"]["p99"]
                assert document["models"][0] == found  # the busiest come first
    assert (round(requests), round(rows), round(batches)) == (20, 60, 20)


def test_a_pipe_gets_one_table(server: ServerProcess) -> None:
    with top(server, "--interval=0.05") as lines:
        text = lines.read()  # until it ends by itself
    assert "\x1b" not in text
    assert sum(line.startswith("MODEL") for line in text.splitlines()) == 1


@contextmanager
def on_a_terminal(url: str, *, rich: bool) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The other side of the terminal, and the process of the command."""
    missing = {} if rich else {"rich": None}
    program = f"import sys; sys.modules.update({missing}); from headrace.cli import main; main()"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    words = [sys.executable, "-c", program, "top", "--interval=0.1", f"--url={url}"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until(terminal: int, text: bytes) -> bytes:
    """The output up to a text."""
    output = b""
    while text not in output:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, output
        output += os.read(terminal, 65536)
    return output


@pytest.mark.parametrize("rich", [True, False])
def test_a_live_table(rich: bool) -> None:
    """A live table waits for a server that goes away; a new one has another identity."""
    told = listens = "1"

    class Restarting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f'headrace_server_info{{id="{listens}"}} 1\nheadrace_ready 1\n'
            if self.path == "/v2":
                metrics = {"address": "127.0.0.1", "port": http.server_port}
                text = json.dumps({"headrace": {"id": told, "metrics": metrics}})
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Restarting) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}"
        try:
            with on_a_terminal(url, rich=rich) as (terminal, process):
                output = until(terminal, b"ready")
                assert (b"\x1b[?1049h" in output) is rich  # on a page of its own
                listens = "2"
                until(terminal, b"are not those of the server")
                told = "2"
                until(terminal, b"ready")
                process.send_signal(signal.SIGINT)
                if rich:
                    until(terminal, b"\x1b[?1049l")
                assert process.wait(10) == 0
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with one model and metrics on another port."""
    folder = tmp_path_factory.mktemp("other")
    write_model(folder, "alone", identity(Datatype.FP32, ["rows", "length"]))
    with clean_server(folder) as process:
        yield process


def test_the_server_names_its_metrics_port(
    headrace: Headrace, server: ServerProcess, other: ServerProcess
) -> None:
    for process, model in ((server, "digits"), (other, "alone")):
        words = ("top", "--once", "--interval=0.05", "--json", "--sort=name")
        ended = headrace(*words, f"--url={process.url}")
        assert ended.err == ""
        assert ended.document["models"][0]["model"] == model
        told = json.loads(ask(process.http, "GET", "/v2").body)["headrace"]["metrics"]
        assert f"{told['address']}:{told['port']}" == process.metrics


def test_metrics_of_another_server(headrace: Headrace, other: ServerProcess) -> None:
    """A server on the port of another's metrics is asked for its identity."""
    address, _, port = other.metrics.rpartition(":")
    document = {"name": "n", "version": "0", "extensions": []}
    member = {"id": "not that one", "metrics": {"address": address, "port": int(port)}}
    with answering(json.dumps(document | {"headrace": member}).encode(), 1) as url:
        ended = headrace("top", "--once", "--interval=0.05", f"--url={url}")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        f"headrace top: the metrics at http://{other.metrics} are not those of the server at"
        f" {url}; --metrics-url says where metrics are\n"
    )


@pytest.mark.parametrize(("member", "text"), [
    ({"id": "i", "metrics": None}, "has no metrics: --allow-metrics"),
    ({"id": "i"}, "does not say where metrics are"),
    ({"id": "i", "metrics": {"address": "x y", "port": 1}}, "does not say where metrics are"),
])  # fmt: skip
def test_a_server_without_a_metrics_port(headrace: Headrace, member: object, text: str) -> None:
    with answering(json.dumps({"headrace": member}).encode(), 1) as url:
        ended = headrace("top", "--once", f"--url={url}")
    assert (ended.status, ended.out) == (1, "")
    assert text in ended.err


def test_no_metrics(headrace: Headrace, server: ServerProcess) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        ended = headrace("top", "--once", f"--metrics-url={url}")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        f"headrace top: no server at {url}: connection refused;"
        " --metrics-url says where metrics are\n"
    )
    ended = headrace("top", "--once", f"--metrics-url={server.url}")
    assert ended.status == 1
    assert ended.err == (
        "headrace top: Not Found: /docs describes all paths; metrics have a port of their own,"
        " 8002 unless --metrics-port says another\n"
    )


def test_metrics_of_something_else(headrace: Headrace) -> None:
    for body in (b"up 1\n", b"<html>"):
        with answering(body, 1) as url:
            ended = headrace("top", "--once", f"--metrics-url={url}")
        assert (ended.status, ended.out) == (1, "")
        assert ended.err == f"headrace top: {url}/metrics are not metrics of headrace\n"


@contextmanager
def answering(body: bytes, times: int) -> Iterator[str]:
    """The URL of a server that answers `count` connections with one body."""

    def answer(listener: socket.socket) -> None:
        for _ in range(times):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(body) + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_wrong_usage(command: Headrace) -> None:
    assert "--interval: expected a number above 0" in command("top", "--interval=0").err
    assert "--sort: invalid choice: 'x'" in command("top", "--sort=x").err
