"""Model files that change while served: no request is lost or mixes versions."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.support.http_client import HttpClient
from tests.support.http_socket import HttpSocket
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess
from tests.support.swapping import SOURCE, Callers, Held, ask, content, resident

NAMES = ("code", "graph")
_GROWTH = 24 << 20  # bytes, over many swaps of both models


class Served:
    """A server of two files, `code.py` and `graph.onnx`, and the numbers that they answer with."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self.files = {"code": folder / "code.py", "graph": folder / "graph.onnx"}
        self.numbers = dict.fromkeys(NAMES, 1)

    def publish(self, name: str, data: bytes) -> None:
        """Replace a file atomically."""
        other = self.files[name].with_suffix(".tmp")
        other.write_bytes(data)
        os.utime(other, (1_000_000, 1_000_000))  # so that it is certainly complete
        other.replace(self.files[name])

    def await_number(self, name: str, number: int) -> None:
        """Wait until a model answers with a number."""
        with HttpClient(self.server.url, binary=True) as client:
            until(lambda: ask(client, name) == number, f"{name} to be {number}", seconds=60)
        self.numbers[name] = number

    def reason(self, name: str) -> str:
        """Reason of a serving model in the index."""
        with HttpClient(self.server.url, binary=True) as client:
            [found] = [model for model in client.index().models if model.name == name]
        assert found.state == "READY"
        return found.reason


def start(folder: Path, *options: str) -> ServerProcess:
    empty = folder / "empty"
    empty.mkdir()
    files = [str(folder / "code.py"), str(folder / "graph.onnx")]
    (folder / "code.py").write_bytes(content("code", 1))
    (folder / "graph.onnx").write_bytes(content("graph", 1))
    return ServerProcess(empty, options=["--model-file", *files, *options])


@pytest.fixture(
    scope="module", params=["one process", pytest.param("front ends", marks=pytest.mark.slow)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server of all tests that leave it unchanged."""
    folder = tmp_path_factory.mktemp("files")
    options = ["--frontends=2"] if request.param == "front ends" else []
    with start(folder, *options) as server:
        yield Served(server, folder)
        assert server.stop() == 0
        assert "bug " not in server.log, server.log


def swap_under_load(served: Served, times: int) -> None:
    with Callers(served.server, served.numbers, 4) as callers:
        for _ in range(times):
            for name in NAMES:
                served.publish(name, content(name, served.numbers[name] + 1))
            for name in NAMES:
                served.await_number(name, served.numbers[name] + 1)
    assert callers.failures == []
    assert callers.answers > 0


def test_no_request_is_lost_or_mixes_versions(served: Served) -> None:
    swap_under_load(served, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_swaps_leave_nothing_behind(served: Served) -> None:
    swap_under_load(served, 3)  # until the first requests have allocated everything
    before, memory = Held.of(served.server.pid), resident(served.server.pid)
    swap_under_load(served, 40)
    assert resident(served.server.pid) - memory < _GROWTH
    until(lambda: Held.of(served.server.pid) == before, f"what was held before: {before}", 60)


BROKEN = {
    "code": (b"def f(:\n", "SyntaxError: invalid syntax (code.py, line 1)"),
    "graph": (b"nothing", "graph.onnx is not a valid ONNX model"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_file_leaves_the_old_one_serving(served: Served, name: str) -> None:
    data, told = BROKEN[name]
    number = served.numbers[name]
    with Callers(served.server, served.numbers, 4) as callers:
        served.publish(name, data)
        until(lambda: told in served.reason(name), "the reason in the index")
        served.await_number(name, number)
        served.publish(name, content(name, number + 1))
        served.await_number(name, number + 1)
    assert callers.failures == []
    assert served.reason(name) == ""
    served.server.await_logged(f"failed to load {name} version 1: ")
    served.server.await_logged(f"{name} version 1 goes on as it was loaded before")
    if name == "code":
        served.server.await_logged("    def f(:\n")
    with Scraper(served.server.metrics) as metrics:
        assert metrics.now().value("headrace_model_loads_total", model=name, outcome="failure") > 0


@pytest.mark.parametrize("name", NAMES)
def test_several_quick_changes_end_with_the_last(served: Served, name: str) -> None:
    first = served.numbers[name]
    for number in range(first + 1, first + 20):
        data = content(name, number)
        with served.files[name].open("wb", buffering=0) as file:  # in place, and in two halves
            file.write(data[: len(data) // 2])
            file.write(data[len(data) // 2 :])
    served.await_number(name, first + 19)


def test_a_request_in_pieces_runs_on_the_version_at_its_end(served: Served) -> None:
    number = served.numbers["code"]
    row = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [0]}
    body = json.dumps({"inputs": [row]}).encode()
    head = f"POST /v2/models/code/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with HttpSocket(served.server.http) as connection:
        connection.send(head.encode() + body[:10])
        served.publish("code", content("code", number + 1))
        served.await_number("code", number + 1)
        connection.send(body[10:])
        outputs = connection.receive().document["outputs"]
    assert [output["data"] for output in outputs] == [[number + 1]] * 2


@pytest.mark.slow
def test_a_file_that_the_model_imports(served: Served) -> None:
    number = served.numbers["code"]
    beside = served.files["code"].with_name("beside.py")
    beside.write_text(f"NUMBER = {number + 1}")
    source = dedent(SOURCE).format(number="beside.NUMBER", more="import beside")
    served.publish("code", source.encode())
    served.await_number("code", number + 1)
    beside.write_text(f"NUMBER = {number + 2}")
    served.await_number("code", number + 2)
    served.server.await_logged("beside.py has changed: loading model code again")
    assert not beside.with_name("__pycache__").exists()
    away = beside.rename(beside.with_name("away"))
    until(lambda: "ModuleNotFoundError" in served.reason("code"), "the reason in the index")
    away.rename(beside)
    until(lambda: served.reason("code") == "", "the reason to be gone")
    file = served.files["code"].rename(away)
    until(lambda: "code.py is gone: the loaded model stays" in served.server.log, "a word of it")
    file.rename(served.files["code"])
    served.await_number("code", number + 2)


def alive(process: psutil.Process) -> bool:
    """True if a process is alive; an orphan may take a while until it is reaped."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_shutdown_during_a_load(tmp_path: Path) -> None:
    marker = tmp_path / "loading"
    more = f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    with start(tmp_path, "--exit-timeout-secs=200") as server:  # it does not wait for the load
        served = Served(server, tmp_path)
        served.publish("code", dedent(SOURCE).format(number=2, more=more).encode())
        until(lambda: marker.exists() and marker.read_text() != "", "the change to be loaded")
        worker = psutil.Process(int(marker.read_text()))
        assert server.stop() == 0
        until(lambda: not alive(worker), "the worker to end")
        assert "every admitted request was answered" in server.log
