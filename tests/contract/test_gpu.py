"""Metadata and metrics of GPUs, from fake libraries and from real GPUs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.placement.local.gpus import Gpus
from headrace.placement.local.onnx import OnnxBackend
from tests.contract.conftest import CLIENTS
from tests.models.onnx_graphs import add_sub, write_model
from tests.models.python_models import IDENTITY, tensors, write_python_model
from tests.support.gpu_libraries import machine_with_gpus
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

WHOLE = "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a"
CONFIG = tensors("input", ("INPUT0", "FP32", "1")) + tensors("output", ("OUTPUT0", "FP32", "1"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two fake GPUs and a model on each."""
    root = tmp_path_factory.mktemp("gpus")
    environment = machine_with_gpus(tmp_path_factory.mktemp("libraries"), devices=2)
    write_python_model(root, "m", IDENTITY, CONFIG + "instance_group { kind: KIND_GPU }")
    write_model(root, "onnx", add_sub(), "instance_group { kind: KIND_CPU }")
    options = ("--metrics-interval-ms=50", "--pinned-memory-pool-byte-size=1048576")
    with clean_server(root, options=options, environment=environment) as process:
        yield process


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_instance_for_each_gpu(server: ServerProcess, protocol: str) -> None:
    with CLIENTS[protocol](server) as client:
        answer = client.infer("m", {"INPUT0": np.array([2], np.float32)})
        assert answer.outputs["OUTPUT0"].tolist() == [2]
        config = client.model_config("m")
    (group,) = config.instance_group
    assert (group.Kind.Name(group.kind), list(group.gpus)) == ("KIND_GPU", [0, 1])
    assert "2 x process (GPU 0, 1)" in server.output


def test_metrics_of_gpus(server: ServerProcess) -> None:
    with Scraper(server.metrics) as metrics:
        until(lambda: "nv_gpu_memory_used_bytes{" in metrics.now().text, "a first look")
        now = metrics.now()
    assert now.value("nv_gpu_memory_total_bytes", gpu_uuid=WHOLE) == 1000
    assert now.value("nv_gpu_memory_used_bytes", gpu_uuid=WHOLE) == 100
    assert now.value("nv_gpu_utilization", gpu_uuid=WHOLE) == 0.25
    assert now.value("nv_gpu_power_usage", gpu_uuid=WHOLE) == 70.5
    assert len(now.samples("nv_gpu_memory_used_bytes")) == 2
    assert len(now.samples("nv_gpu_power_usage")) == 1  # the other one has no reading
    assert now.value("nv_pinned_memory_pool_total_bytes") == 1 << 20
    assert now.value("nv_pinned_memory_pool_used_bytes") == 0


@pytest.mark.slow
def test_without_gpus_there_are_no_gpu_metrics(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_model(models, "onnx", add_sub())
    broken = tmp_path / "libraries"
    broken.mkdir()
    (broken / "libcuda.so.1").write_bytes(b"no library")
    environment = {"LD_LIBRARY_PATH": str(broken)}
    options = ("--metrics-interval-ms=1",)
    with ServerProcess(models, options=options, environment=environment) as server:
        with Scraper(server.metrics) as metrics:
            assert "nv_gpu_" not in metrics.now().text
            assert "nv_pinned_" not in metrics.now().text
        assert "gpu" not in server.log.lower()
        assert "cuda" not in server.log.lower()


# --- real GPUs


def missing() -> str:
    """Reason why no model can use a GPU here; empty if one can."""
    gpus = Gpus()
    return gpus.problem or OnnxBackend(gpus).gpu_obstacle(gpus.count)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_model_on_real_gpus(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    write_model(tmp_path, "gpu", add_sub())
    write_model(tmp_path, "cpu", add_sub(), "instance_group { kind: KIND_CPU }")
    rows = np.random.default_rng(1).random((8, 4), np.float32)
    inputs = {"INPUT0": rows, "INPUT1": rows[::-1]}
    with ServerProcess(tmp_path, options=("--metrics-interval-ms=50",)) as server:
        for protocol in ("http", "grpc"):
            with CLIENTS[protocol](server) as client:
                (group,) = client.model_config("gpu").instance_group
                assert list(group.gpus) == list(range(Gpus().count))
                here, there = client.infer("cpu", inputs), client.infer("gpu", inputs)
                for name, expected in here.outputs.items():
                    np.testing.assert_allclose(there.outputs[name], expected, rtol=1e-5)
                [statistics] = client.statistics("gpu")
                on_gpu = [u for u in statistics.memory_usage if u.type == "GPU"]
                assert on_gpu
                assert on_gpu[0].byte_size > 0
        with Scraper(server.metrics) as metrics:
            until(lambda: "nv_gpu_memory_used_bytes{" in metrics.now().text, "a first look")
            assert metrics.now().value("headrace_model_gpu_memory_bytes", model="gpu") > 0
