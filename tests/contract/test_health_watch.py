"""Watchers of the server's health are told of every change, whatever it comes from."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.contract import graphs
from tests.contract.conftest import CARRIERS
from tests.contract.repository import write_late_repository
from tests.models.onnx_graphs import write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.grpc_client import GrpcClient
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.remote import free_port, write_remote
from tests.support.server_process import ServerProcess

EACH = ["default", "frontends", pytest.param("reference", marks=pytest.mark.slow)]
CONFIG = "max_batch_size: 4"
# Its worker can be killed, and starts again only when a file is gone.
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
    """Options."""
    return CARRIERS[request.param]


def test_the_start_and_the_end(carrier: tuple[str, ...], tmp_path: Path) -> None:
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


@pytest.fixture
def models(carrier: tuple[str, ...], tmp_path: Path) -> Iterator[tuple[Path, ServerProcess]]:
    """A server whose models clients load, with one of them."""
    write_model(tmp_path, "m", graphs.add_constant(1), CONFIG)
    options = (*carrier, "--model-control-mode=explicit", "--load-model=m")
    with ServerProcess(tmp_path, options=options) as process:
        yield tmp_path, process
        assert process.stop() == 0


@pytest.mark.slow
def test_models_that_come_and_go(models: tuple[Path, ServerProcess]) -> None:
    root, process = models
    with GrpcClient(process.grpc) as client, HealthWatch(client) as watch:
        assert watch.next() == SERVING
        write_python_model(root, "mortal", MORTAL, MORTAL_CONFIG)
        client.load("mortal")
        assert watch.next() == NOT_SERVING  # until it serves
        assert watch.next() == SERVING
        flag = root / "mortal" / "wait"
        for _ in range(2):
            flag.touch()
            pid = int(client.infer("mortal", ZERO)["OUTPUT0"][0, 0])
            os.kill(pid, signal.SIGKILL)
            assert watch.next() == NOT_SERVING
            flag.unlink()
            assert watch.next() == SERVING
        flag.touch()
        os.kill(int(client.infer("mortal", ZERO)["OUTPUT0"][0, 0]), signal.SIGKILL)
        assert watch.next() == NOT_SERVING
        client.unload("mortal")
        assert watch.next() == SERVING
        flag.unlink()


@pytest.mark.slow
def test_a_server_of_a_model_that_goes_and_comes_back(
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
        assert watch.next() == NOT_SERVING
        upstream()
        assert watch.next() == SERVING
