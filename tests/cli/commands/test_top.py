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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.api.operations import Document
from headrace.cli.commands.top import activity, drawn, ordered, plain, quantile
from tests.cli.conftest import Headrace
from tests.models.onnx_graphs import identity, write_model
from tests.protocol.strategies import PROPERTY
from tests.support.server_process import ServerProcess, kept_port

_BOUNDS = [0.001, 0.01]


def version(name: str, number: str, **more: Any) -> Document:
    """A model of the status."""
    counted = dict.fromkeys(("requests", "failures", "rows", "batches", "waiting"), 0)
    named: Document = {
        key: {} for key in ("failures_by_reason", "instances", "backends", "servers")
    }
    times: Document = {key: [] for key in ("latency", "queue", "compute")}
    own = {"name": name, "version": number, "state": "READY", "memory_bytes": 0}
    return counted | named | times | own | more


def reading(time: float, refused: int, cpu: float, *models: Document, **more: Any) -> Document:
    """A document of the status."""
    limit = {"name": "requests", "used": 3, "limit": 100, "refused": refused}
    return {
        "time": time, "bounds_seconds": _BOUNDS, "models": list(models), "limits": [limit],
        "server": {"id": "a", "started": 1.0, "ready": True}, "answers": [], "degraded": [],
        "downloads": [], "processes": [{"resident_bytes": 2 << 20, "cpu_seconds": cpu}], **more,
    }  # fmt: skip


def _answers(*counts: tuple[str, str, int]) -> list[Document]:
    return [
        {"door": door, "operation": "infer", "status": status, "count": count}
        for door, status, count in counts
    ]


_BEFORE = reading(
    10.0, 0, 1.0,
    version("m", "1", requests=10, rows=30, batches=10, latency=[10],
            failures_by_reason={"OTHER": 1, "BACKEND": 1}),
    answers=_answers(("http", "200", 5), ("grpc", "OK", 7)),
)  # fmt: skip
_AFTER = reading(
    12.0, 6, 2.0,
    version("m", "1", requests=30, rows=110, batches=30, waiting=5, latency=[20, 10],
            failures_by_reason={"OTHER": 2, "BACKEND": 2}, memory_bytes=1 << 20,
            instances={"thread": 2}, backends={"triton": True}, servers={"a:1": False}),
    version("m", "2", requests=4),
    version("n", "1", state="UNAVAILABLE"),
    answers=_answers(("http", "200", 9), ("http", "400", 6), ("grpc", "OK", 7),
                     ("grpc", "NOT_FOUND", 2)),
    degraded=[{"kind": "model", "name": "n", "version": "1", "reason": "broken"}],
    downloads=[{"model": "o", "store": "s3://b", "bytes": 2000, "fetched_bytes": 700}],
)  # fmt: skip
_NONE = {"p50": None, "p90": None, "p99": None}


def test_rates_between_two_readings() -> None:
    now = activity(_BEFORE, _AFTER)
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
        "degraded": [{"kind": "model", "name": "n", "version": "1", "reason": "broken"}],
        "downloads": [{"model": "o", "store": "s3://b", "bytes": 2000, "fetched_bytes": 700,
                       "bytes_per_second": None}],
    })  # fmt: skip


def test_rates_of_downloads() -> None:
    """Rates count the bytes between two readings, not those that were there before."""
    [before] = _AFTER["downloads"]
    later = _AFTER | {"time": 14.0, "downloads": [before | {"fetched_bytes": 1700}]}
    [found] = activity(_AFTER, later)["server"]["downloads"]
    assert found["bytes_per_second"] == 500


def test_counters_of_a_reloaded_model() -> None:
    now = activity(_AFTER, _BEFORE | {"time": 13.0})
    [found] = now["models"]
    assert (found["requests_per_second"], found["rows_per_second"]) == (10, 30)
    assert found["failures_per_second"] == 2
    assert found["latency_seconds"]["p50"] == 0.0005
    assert now["server"]["cpu"] == 1


def test_a_restarted_server() -> None:
    """Everything was counted since its start."""
    now = activity(_AFTER, _BEFORE | {"server": {"id": "b", "started": 8.0, "ready": False}})
    assert (now["seconds"], now["server"]["ready"]) == (2, False)
    assert now["models"][0]["requests_per_second"] == 5


