"""`headrace top`: figures of known traffic, and its display on a terminal."""

import fcntl
import io
import json
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import IO, Any

import pytest
from rich.console import Console

from headrace.cli.commands.top_table import (
    AnswerRate,
    ServerActivity,
    VersionActivity,
    View,
    document,
    ordered,
    plain_lines,
    rich_lines,
)
from headrace.core.datatypes import Datatype
from tests.cli.conftest import Headrace
from tests.models.onnx_graphs import identity, write_model
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess, clean_server

_NONE = {"p50": None, "p90": None, "p99": None}
_BUSY = {"p50": 0.0008, "p90": 0.0041, "p99": 0.0123}
VERSIONS = [
    VersionActivity("idle", "1", 0, 0, 0, 0, 0, _NONE, _NONE, _NONE, None),
    VersionActivity(
        "a_model_with_a_long_name_that_does_not_fit", "10", 1234.5, 2.25, 5000, 321.0, 17,
        _BUSY, _BUSY, _BUSY, 310 * 2.0**20,
    ),
    VersionActivity("small", "2", 3.5, 0, 3.5, 3.5, 0, _BUSY, _BUSY, _BUSY, 2000, {"process": 2}),
    VersionActivity("small", "10", 3.5, 0, 3.5, 3.5, 0, _BUSY, _BUSY, _BUSY, 3000),
]  # fmt: skip
ACTIVITY = ServerActivity(2.0, True, 0.0, 12, 1000, 400 * 2.0**20, 0.43, VERSIONS)
VIEW = View(
    "http://127.0.0.1:8000",
    ACTIVITY,
    "requests",
)
SHOWN = """\
http://127.0.0.1:8000  ready
1242 req/s  2.25 err/s  0 refused/s  12 of 1000 under way  400 MiB  43% CPU

MODEL             VER  REQ/S  ERR/S  WAIT     P50      P99  BATCH  INST    MEMORY
a_model_with_a_…   10   1234   2.25    17  800 µs  12.3 ms   15.6     -   310 MiB
small               2   3.50      0     0  800 µs  12.3 ms      1     2  1.95 KiB
small              10   3.50      0     0  800 µs  12.3 ms      1     -  2.93 KiB
idle                1      0      0     0       -        -      -     -         -
"""


def test_plain_text() -> None:
    assert plain_lines(VIEW, 81) == SHOWN.splitlines()
    cut = plain_lines(VIEW, 81, 1)
    assert (len(cut), cut[-1]) == (6, "and 3 more")
    assert "QUEUE P99" in plain_lines(VIEW, 200)[3]


def test_models_on_upstreams() -> None:
    """Models with several backends or upstreams have more columns; problems stand out."""
    there = VersionActivity(
        "there", "1", 0, 0, 0, 0, 0, _NONE, _NONE, _NONE, None,
        backends={"triton": False, "onnxruntime": True}, servers={"a:1": False, "b:1": True},
    )  # fmt: skip
    well = replace(there, model="well", backends={"triton": True}, servers={"a:1": True})
    view = replace(VIEW, activity=replace(ACTIVITY, versions=[well, there, VERSIONS[0]]))
    told = [line.split()[-2:] for line in plain_lines(view, 99)[3:]]
    assert told == [["BACKEND", "SERVERS"], ["-", "-"], ["onnxruntime", "1/2"], ["triton", "1/1"]]
    coloured = shown(view, 99, **COLOURS)
    assert coloured.count("\x1b[1;31m") == 2
    assert "\x1b[1;31m    1/2\x1b[0m" in coloured


def test_errors_by_reason() -> None:
    """Errors that no model has seen count too; the main reason of a model's failures is named."""
    kinds = [("http", "infer", "400"), ("grpc", "infer", "NOT_FOUND"), ("http", "infer", "200")]
    answers = [AnswerRate(*kind, 3.0) for kind in kinds]
    failing = replace(
        VERSIONS[0],
        failures_per_second=2.0,
        failures_per_second_by_reason={"OTHER": 0.5, "BACKEND": 1.5},
    )
    view = replace(VIEW, activity=replace(ACTIVITY, answers=answers, versions=[failing]))
    lines = plain_lines(view, 99)
    assert lines[2] == "answered with errors: 3/s http infer 400, 3/s grpc infer NOT_FOUND"
    assert lines[4].split()[:5] == ["MODEL", "VER", "REQ/S", "ERR/S", "REASON"]
    assert lines[5].split()[:5] == ["idle", "1", "0", "2", "BACKEND"]
    written = document(view, 1.0)
    assert written["server"]["answers"][0] == {
        "door": "http", "operation": "infer", "status": "400", "per_second": 3.0,
    }  # fmt: skip
    reasons = written["models"][0]["failures_per_second_by_reason"]
    assert reasons == failing.failures_per_second_by_reason


