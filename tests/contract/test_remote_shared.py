"""Models on a local upstream: large tensors pass through shared memory."""

import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import orjson
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import RepositoryError, ServerError
from headrace.core.tensors import Array
from headrace.engine.loading import load_version
from headrace.engine.opening import LoadOptions, open_model
from headrace.placement.backend import load_backends
from headrace.repository.layout import read_model_directory
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.support.client import Client
from tests.support.http_socket import ask
from tests.support.remote import free_port, write_remote
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server

WIDTH = 1 << 17  # of rows of half a MiB
ALLOWED = ("--allow-client-shm",)
LOCAL = {"shared_memory": "true"}


def rows(count: int, first: float) -> Array:
    return (np.arange(count * WIDTH, dtype=np.float32) + first).reshape(count, WIDTH)


def regions(server: ServerProcess, front: ServerProcess | None = None) -> set[str]:
    """Names of the regions on a server, of one front or of any."""
    answer = ask(server.http, "GET", "/v2/systemsharedmemory/status")
    found = {region["name"] for region in orjson.loads(answer.body)}
    if front is None:
        return found
    return {name for name in found if name.startswith(f"headrace-{front.pid}-")}


def files(server: ServerProcess) -> set[str]:
    """Names of a front's regions."""
    return {path.name for path in Path("/dev/shm").glob(f"headrace-{server.pid}-*")}


def use(client: Client, there: ServerProcess, front: ServerProcess, name: str = "fixed") -> None:
    """Send requests until the front has regions; every answer must be right."""
    numbers = count()

    def shared() -> bool:
        number = next(numbers)
        sent = rows(1, float(number))
        np.testing.assert_array_equal(client.infer(name, {"INPUT0": sent})["OUTPUT0"], sent)
        return number > 5 and len(regions(there, front)) > 1

    until(shared, "regions")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("there")
    write_model(root, "fixed", identity(Datatype.FP32, ["rows", WIDTH]), "max_batch_size: 8")
    write_model(root, "variable", identity(Datatype.FP32, ["rows", "n"]), "max_batch_size: 8")
    write_model(root, "words", identity(Datatype.BYTES, ["rows", "n"]), "max_batch_size: 8")
    write_model(root, "unbatched", identity(Datatype.FP32, [2, WIDTH]), "max_batch_size: 0")
    decoupled = "max_batch_size: 8 model_transaction_policy { decoupled: true }"
    write_model(root, "decoupled", add_sub(Datatype.FP32, 3), decoupled)
    return root


@pytest.fixture(scope="module")
def there(models: Path) -> Iterator[ServerProcess]:
    """The upstream, with shared memory."""
    with clean_server(models, options=ALLOWED) as process:
        yield process


def write_front(root: Path, address: str) -> Path:
    for name in ("fixed", "variable", "words", "unbatched"):
        write_remote(root, name, address, **LOCAL)
    return root


@pytest.fixture(
    scope="module", params=["default", pytest.param("frontends", marks=pytest.mark.slow)]
)
def front(
    request: pytest.FixtureRequest, there: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server before it, which leaves no region behind."""
    root = write_front(tmp_path_factory.mktemp("front"), there.grpc)
    with ServerProcess(root, options=CARRIERS[request.param]) as process:
        yield process
        assert files(process)
        assert process.stop() == 0
        assert "bug " not in process.log
        assert "Traceback" not in process.log
        assert not files(process)
        assert not regions(there, process)


@pytest.mark.parametrize("kind", ["http-binary", "grpc"])
def test_answers_are_the_same(front: ServerProcess, there: ServerProcess, kind: str) -> None:
    with CLIENTS[kind](front) as client:
        use(client, there, front)
        for count in (1, 3, 8, 2):
            sent = rows(count, 0.5)
            for name in ("fixed", "variable"):
                for _ in range(3):
                    found = client.infer(name, {"INPUT0": sent})["OUTPUT0"]
                    np.testing.assert_array_equal(found, sent)
        for _ in range(4):
            found = client.infer("unbatched", {"INPUT0": rows(2, 7.0)})["OUTPUT0"]
            np.testing.assert_array_equal(found, rows(2, 7.0))
        if client.carries_bytes:
            words = np.array([[b"w" * 300_000, b""]], object)
            assert client.infer("words", {"INPUT0": words})["OUTPUT0"].tolist() == words.tolist()


@pytest.mark.slow
def test_an_upstream_without_shared_memory(models: Path, tmp_path: Path) -> None:
    with (
        ServerProcess(models) as other,
        ServerProcess(write_front(tmp_path, other.grpc)) as front,
        CLIENTS["grpc"](front) as client,
    ):
        for number in range(10):
            sent = rows(2, float(number))
            np.testing.assert_array_equal(client.infer("fixed", {"INPUT0": sent})["OUTPUT0"], sent)
        assert not files(front)
        assert front.stop() == 0
        assert front.log.count("tensors go over the wire") == 1
        assert "Client shared memory is disabled" in front.log


def answers(client: Client) -> bool:
    try:
        client.infer("fixed", {"INPUT0": rows(1, 1.0)})
    except ServerError:
        return False
    return True


@pytest.mark.slow
def test_a_restarted_upstream_gets_regions_again(models: Path, tmp_path: Path) -> None:
    port = free_port()
    options = (*ALLOWED, f"--grpc-port={port}")
    root = write_front(tmp_path, f"127.0.0.1:{port}")
    with ServerProcess(models, options=options) as first, ServerProcess(root) as front:
        with CLIENTS["grpc"](front) as client:
            use(client, first, front)
            before = regions(first, front)
            first.stop(signal.SIGKILL)
            with pytest.raises(ServerError):
                client.infer("fixed", {"INPUT0": rows(1, 1.0)})
            with ServerProcess(models, options=options) as second:
                until(lambda: answers(client), "a health check to have seen it")
                use(client, second, front)
                assert not before & regions(second, front)
                assert front.stop() == 0
                assert not regions(second)
        assert "bug " not in front.log
        assert not files(front)


@pytest.mark.slow
def test_leftovers_of_a_killed_server_are_removed_at_the_next_start(
    there: ServerProcess, tmp_path: Path
) -> None:
    root = write_front(tmp_path, there.grpc)
    with ServerProcess(root) as killed:
        with CLIENTS["grpc"](killed) as client:
            use(client, there, killed)
        killed.stop(signal.SIGKILL)
    assert regions(there, killed)
    with ServerProcess(root) as front, CLIENTS["grpc"](front) as client:
        assert not files(killed)
        use(client, there, front)
        until(lambda: answers(client) and not regions(there, killed), "the regions to go")
        assert front.stop() == 0


def test_a_decoupled_model_shares_nothing(there: ServerProcess, tmp_path: Path) -> None:
    write_remote(tmp_path, "decoupled", there.grpc, **LOCAL)
    source, options = read_model_directory(tmp_path / "decoupled"), LoadOptions(1)
    with pytest.raises(RepositoryError, match=r"parameters\['shared_memory'\]: is for models with"):
        load_version(open_model(source, load_backends(), options), 1, options)
