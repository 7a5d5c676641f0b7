"""A server with the example models, and one with models of controlled duration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.busy_model import cost_of_a_second, write_busy_model
from tests.support.server_process import ServerProcess, onnx_examples
from tests.support.transports import grpc_transport


@dataclass(frozen=True, slots=True)
class Served:
    """Addresses of the server as host:port, and the COST of a second of its busy model."""

    http: str
    grpc: str
    metrics: str
    second: int


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    write_busy_model(path)
    return path


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server; no effect of a test on it may outlast the test."""
    options = ("--allow-client-shm", *grpc_transport(request))
    models = onnx_examples(tmp_path_factory.mktemp("examples"), "storyteller")
    with ServerProcess(models, repository, options=options) as server:
        yield Served(server.http, server.grpc, server.metrics, cost_of_a_second(server.http))
        assert server.stop() == 0
