"""ONNX models on a real GPU: the results of the CPU."""

import gc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidOption
from headrace.core.model_spec import LoadSpec
from headrace.core.tensors import Array
from headrace.placement.local.gpus import Gpus
from headrace.placement.local.onnx import OnnxBackend
from tests.models import onnx_graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> Gpus:
    """GPUs of this machine; skips where ONNX Runtime can use none."""
    found = Gpus(64 << 20)
    if reason := found.problem or OnnxBackend(found).gpu_obstacle(found.count):
        pytest.skip(reason)
    return found


def spec_of(folder: Path, model: bytes, device: int | None = 0, **more: object) -> LoadSpec:
    root = onnx_graphs.write_model(folder, "m", model)
    path = root / "1" / "model.onnx"
    return LoadSpec("m", path, root, device=device, **more)  # type: ignore[arg-type]


def agree(folder: Path, gpus: Gpus, model: bytes, inputs: Mapping[str, Array]) -> None:
    backend = OnnxBackend(gpus)
    cpu = backend.load(spec_of(folder, model, None))
    names = [info.name for info in cpu.outputs]
    expected = cpu.infer(inputs, names)
    for device in range(gpus.count):
        gpu = backend.load(spec_of(folder, model, device))
        for _ in range(2):
            for one, other in zip(gpu.infer(inputs, names), expected, strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                if other.dtype.kind == "f":
                    np.testing.assert_allclose(one, other, rtol=1e-3)
                else:
                    assert one.tolist() == other.tolist()
        gpu.close()


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype(tmp_path: Path, gpus: Gpus, datatype: Datatype) -> None:
    if datatype is Datatype.BYTES:
        array: Array = np.array([[b"a", b"b"]], object)
    else:
        array = np.arange(6).reshape(3, 2).astype(NUMPY[datatype])
    agree(tmp_path, gpus, onnx_graphs.identity(datatype), {"INPUT0": array})


@pytest.mark.parametrize("rows", [0, 1, 3, 100_000])
def test_batches_of_any_size(tmp_path: Path, gpus: Gpus, rows: int) -> None:
    random = np.random.default_rng(rows)
    inputs: dict[str, Array] = {
        n: random.random((rows, 4), np.float32) for n in ("INPUT0", "INPUT1")
    }
    agree(tmp_path, gpus, onnx_graphs.add_sub(), inputs)


def test_a_batch_in_page_locked_memory(tmp_path: Path, gpus: Gpus) -> None:
    pool = gpus.pool
    assert pool is not None
    before = pool.used
    memory = gpus.pinned(1 << 20)
    assert memory is not None
    array = memory.view(np.float32).reshape(-1, 4)
    array[:] = 3
    model = OnnxBackend(gpus).load(spec_of(tmp_path, onnx_graphs.add_sub()))
    total, difference = model.infer({"INPUT0": array, "INPUT1": array}, ["OUTPUT0", "OUTPUT1"])
    assert np.all(total == 6)
    assert np.all(difference == 0)
    assert pool.used == before + (3 << 20)  # the outputs are there, too
    del memory, array, total, difference
    gc.collect()
    assert pool.used == before


def test_operators_unsupported_on_the_gpu_run_on_the_cpu(tmp_path: Path, gpus: Gpus) -> None:
    inputs: dict[str, Array] = {
        "NUMBERS": np.ones((2, 5), np.float32),
        "TEXT": np.array([[b"x"], [b"y"]], object),
        "FLAG": np.array([True, False]),
    }
    agree(tmp_path, gpus, onnx_graphs.mixed(), inputs)


def test_options_of_cuda(tmp_path: Path, gpus: Gpus) -> None:
    parameters = {
        "cudnn_conv_algo_search": "1", "gpu_mem_limit": "1073741824", "arena_extend_strategy": "1",
        "do_copy_in_default_stream": "0", "memory.enable_memory_arena_shrinkage": "gpu:0",
    }  # fmt: skip
    accelerators = (("cuda", {"cudnn_conv_use_max_workspace": "0"}),)
    spec = spec_of(tmp_path, onnx_graphs.heavy(), parameters=parameters, accelerators=accelerators)
    model = OnnxBackend(gpus).load(spec)
    (name,), (out,) = [i.name for i in model.inputs], [o.name for o in model.outputs]
    shape = [abs(d) for d in model.inputs[0].shape]
    assert len(model.infer({name: np.ones(shape, np.float32)}, [out])) == 1


def test_tensorrt(tmp_path: Path, gpus: Gpus) -> None:
    options = {"precision_mode": "FP32", "max_workspace_size_bytes": "268435456"}
    spec = spec_of(tmp_path, onnx_graphs.add_sub(), accelerators=(("tensorrt", options),))
    row = np.ones((1, 4), np.float32)
    try:
        model = OnnxBackend(gpus).load(spec)
    except InvalidOption as error:
        pytest.skip(error.text)
    total, _ = model.infer({"INPUT0": row, "INPUT1": row}, ["OUTPUT0", "OUTPUT1"])
    assert total.tolist() == [[2, 2, 2, 2]]


def test_gpu_memory_is_reported(gpus: Gpus) -> None:
    (first, *_) = gpus.readings()
    assert first.uuid == gpus.uuid(0)
    assert 0 < first.memory_used < first.memory_total
