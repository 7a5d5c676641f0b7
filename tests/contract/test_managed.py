"""Models in managed Tritons: one process for each of two fake GPUs."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.core.errors import ServerError
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.support.client import Client
from tests.support.managed import (
    CPU,
    descendants,
    servers,
    write_managed,
    write_program,
    write_version,
)
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

_PAUSE_SECS = 0.01  # of a client that keeps asking, so that the servers get to something else
NUMBERS = count()
ROW = np.array([[1, 2, 4]], np.float32)
OPTIONS = ("--triton-processes=per-gpu", "--triton-gpus=4,5", "--model-control-mode=poll")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with instances in both processes, in one of them, and in none."""
    root = tmp_path_factory.mktemp("managed")
    write_managed(root)
    # Of KIND_AUTO, since the stand-in for Triton has no GPU.
    write_managed(root, "instance_group { gpus: [1] }", "second", 5)
    write_managed(root, "instance_group { kind: KIND_GPU gpus: [2] }", "third")
    return root


@pytest.fixture(
    scope="module", params=["default", pytest.param("frontends", marks=pytest.mark.slow)]
)
def server(request: pytest.FixtureRequest, program: Path, root: Path) -> Iterator[ServerProcess]:
    options = (
        f"--triton-server={program}", *OPTIONS, "--exit-on-error=false", *CARRIERS[request.param],
    )  # fmt: skip
    with ServerProcess(root, options=options) as process:
        with Scraper(process.metrics) as scraper:
            scraper.until_reached("times", 2)
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log
        assert "Exception in callback" not in process.log


@pytest.fixture(params=["http", pytest.param("grpc", marks=pytest.mark.slow)])
def updated(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """A client of a server whose repository changes."""
    with CLIENTS[request.param](server) as client:
        yield client


@contextmanager
def callers(client: Client, name: str, many: int = 4) -> Iterator[list[float]]:
    """Clients that keep asking; the observed factors, in order."""
    found: list[float] = []
    ended = Event()

    def ask() -> None:
        while not ended.is_set():
            found.append(float(client.infer(name, {"INPUT0": ROW})["OUTPUT0"][0, 0]))
            ended.wait(_PAUSE_SECS)

    with ThreadPoolExecutor(many) as threads:
        running = [threads.submit(ask) for _ in range(many)]
        try:
            yield found
        finally:
            ended.set()
    for one in running:
        one.result()  # none of its requests has failed


def test_each_process_sees_its_own_gpu(caller: Client, pool: ThreadPoolExecutor) -> None:
    def ask(number: int) -> bytes:
        answer = caller.infer("times", {"INPUT0": ROW * number})
        np.testing.assert_array_equal(answer["OUTPUT0"], 3 * number * ROW)
        return bytes(answer["SEEN"][0, 0])

    assert set(pool.map(ask, range(64))) == {b"4", b"5"}


def test_each_process_loads_a_model_once(server: ServerProcess) -> None:
    until(lambda: "model times: server triton-1 serves" in server.log, "the second process")
    for process in ("triton-0", "triton-1"):
        lines = [line for line in server.log.splitlines() if f"{process}: " in line]
        assert sum("loaded times." in line for line in lines) == 1


def test_a_model_is_where_its_instances_are(caller: Client, pool: ThreadPoolExecutor) -> None:
    def ask(_: int) -> tuple[float, bytes]:
        answer = caller.infer("second", {"INPUT0": ROW})
        return float(answer["OUTPUT0"][0, 0]), bytes(answer["SEEN"][0, 0])

    assert set(pool.map(ask, range(16))) == {(5.0, b"5")}
    groups = caller.model_config("second").instance_group
    assert [list(group.gpus) for group in groups] == [[1]]


def test_a_missing_gpu(caller: Client, server: ServerProcess) -> None:
    assert not caller.model_ready("third")
    server.await_logged("config.pbtxt:8: instance_group[0].gpus: there is no GPU 2")


def test_metrics_of_the_processes(caller: Client, server: ServerProcess) -> None:
    caller.infer("times", {"INPUT0": ROW})
    with Scraper(server.metrics) as scraper:
        found = scraper.now()
    for endpoint in ("triton-0", "triton-1"):
        labels = {"model": "times", "version": "1", "endpoint": endpoint}
        assert found.value("headrace_endpoint_healthy", **labels) == 1
        assert found.value("headrace_endpoint_differences", **labels) == 0


def test_only_this_server_has_access(server: ServerProcess) -> None:
    """Any local user can reach the port, but a key is required."""
    commands = dict(descendants(server.pid))
    found = re.search(r"--grpc-port=(\d+)", commands[servers(server.pid)[0]])
    assert found is not None
    with grpc.insecure_channel(f"127.0.0.1:{found[1]}") as channel:
        ask: Any = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        with pytest.raises(grpc.RpcError, match="restricted"):
            ask(pb.RepositoryIndexRequest().SerializeToString(), timeout=60)


def test_a_new_version_loses_no_request(updated: Client, root: Path) -> None:
    client, name = updated, f"grows_{next(NUMBERS)}"
    write_managed(root, CPU, name, 2)
    until_ready(client, name)
    with callers(client, name) as found:
        until(lambda: 2 in found, "an answer")
        write_version(root, 2, 7, name)
        until(lambda: 7 in found, "an answer of version 2")
        config = root / name / "config.pbtxt"
        changed = root / name / ".changed"
        changed.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 4"))
        changed.rename(config)
        until(lambda: client.model_config(name).max_batch_size == 4, "the new configuration")
    assert set(found) == {2, 7}


def test_a_failed_load_leaves_the_old_version(
    updated: Client, server: ServerProcess, root: Path
) -> None:
    client, name = updated, f"breaks_{next(NUMBERS)}"
    write_managed(root, CPU, name, 2)
    until_ready(client, name)
    whole = root / name / ".2"
    whole.mkdir()
    (whole / "model.py").write_text("raise ValueError('broken')")
    with callers(client, name, 2) as found:
        whole.rename(root / name / "2")
        until(lambda: f"failed to load {name} version 2" in server.log, "the failure")
    assert set(found) == {2}


def until_ready(client: Client, name: str) -> None:
    def ready() -> bool:
        try:
            return client.model_ready(name)
        except ServerError:
            return False

    until(ready, f"{name} is ready")
