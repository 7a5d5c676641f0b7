"""The activator with real servers: nothing wakes one but a request, and the first is answered."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.models import onnx_graphs
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.http_socket import HttpSocket, ask
from tests.support.remote import free_ports
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

ROW = np.ones((1, 4), np.float32)


class ActivatorProcess:
    """An activator in a process of its own, for servers on given ports."""

    def __init__(self, http: int, grpc: int, *options: str) -> None:
        self.servers = http, grpc
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "activator", f"0=127.0.0.1:{http}",
             f"0=127.0.0.1:{grpc}", f"--ready=http://127.0.0.1:{http}/v2/health/ready",
             "--metrics-port=0", *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline() for _ in range(3)]
        found = [re.search(r"127\.0\.0\.1:\d+", line) for line in lines]
        self.http, self.grpc, self.metrics = (each[0] for each in found if each is not None)

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(60)

    def __enter__(self) -> "ActivatorProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @contextmanager
    def server(self, models: Path) -> Iterator[ServerProcess]:
        """A server on the ports to which connections are passed on."""
        http, grpc = self.servers
        options = [f"--http-port={http}", f"--grpc-port={grpc}"]
        with ServerProcess(models, options=options) as server:
            yield server


@pytest.fixture
def models(tmp_path: Path) -> Path:
    graph = onnx_graphs.identity(dims=("rows", "length"))
    onnx_graphs.write_model(tmp_path, "m", graph, "max_batch_size: 8")
    return tmp_path


@pytest.fixture
def activator() -> Iterator[ActivatorProcess]:
    http, grpc = free_ports(2)
    with ActivatorProcess(http, grpc) as process:
        yield process


def waiting(scraper: Scraper) -> float:
    return scraper.now().value("headrace_activator_waiting")


def infer(client: Client) -> None:
    np.testing.assert_array_equal(client.infer("m", {"INPUT0": ROW})["OUTPUT0"], ROW)


@pytest.mark.parametrize("connect", [
    lambda activator: HttpClient(f"http://{activator.http}", binary=False),
    lambda activator: GrpcClient(activator.grpc),
], ids=["http", "grpc"])  # fmt: skip
def test_the_first_requests_are_answered(
    activator: ActivatorProcess, models: Path, connect: Callable[[ActivatorProcess], Client]
) -> None:
    # As an autoscaler does: the metric is read, and a server is started.
    with Scraper(activator.metrics) as scraper, ThreadPoolExecutor(4) as pool:
        clients = [connect(activator) for _ in range(4)]
        try:
            asked = [pool.submit(infer, client) for client in clients]
            until(lambda: waiting(scraper) >= 1, "requests that wait")
            with activator.server(models):
                for each in asked:
                    each.result(120)
                assert waiting(scraper) == 0
                for client in clients:
                    infer(client)
        finally:
            for client in clients:
                client.close()
        until(
            lambda: scraper.now().value("headrace_activator_connections") == 0,
            "the end of connections with their server",
        )


def test_a_connection_alone_wakes_nothing(activator: ActivatorProcess, models: Path) -> None:
    host, _, port = activator.grpc.partition(":")
    with Scraper(activator.metrics) as scraper, socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        assert idle.recv(9) == b"\0\0\0\x04\0\0\0\0\0"
        assert waiting(scraper) == 0


def test_a_request_without_a_server_is_refused_in_the_end() -> None:
    http, grpc = free_ports(2)
    with ActivatorProcess(http, grpc, "--wait-secs=0.2") as process:
        answer = ask(process.http, "GET", "/v2")
        assert (answer.status, answer.error) == (503, "no server has become ready")
        with Scraper(process.metrics) as scraper:
            assert scraper.now().value("headrace_activator_given_up_total") == 1


def test_large_bodies_pass(activator: ActivatorProcess, models: Path) -> None:
    array = np.arange(2_000_000, dtype=np.float32).reshape(1, -1)
    with activator.server(models), HttpClient(f"http://{activator.http}", binary=True) as client:
        found = client.infer("m", {"INPUT0": array})["OUTPUT0"]
    np.testing.assert_array_equal(found, array)


def test_connections_under_way_end_before_the_activator(
    activator: ActivatorProcess, models: Path
) -> None:
    with activator.server(models):
        with HttpSocket(activator.http) as connection:
            assert connection.ask("GET", "/v2/health/live").status == 200
            ended = threading.Thread(target=activator.end)
            ended.start()
            assert json.loads(connection.ask("GET", "/v2/health/ready").body) == {"ready": True}
        ended.join(60)
        assert not ended.is_alive()
