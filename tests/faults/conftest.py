"""A server with models that can be kept busy, checked for leaks after a fault."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.python_models import tensors
from tests.support.busy_model import write_busy_model
from tests.support.held import Gates, write_held_model
from tests.support.server_process import ServerProcess, onnx_examples
from tests.support.transports import grpc_transport
from tests.support.watching import Resources, admitted, until

_FILES_SPARE = 2  # gRPC's own poller opens some late
# So that requests to `busy` and `held` look the same.
_COST = tensors("input", ("COST", "INT64", "1"))
IN_PROCESS = "--allow-in-process-python"  # which `held` models need


@dataclass(frozen=True, slots=True)
class Busy:
    """A running server, and the gates of its `held` models."""

    server: ServerProcess
    gates: Gates


@pytest.fixture(scope="session")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Path:
    """A model repository with `busy` and `held`, each also as `_alone`: one request at a time."""
    path = tmp_path_factory.mktemp("repository")
    for name, rows in (("", 8), ("_alone", 1)):
        write_busy_model(path, f"busy{name}", max_batch_size=rows)
        write_held_model(path, f"held{name}", gates.folder, _COST, rows)
    return path


@pytest.fixture(scope="session")
def shared_server(
    request: pytest.FixtureRequest,
    repository: Path,
    gates: Gates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Busy]:
    """One server for all tests that leave it unchanged."""
    examples = onnx_examples(tmp_path_factory.mktemp("examples"))
    options = [IN_PROCESS, *grpc_transport(request)]
    with ServerProcess(examples, repository, options=options) as server:
        yield Busy(server, gates)
        assert server.stop() == 0
        assert "bug while" not in server.log, server.log
        assert "bug in" not in server.log, server.log


@pytest.fixture
def busy(shared_server: Busy) -> Iterator[Busy]:
    """The shared server; after the test it holds no requests and no new files."""
    server = shared_server.server
    asyncio.run(until(lambda: admitted(server), lambda found: found == (0, 0)))
    before = Resources.of(server.pid).files

    async def files() -> int:
        await admitted(server)
        return Resources.of(server.pid).files

    yield shared_server
    asyncio.run(until(lambda: admitted(server), lambda found: found == (0, 0)))
    asyncio.run(until(files, lambda found: found <= before + _FILES_SPARE))
