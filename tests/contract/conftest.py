"""One server process for the whole suite, and a client for each transport."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.tensors import Array
from tests.contract.repository import (
    write_busy_repository,
    write_repository,
    write_small_repository,
)
from tests.support.client import Client
from tests.support.grpc_client import GrpcClient
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess
from tests.support.transports import grpc_transport

CLIENTS: dict[str, Callable[[ServerProcess], Client]] = {
    "http": lambda server: HttpClient(server.url, binary=False),
    "http-binary": lambda server: HttpClient(server.url, binary=True),
    "grpc": lambda server: GrpcClient(server.grpc),
}
# The same answers are expected of what is fast and of what it was written after.
CARRIERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "reference": ("--http-fast-path=false", "--grpc-transport=grpcio"),
    "frontends": ("--frontends=2",),
}
# What was written first is compared with in the slow tests alone.
EACH_CARRIER = [
    pytest.param(name, marks=pytest.mark.slow) if name == "reference" else name for name in CARRIERS
]
Rounds = Callable[[float], Array]
_TRIAL_ROUNDS = 20_000


# For extensions, which front ends have the engine answer, or pass on as they pass on everything.
FIRST_CARRIER = [
    pytest.param(name, marks=pytest.mark.slow) if name != "default" else name for name in CARRIERS
]


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite's model repository."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    return root


@pytest.fixture(scope="session", params=EACH_CARRIER)
def server(request: pytest.FixtureRequest, repository: Path) -> Iterator[ServerProcess]:
    """The suite's server, by each way to carry requests. It must not have met a bug in the end."""
    options = ("--allow-client-shm", *CARRIERS[request.param])
    with ServerProcess(repository, options=options) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log


@pytest.fixture(scope="session", params=CLIENTS)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """The suite's server through each transport and form of tensors."""
    with CLIENTS[request.param](server) as client:
        yield client


@pytest.fixture(scope="session", params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """The suite's server through each transport, for what the form of tensors has no part in."""
    with CLIENTS[request.param](server) as client:
        yield client


@pytest.fixture(scope="session")
def grpc_client(server: ServerProcess) -> Iterator[GrpcClient]:
    """The suite's server over gRPC."""
    with GrpcClient(server.grpc) as client:
        yield client


@pytest.fixture(scope="session")
def metrics(server: ServerProcess) -> Iterator[Scraper]:
    """The metrics of the suite's server."""
    with Scraper(server.metrics) as scraper:
        yield scraper


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that are under way at the same time."""
    with ThreadPoolExecutor(64) as executor:
        yield executor


@pytest.fixture(scope="session")
def busy_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that take as long as a request says."""
    root = tmp_path_factory.mktemp("busy")
    write_busy_repository(root)
    return root


@pytest.fixture(scope="session")
def busy_server(request: pytest.FixtureRequest, busy_repository: Path) -> Iterator[ServerProcess]:
    """A server whose models take as long as a request says."""
    with ServerProcess(busy_repository, options=grpc_transport(request)) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log


@pytest.fixture(scope="session")
def busy_metrics(busy_server: ServerProcess) -> Iterator[Scraper]:
    """The metrics of the server with slow models."""
    with Scraper(busy_server.metrics) as scraper:
        yield scraper


@pytest.fixture(scope="session")
def rounds(busy_server: ServerProcess) -> Rounds:
    """The input that keeps a `spin` model busy for so many seconds on this machine."""
    with GrpcClient(busy_server.grpc) as client:
        trial = {"ROUNDS": np.array([[_TRIAL_ROUNDS]])}
        answers = [
            client.infer("spin", trial, parameters={"headrace_timing": True}) for _ in range(3)
        ]
    fastest = min(answer.parameters["compute_us"] for answer in answers)
    return lambda seconds: np.array([[int(_TRIAL_ROUNDS * seconds * 1e6 / fastest)]])


@pytest.fixture(scope="session")
def small_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What servers with unusual settings serve."""
    root = tmp_path_factory.mktemp("small")
    write_small_repository(root)
    return root


@pytest.fixture(scope="session")
def narrow(small_repository: Path) -> Iterator[ServerProcess]:
    """A server that takes little at once, and logs every request as JSON."""
    options = (
        "--max-request-bytes=4096", "--max-admitted-requests=1",
        "--access-log", "--log-format=json",
    )  # fmt: skip
    with ServerProcess(small_repository, options=options) as process:
        yield process
        assert "bug " not in process.log
