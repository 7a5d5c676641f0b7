"""A bad day of one model is none of the others', nor of the server: over both protocols.

A deadlocked model and a full disk leave every other model, and the readiness of the server, as they
were. Models that die are in `test_workers.py`, paused workers in `test_supervision.py`.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core.errors import ServerError
from tests.faults.chaos import eventually
from tests.faults.stuck_models import (
    client_of,
    hanging,
    neighbours_serve,
    reason_of,
    told,
    write_neighbours,
    write_spinning,
    write_told,
)
from tests.support.client import Answer, Client
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import SERVING, HealthWatch
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])
MODELS = {
    "deadlocked": {"stall_secs": 1, "execution_limit_secs": 6},
    "filler": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for each bad day, and their neighbours."""
    root = tmp_path_factory.mktemp("neighbours")
    write_neighbours(root)
    for name, parameters in MODELS.items():
        write_told(root, name, **parameters)
    write_spinning(root, "busy_deadlocked", stall_secs=1, execution_limit_secs=6)
    return root


class Calm:
    """What must not change on a model's bad day, as clients over both protocols see it."""

    def __init__(self, http: Client, grpc: Client) -> None:
        self._clients = (http, grpc)

    def holds(self) -> bool:
        """Whether the neighbours serve, and the server is ready."""
        return all(client.ready() and neighbours_serve(client) for client in self._clients)


@contextmanager
def calm(server: ServerProcess) -> Iterator[Calm]:
    """What holds before and after, and the server's readiness never changes between."""
    with (
        client_of(server, "http") as http,
        GrpcClient(server.grpc) as grpc,
        ThreadPoolExecutor(1) as pool,
        HealthWatch(grpc) as watch,
    ):
        found = Calm(http, grpc)
        assert watch.next() == SERVING
        change = pool.submit(watch.changed)
        assert found.holds()
        yield found
        assert found.holds()
        assert not change.done(), "the server's readiness has changed"
        watch.cancel()


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    with ServerProcess(models) as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log, process.log


@pytest.mark.parametrize(
    ("protocol", "model"), [("http", "deadlocked"), ("grpc", "busy_deadlocked")]
)
def test_a_deadlocked_model(server: ServerProcess, protocol: str, model: str) -> None:
    with (
        calm(server) as others,
        client_of(server, protocol) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        hung: Future[Answer] = pool.submit(client.infer, model, hanging(model))
        eventually(lambda: not client.model_ready(model))
        assert reason_of(client, model).startswith("stalled")
        assert others.holds()
        with pytest.raises(ServerError, match="has taken longer than 6 s"):
            hung.result()
        assert others.holds()
        eventually(lambda: client.model_ready(model))


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """The command that runs another one with a disk of 1 MiB in place of `tmp_path / "disk"`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"'
    prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own")
    return prefix


@protocols
def test_a_full_disk(models: Path, protocol: str, tmp_path: Path, small_disk: list[str]) -> None:
    """Where temporary files, the log and traces are."""
    disk = tmp_path / "disk"
    options = [
        f"--log-file={disk}/log", "--access-log", f"--trace-config=triton,file={disk}/trace",
        "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1",
        "--model-control-mode=explicit", "--load-model=*", "--load-overrides=files",
    ]  # fmt: skip
    with (
        ServerProcess(
            models, options=options, environment={"TMPDIR": str(disk)}, prefix=small_disk
        ) as server,
        calm(server) as others,
        client_of(server, protocol) as client,
    ):
        files = {"1/model.onnx": (models / "neighbour/1/model.onnx").read_bytes()}
        client.load("brought", config='{"max_batch_size": 8}', files=files)
        assert told(client, "filler", "fill") == "No space left on device"
        assert others.holds()
        with pytest.raises(ServerError, match="cannot be kept: No space left on device"):
            client.load("brought", config="{}", files=files | {"1/more": bytes(256 << 10)})
        assert client.model_ready("brought")  # as it was
        assert others.holds()
        for name in ("filler", "neighbour"):
            client.load(name)
            assert client.model_ready(name)
        assert others.holds()
        eventually(lambda: re.search("cannot write the log .*No space left", server.log))