def shown(view: View, width: int, **options: Any) -> str:
    """The table as printed by rich."""
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(rich_lines(view, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


COLOURS = {"force_terminal": True, "color_system": "standard"}


def test_by_rich() -> None:
    assert [line.rstrip() for line in shown(VIEW, 81).splitlines()] == SHOWN.splitlines()
    assert "\x1b[1;31m 2.25\x1b[0m" in shown(VIEW, 81, **COLOURS)  # errors are red


def test_before_the_first_request() -> None:
    view = View("http://h:1", None, "name", "looking ...")
    assert plain_lines(view, 80)[:2] == ["http://h:1", "looking ..."]
    assert "looking ..." in shown(view, 80)


@pytest.mark.parametrize(("order", "names"), [
    ("requests", ["a_model", "small", "small", "idle"]),
    ("name", ["a_model", "idle", "small", "small"]),
    ("memory", ["a_model", "small", "small", "idle"]),
    ("waiting", ["a_model", "idle", "small", "small"]),
    ("p99", ["a_model", "small", "small", "idle"]),
])  # fmt: skip
def test_sort_orders(order: str, names: list[str]) -> None:
    assert [version.model[:7] for version in ordered(VERSIONS, order)] == names


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
    assert digits["latency_seconds"] == {"p50": None, "p90": None, "p99": None}


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


@pytest.mark.parametrize("library", ["rich", "none"])
def test_on_a_terminal(server: ServerProcess, library: str) -> None:
    program = "import sys; sys.modules.update({}); from headrace.cli import main; main()"
    program = program.format({} if library == "rich" else {"rich": None, "rich.console": None})
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    words = [sys.executable, "-c", program, "top", "--interval=0.1", "--sort=memory",
             f"--url={server.url}", f"--metrics-url={server.metrics}"]  # fmt: skip
    environment = os.environ | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        output = _until(ours, b"and 5 more")
        assert b"\x1b[?1049h" in output  # on a page of its own
        assert b"looking ..." in output
        os.write(ours, b"n")
        _until(ours, b"digits")
        os.write(ours, b"q")
        _until(ours, b"\x1b[?1049l")
        assert process.wait(10) == 0
        assert termios.tcgetattr(theirs) == before  # key presses are echoed again
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _until(terminal: int, text: bytes) -> bytes:
    output = b""
    while text not in output:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, output
        output += os.read(terminal, 65536)
    return output


def test_a_pipe_gets_one_table(server: ServerProcess) -> None:
    with top(server, "--interval=0.05") as lines:
        text = lines.read()  # until it ends by itself
    assert "\x1b" not in text
    assert sum(line.startswith("MODEL") for line in text.splitlines()) == 1


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
    named = json.dumps(document | {"headrace": {"id": "not that one"}})
    with answering(named.encode(), 1) as url:
        where = f"--metrics-url=http://{other.metrics}"
        ended = headrace("top", "--once", "--interval=0.05", f"--url={url}", where)
    assert ended.status == 1
    assert f"the metrics at http://{other.metrics} are not those of the server at" in ended.err


def test_a_restarted_server(headrace: Headrace) -> None:
    """The new server has another identity, and its metrics may be on another port."""
    starts = 0

    class Restarting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal starts
            text = f'headrace_server_info{{id="{starts}"}} 1\nheadrace_ready 1\n'
            if self.path == "/v2":
                starts += self.server is first
                port = (first if starts == 1 else second).server_port
                metrics = {"address": "127.0.0.1", "port": port}
                text = json.dumps({"headrace": {"id": str(starts), "metrics": metrics}})
            elif starts == 1 and self.seen:
                text = text.replace('"1"', '"another"')
            else:
                type(self).seen = True
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        seen = False

        def log_message(self, *_: object) -> None: ...

    with (
        HTTPServer(("127.0.0.1", 0), Restarting) as first,
        HTTPServer(("127.0.0.1", 0), Restarting) as second,
    ):
        threads = [threading.Thread(target=s.serve_forever, args=(0.01,)) for s in (first, second)]
        for thread in threads:
            thread.start()
        url = f"--url=http://127.0.0.1:{first.server_port}"
        ended = headrace("top", "--once", "--interval=0.01", "--json", url)
        for one in (first, second):
            one.shutdown()
        for thread in threads:
            thread.join()
    assert (ended.status, ended.err, starts) == (0, "", 2)


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
    for body, text in ((b"up 1\n", "are not metrics of headrace"), (b"<html>", "not a line of")):
        with answering(body, 1) as url:
            ended = headrace("top", "--once", f"--metrics-url={url}")
        assert (ended.status, ended.out) == (1, "")
        assert text in ended.err


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
