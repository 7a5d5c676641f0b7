"""Memory of models in statistics and metrics, as the models grow."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.contract.conftest import CLIENTS
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Client
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

_MIB = 1 << 20
# Keeps as many MiB as a request says.
HOARDER = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            self.kept = [
                bytearray(int(request.inputs()[0].as_numpy().item()) << 20) for request in requests
            ]
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("DONE", request.inputs()[0].as_numpy())
                ])
                for request in requests
            ]
"""


@pytest.fixture(scope="module")
def hoard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("hoard")
    config = tensors("input", ("MIB", "INT32", "1")) + tensors("output", ("DONE", "INT32", "1"))
    write_python_model(root, "hoarder", HOARDER, config)
    write_model(root, "onnx", identity())
    options = ("--metrics-interval-ms=50", "--allow-cpu-metrics=false")
    with clean_server(root, options=options) as process:
        yield process


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_worker_that_grows(hoard: ServerProcess, protocol: str) -> None:
    def taken(client: Client) -> int:
        [statistics] = client.statistics("hoarder")
        [usage] = statistics.memory_usage
        assert (usage.type, usage.id) == ("CPU", 0)
        return usage.byte_size

    with CLIENTS[protocol](hoard) as client:
        client.infer("hoarder", {"MIB": np.array([0], np.int32)})
        until(lambda: taken(client) < 64 * _MIB, "a small worker")
        before = taken(client)
        assert before > _MIB
        client.infer("hoarder", {"MIB": np.array([100], np.int32)})
        until(lambda: taken(client) > before + 90 * _MIB, "a large worker")
        [statistics] = client.statistics("onnx")
        assert statistics.memory_usage[0].byte_size >= len(identity())


def test_metrics(hoard: ServerProcess) -> None:
    with Scraper(hoard.metrics) as metrics:
        now = metrics.now()
    assert now.value("headrace_model_memory_bytes", model="hoarder", version="1") > _MIB
    assert now.value("headrace_model_memory_bytes", model="onnx") > 0
    assert "nv_cpu_utilization" not in now.text
