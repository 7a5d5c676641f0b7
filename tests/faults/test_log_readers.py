"""The log's reader halts, its disk is full, or a model floods it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models.python_models import tensors, write_python_model
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, onnx_examples

pytestmark = pytest.mark.slow

_LONG = "x" * 4000
_REQUESTS = 2_500  # more lines than the queue holds


class Unread:
    """A pipe that is not read before `rest`."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self._reading, self.writing = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")

    def rest(self) -> str:
        """Everything until the last writer has ended."""
        self.writing.close()
        return self._reading.read().decode()

    def line_with(self, text: bytes) -> bytes:
        """Read up to a line with this text."""
        for line in self._reading:
            if text in line:
                return line
        raise AssertionError(f"there is no line with {text!r}")

    def close(self) -> None:
        self.writing.close()
        self._reading.close()


@pytest.fixture
def unread() -> Iterator[Unread]:
    pipe = Unread()
    yield pipe
    pipe.close()


def ask_often(server: ServerProcess, count: int) -> None:
    """Send requests that are all answered, each with a long line in the log."""
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        for _ in range(count):
            assert client.get(f"/v2/models/{_LONG}").status_code == 404
        assert client.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("front_ends", [0, 1])
def test_a_halted_log_reader(unread: Unread, tmp_path: Path, front_ends: int) -> None:
    options = ["--access-log", f"--frontends={front_ends}"]
    with (
        ServerProcess(onnx_examples(tmp_path), options=options, errors=unread.writing) as server,
        Scraper(server.metrics) as scraper,
    ):

        def dropped() -> float:
            return scraper.now().value("headrace_log_lines_dropped_total")

        assert dropped() == 0
        ask_often(server, _REQUESTS)
        until(lambda: dropped() > 0, "lines were dropped")
        line = unread.line_with(b"could not be written").decode()
        assert re.search(r"WARNING .*\d+ lines of the log could not be written", line)
        ask_often(server, 1)
        assert unread.line_with(b"/v2/health/live ")
        assert server.stop() == 0
    assert "stopped; every admitted request was answered" in unread.rest()


def test_a_full_disk_is_logged_once(tmp_path: Path) -> None:
    options = ["--access-log", "--log-file=/dev/full"]
    with (
        ServerProcess(onnx_examples(tmp_path), options=options) as server,
        Scraper(server.metrics) as scraper,
    ):
        ask_often(server, 100)
        until(
            lambda: scraper.now().value("headrace_log_lines_dropped_total") > 100,
            "lines were dropped",
        )
        assert server.stop() == 0
        [line] = server.log.splitlines()
        assert "cannot write the log /dev/full: No space left on device" in line


FLOODING = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            for _ in range(200):
                print("x" * 100_000)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())])
                    for r in requests]
"""


def test_a_models_output_is_limited_in_bytes(tmp_path: Path) -> None:
    config = tensors("input", ("X", "INT32", "1")) + tensors("output", ("Y", "INT32", "1"))
    write_python_model(tmp_path, "flooding", FLOODING, config)
    body = {"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": [1]}]}
    with ServerProcess(tmp_path) as server:
        url = f"{server.url}/v2/models/flooding/infer"
        assert httpx.post(url, json=body, timeout=60, verify=False).status_code == 200
        assert server.stop() == 0
        # 20 MB within seconds, of which each may have a megabyte and a line.
        assert server.log.count("x") < 15 << 20
