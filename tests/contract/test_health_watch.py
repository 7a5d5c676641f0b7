"""Health watchers are notified of every change, whatever its cause."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.contract.repository import write_late_repository
from tests.faults.chaos import eventually
from tests.models.onnx_graphs import write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.remote import free_port, write_remote
from tests.support.server_process import ServerProcess

EACH = ["default", "frontends", pytest.param("reference", marks=pytest.mark.slow)]
CONFIG = "max_batch_size: 4"
# Its worker can be killed, and starts again only once a file is removed.
MORTAL = """
    import os, time
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            while os.path.exists(os.path.join(args["model_repository"], "wait")):
                time.sleep(0.01)

        def execute(self, requests):
            pid = np.array([[os.getpid()]], np.int64)
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pid)])
            return [answer for _ in requests]
"""
MORTAL_CONFIG = (
    CONFIG
    + "\n"
    + tensors("input", ("INPUT0", "FP32", "1"))
    + tensors("output", ("OUTPUT0", "INT64", "1"))
)
ZERO = {"INPUT0": np.zeros((1, 1), np.float32)}


@pytest.fixture(params=EACH)
def carrier(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return CARRIERS[request.param]


def test_start_and_shutdown(carrier: tuple[str, ...], tmp_path: Path) -> None:
    write_late_repository(tmp_path)
    with (
        ServerProcess(tmp_path, options=carrier, wait=False) as process,
        GrpcClient(process.grpc) as client,
        HealthWatch(client) as watch,
        HealthWatch(client) as another,
    ):
        assert watch.next() == NOT_SERVING
        assert watch.next() == SERVING
        assert client.ready()
        assert another.next() == NOT_SERVING
        assert another.next() == SERVING
        process.send(signal.SIGTERM)
        assert watch.next() == NOT_SERVING
        assert watch.ended()


@pytest.mark.slow
def test_changes_of_a_model_do_not_change_the_servers_health(
    carrier: tuple[str, ...], tmp_path: Path
) -> None:
    write_python_model(tmp_path, "mortal", MORTAL, MORTAL_CONFIG)
    options = (*carrier, "--model-control-mode=explicit")
    with (
        ServerProcess(tmp_path, options=options) as process,
        GrpcClient(process.grpc) as client,
        HealthWatch(client) as watch,
    ):
        assert watch.next() == SERVING
        client.load("mortal")
        flag = tmp_path / "mortal" / "wait"
        flag.touch()
        os.kill(int(client.infer("mortal", ZERO)["OUTPUT0"][0, 0]), signal.SIGKILL)
        until_ready(client, "mortal", False)
        flag.unlink()
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
