"""Health watchers are notified of every change, whatever its cause."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.contract.repository import write_late_model
from tests.faults.chaos import eventually
from tests.models.onnx_graphs import write_model
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.remote import free_port, write_remote
from tests.support.server_process import ServerProcess

EACH = ["default", "frontends", pytest.param("reference", marks=pytest.mark.slow)]
CONFIG = "max_batch_size: 4"
ZERO = {"INPUT0": np.zeros((1, 1), np.float32)}


@pytest.fixture(params=EACH)
def carrier(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return CARRIERS[request.param]


def test_start_and_shutdown(carrier: tuple[str, ...], tmp_path: Path) -> None:
    held = write_late_model(tmp_path, "late")
    held.touch()
    with (
        ServerProcess(tmp_path, options=carrier, wait=False) as process,
        GrpcClient(process.grpc) as client,
        HealthWatch(client) as watch,
        HealthWatch(client) as another,
    ):
        assert (watch.next(), another.next()) == (NOT_SERVING, NOT_SERVING)
        held.unlink()
        assert (watch.next(), another.next()) == (SERVING, SERVING)
        assert client.ready()
        process.send(signal.SIGTERM)
        assert watch.next() == NOT_SERVING
        assert watch.ended()


@pytest.mark.slow
def test_changes_of_a_model_do_not_change_the_servers_health(
    carrier: tuple[str, ...], tmp_path: Path
) -> None:
    held = write_late_model(tmp_path, "mortal")
    options = (*carrier, "--model-control-mode=explicit")
    with (
        ServerProcess(tmp_path, options=options) as process,
        GrpcClient(process.grpc) as client,
        HealthWatch(client) as watch,
    ):
        assert watch.next() == SERVING
        client.load("mortal")
        held.touch()
        os.kill(int(client.infer("mortal", ZERO)["OUTPUT0"][0, 0]), signal.SIGKILL)
        until_ready(client, "mortal", False)
        held.unlink()
        until_ready(client, "mortal", True)
        client.unload("mortal")
        process.send(signal.SIGTERM)
        assert watch.next() == NOT_SERVING  # the first status


@pytest.mark.slow
def test_health_of_a_server_whose_worker_dies_and_restarts(
    carrier: tuple[str, ...], tmp_path: Path
) -> None:
    port = free_port()
    write_model(tmp_path / "there", "m", graphs.add_constant(1), CONFIG)
    write_remote(tmp_path / "here", "m", f"127.0.0.1:{port}", health_interval_secs="0.1")
    with ExitStack() as stack:

        def upstream() -> ServerProcess:
            option = f"--grpc-port={port}"
            return stack.enter_context(ServerProcess(tmp_path / "there", options=(option,)))

        other = upstream()
        process = stack.enter_context(ServerProcess(tmp_path / "here", options=carrier))
        client = stack.enter_context(GrpcClient(process.grpc))
        watch = stack.enter_context(HealthWatch(client))
        assert watch.next() == SERVING
        other.stop()
        until_ready(client, "m", False)
        upstream()
        until_ready(client, "m", True)
        process.send(signal.SIGTERM)
        assert watch.next() == NOT_SERVING


def until_ready(client: GrpcClient, model: str, ready: bool) -> None:
    """Wait until a model reports itself ready."""
    eventually(lambda: client.model_ready(model) is ready)
