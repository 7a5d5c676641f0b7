"""A server with a model that can be kept busy, watched for what a fault leaves behind."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.busy_model import cost_of_a_second, write_busy_model
from tests.support.server_process import ServerProcess, onnx_examples
from tests.support.transports import grpc_transport
from tests.support.watching import Resources, admitted, until

_FILES_SPARE = 2  # gRPC's own poller opens some late


@dataclass(frozen=True, slots=True)
class Busy:
    """A running server, and how much COST of its model `busy` is a second."""

    server: ServerProcess
    second: int


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with `busy`, and with `busy_alone`, which runs one request at a time."""
    path = tmp_path_factory.mktemp("repository")
    write_busy_model(path)
    write_busy_model(path, "busy_alone", max_batch_size=1)
    return path


@pytest.fixture(scope="session")
def shared_server(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Busy]:
    """One server for all tests that leave theirs as they found it."""
    examples = onnx_examples(tmp_path_factory.mktemp("examples"))
    with ServerProcess(examples, repository, options=grpc_transport(request)) as server:
        yield Busy(server, cost_of_a_second(server.http))
        assert server.stop() == 0
        assert "bug while" not in server.log, server.log
        assert "bug in" not in server.log, server.log


@pytest.fixture
def busy(shared_server: Busy) -> Iterator[Busy]:
    """The shared server; after the test it admits nothing, and holds no file that it did not."""
    server = shared_server.server
    asyncio.run(until(lambda: admitted(server), lambda found: found == (0, 0)))
    before = Resources.of(server.pid).files

    async def files() -> int:
        await admitted(server)
        return Resources.of(server.pid).files

    yield shared_server
    asyncio.run(until(lambda: admitted(server), lambda found: found == (0, 0)))
    asyncio.run(until(files, lambda found: found <= before + _FILES_SPARE))
