"""Requests leave nothing behind in the server's memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_socket import HttpSocket, request
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

_REQUESTS = 10_000
_TOGETHER = 50
_BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()


@pytest.fixture(scope="module")
def alone(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository) as process:
        yield process


@pytest.mark.slow
def test_requests_make_no_cycles(alone: ServerProcess) -> None:
    """Objects are freed as soon as their request is answered, without the garbage collector."""

    def collected() -> float:
        return scraper.now().value("python_gc_objects_collected_total")

    data = request("POST", "/v2/models/row_sum/infer", _BODY) * _TOGETHER
    with Scraper(alone.metrics) as scraper, HttpSocket(alone.http) as connection:
        before = collected()
        for _ in range(_REQUESTS // _TOGETHER):
            connection.send(data)
            for _ in range(_TOGETHER):
                assert connection.receive().status == 200
        assert collected() - before < _REQUESTS / 100
