"""Placement of instances on a machine with GPUs, of which only the numbers are real."""

from functools import partial
from pathlib import Path

import pytest

from headrace.core.errors import InvalidConfig
from headrace.engine.loading import load_version
from headrace.engine.opening import LoadOptions, Opened, open_model
from headrace.placement.backend import Backend
from headrace.placement.local.gpus import CudaDriver, Gpus
from headrace.placement.local.onnx import OnnxBackend
from headrace.placement.worker.python_backend import PythonBackend
from headrace.repository.layout import read_model_directory
from tests.models import onnx_graphs
from tests.models.python_models import execution, tensors, write_python_model
from tests.support.gpu_libraries import NvmlOfTwo, cuda_library

# Writes its device into a file.
PLACED = """
    from pathlib import Path


    class TritonPythonModel:
        def initialize(self, args):
            said = f"{args['model_instance_kind']} {args['model_instance_device_id']}"
            Path(args["model_repository"], args["model_instance_name"]).write_text(said)

        def execute(self, requests):
            return [None] * len(requests)
"""
DECLARED = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))


@pytest.fixture
def two(tmp_path: Path) -> Gpus:
    """A machine with two GPUs."""
    return Gpus(1 << 20, partial(CudaDriver, cuda_library(tmp_path, devices=2)), NvmlOfTwo)


def opened(folder: Path, gpus: Gpus, in_process: bool = False) -> tuple[Opened, LoadOptions]:
    backends: dict[str, Backend] = {"onnxruntime": OnnxBackend(gpus), "python": PythonBackend()}
    options = LoadOptions(cores=4, gpus=gpus, in_process_python=in_process)
    return open_model(read_model_directory(folder), backends, options), options


def test_workers_get_the_number_of_their_gpu(tmp_path: Path, two: Gpus) -> None:
    groups = """
        instance_group [
          { kind: KIND_GPU count: 2 }, { kind: KIND_GPU gpus: 1 }, { kind: KIND_CPU },
          { kind: KIND_MODEL }
        ]"""
    write_python_model(tmp_path, "m", PLACED, DECLARED + groups)
    model, options = opened(tmp_path / "m", two)
    loaded = load_version(model, 1, options)
    try:
        names = [item.name for item in loaded.instances]
        said = {name: (tmp_path / "m" / name).read_text() for name in names}
        assert said == {
            "m_0_0_gpu0": "GPU 0", "m_0_1_gpu0": "GPU 0",
            "m_0_0_gpu1": "GPU 1", "m_0_1_gpu1": "GPU 1",
            "m_1_0": "GPU 1", "m_2_0": "CPU 0", "m_3_0": "MODEL 0",
        }  # fmt: skip
        devices = [item.gpu.device if item.gpu else None for item in loaded.instances]
        assert devices == [0, 0, 1, 1, 1, None, None]
        assert all(item.place is None for item in loaded.instances)
    finally:
        for item in loaded.instances:
            item.model.close()
    assert [list(group.gpus) for group in loaded.config.instance_group] == [[0, 1], [1], [], []]


def test_python_models_use_gpus_only_if_configured(tmp_path: Path, two: Gpus) -> None:
    write_python_model(tmp_path, "plain", PLACED, DECLARED)
    write_python_model(tmp_path, "auto", PLACED, DECLARED + "instance_group { count: 2 }")
    write_python_model(tmp_path, "listed", PLACED, DECLARED + "instance_group { gpus: 1 }")
    placed = [opened(tmp_path / name, two)[0].config for name in ("plain", "auto", "listed")]
    kinds = [[g.Kind.Name(g.kind) for g in config.instance_group] for config in placed]
    assert kinds == [[], ["KIND_CPU"], ["KIND_GPU"]]


def test_instances_on_a_gpu_do_not_run_on_the_event_loop(tmp_path: Path, two: Gpus) -> None:
    config = DECLARED + execution("inline") + "instance_group { kind: KIND_GPU }"
    write_python_model(tmp_path, "m", PLACED, config)
    with pytest.raises(InvalidConfig, match="'inline' is for the CPU; instances on a GPU run in"):
        opened(tmp_path / "m", two, in_process=True)


def test_a_missing_gpu(tmp_path: Path, two: Gpus) -> None:
    config = DECLARED + "instance_group {\n kind: KIND_GPU\n gpus: [ 0, 2 ] }"
    write_python_model(tmp_path, "m", PLACED, config)
    says = (
        r"m/config\.pbtxt:\d+: instance_group\[0\]\.gpus: instance group m_0 of model m specifies"
        r" invalid or unsupported gpu id 2\. GPUs are: 0, 1"
    )
    with pytest.raises(InvalidConfig, match=says):
        opened(tmp_path / "m", two)


def test_a_machine_without_gpus_says_what_is_missing(tmp_path: Path) -> None:
    none = Gpus(0, partial(CudaDriver, "libnothing.so"))
    onnx_graphs.write_model(
        tmp_path, "m", onnx_graphs.identity(), "instance_group { kind: KIND_GPU }"
    )
    with pytest.raises(InvalidConfig, match=r"KIND_GPU but no GPUs are available: libnothing\.so"):
        opened(tmp_path / "m", none)


def test_onnx_models_without_cuda_stay_on_the_cpu(
    tmp_path: Path, two: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    backend = OnnxBackend(two)
    if not backend.gpu_obstacle(0):
        pytest.skip("this ONNX Runtime is made for GPUs, too")
    onnx_graphs.write_model(tmp_path, "m", onnx_graphs.identity(), "instance_group { gpus: 0 }")
    model, options = opened(tmp_path / "m", two)
    loaded = load_version(model, 1, options)
    (instance,) = loaded.instances
    instance.model.close()
    assert (instance.gpu, instance.place) == (None, None)
    assert [g.Kind.Name(g.kind) for g in loaded.config.instance_group] == ["KIND_CPU"]
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []
    config = "instance_group { kind: KIND_GPU }"
    onnx_graphs.write_model(tmp_path, "n", onnx_graphs.identity(), config)
    with pytest.raises(InvalidConfig, match="install onnxruntime-gpu in place of onnxruntime"):
        opened(tmp_path / "n", two)