def test_without_models() -> None:
    now = activity(reading(1.0, 0, 0.0), reading(1.0, 0, 0.0))
    assert (now["models"], now["server"]["answers"]) == ([], [])


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
    "resident_bytes": 400 * 2**20, "cpu": 0.43, "answers": [], "degraded": [],
    "downloads": [],
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
    console.print(drawn(TITLE, now, console.height))
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


def test_names_never_move_the_cursor() -> None:
    odd = model("a\x1b[2J", "1", backends={"b\x1b[2J": True})
    for text in ("\n".join(plain(TITLE, view([odd]))), shown(view([odd]))):
        assert "\x1b" not in text
    assert plain(TITLE, view([odd]))[4].startswith("a\\x1b[2J ")


def test_more_models_than_lines() -> None:
    many = [model(f"m{number:03}", "1") for number in range(200)]
    console = Console(file=io.StringIO(), width=81, height=20)
    with console.capture() as captured:
        console.print(drawn(TITLE, view(many), console.height))
    lines = captured.get().rstrip().splitlines()
    assert len(lines) <= 20
    assert lines[-1] == f"and {200 - len(lines) + 5} more"


def test_degraded_lines() -> None:
    found = [
        {"kind": "model", "name": f"m{number}", "version": "1", "reason": "broken\x1b[2J"}
        for number in range(7)
    ]
    lines = plain(TITLE, view([model("idle", "1")], degraded=found))
    assert lines[2] == "degraded: model m0 1: broken\\x1b[2J"
    assert lines[7] == "degraded: 7 in all, see headrace status"


def test_downloads_stand_above_the_models() -> None:
    new = {"model": "a\x1b[2J", "fetched_bytes": 0, "bytes": 3 << 30, "bytes_per_second": None}
    known = {"model": "b", "fetched_bytes": 1 << 30, "bytes": 3 << 30, "bytes_per_second": 5 << 20}
    lines = plain(TITLE, view([model("idle", "1")], downloads=[new, known]))
    assert lines[2:4] == [
        "downloading: a\\x1b[2J, 0 B of 3 GiB, -/s",
        "downloading: b, 1 GiB of 3 GiB, 5 MiB/s",
    ]


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
    words = ("top", "--once", "--interval=0.05", "--sort=name")
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
        [sys.executable, "-m", "headrace", "top", f"--url={server.url}", *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            yield lines
    finally:
        process.terminate()
        process.wait(60)


def test_known_traffic(headrace: Headrace, server: ServerProcess) -> None:
    with top(server, "--json", "--interval=0.1") as lines:
        json.loads(lines.readline())  # two readings
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


def test_a_live_table(tmp_path: Path) -> None:
    """A live table waits for a server that goes away, and goes on with the next one."""
    write_model(tmp_path, "alone", identity())
    with (
        kept_port() as options,
        ServerProcess(tmp_path, options=options) as server,
        on_a_terminal(server.url, rich=True) as (page, rich),
        on_a_terminal(server.url, rich=False) as (lines, plain_text),
    ):
        assert b"\x1b[?1049h" in until(page, b"alone")  # on a page of its own
        assert b"\x1b[?1049h" not in until(lines, b"alone")
        server.stop()
        for terminal in (page, lines):
            until(terminal, b"no server at")
        with ServerProcess(tmp_path, options=options):
            for terminal, process in ((page, rich), (lines, plain_text)):
                until(terminal, b"alone")
                process.send_signal(signal.SIGINT)
            until(page, b"\x1b[?1049l")
            for process in (rich, plain_text):
                assert process.wait(30) == 0


def test_no_server(headrace: Headrace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        ended = headrace("top", "--once", f"--url={url}")
    assert (ended.status, ended.out) == (1, "")
    assert f"no server at {url}: connection refused" in ended.err


def test_wrong_usage(command: Headrace) -> None:
    assert "--interval: expected a number above 0" in command("top", "--interval=0").err
    assert "--sort: invalid choice: 'x'" in command("top", "--sort=x").err
