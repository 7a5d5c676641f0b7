"""Bound runs, with the CPU as the device: the results of plain runs."""

import ctypes
import gc
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.model_spec import LoadSpec
from headrace.core.tensors import Array
from headrace.placement.local.onnx import Allocate, BoundOnnxModel, OnnxBackend, OnnxModel
from tests.models import onnx_graphs


class Device:
    """Host memory in place of a GPU's."""

    def __init__(self, allocate: Allocate = lambda _: None) -> None:
        self.copied: list[int] = []
        self.allocate = allocate

    def copy(self, address: int, into: memoryview) -> None:
        self.copied.append(len(into))
        ctypes.memmove(np.frombuffer(into, np.uint8).ctypes.data, address, len(into))


def load(folder: Path, model: bytes, device: Device | None = None) -> OnnxModel:
    root = onnx_graphs.write_model(folder, "m", model)
    file = root / "1" / "model.onnx"
    if device is None:
        return OnnxBackend().load(LoadSpec("m", file, root))
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return BoundOnnxModel(session, "cpu", 0, device.copy, device.allocate)


def agree(
    folder: Path, model: bytes, inputs: Mapping[str, Array], outputs: Sequence[str], device: Device
) -> None:
    """Compare a bound run with a plain one, twice since bindings are cleared after a run."""
    plain, bound = load(folder, model), load(folder, model, device)
    for _ in range(2):
        expected, found = plain.infer(inputs, outputs), bound.infer(inputs, outputs)
        assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.tolist() == other.tolist()
    bound.close()


@pytest.mark.parametrize("datatype", [d for d in Datatype if d is not Datatype.BYTES])
@pytest.mark.parametrize("rows", [0, 3])
def test_every_datatype(tmp_path: Path, datatype: Datatype, rows: int) -> None:
    values: Array = np.arange(2 * rows).reshape(rows, 2)
    device = Device()
    inputs = {"INPUT0": values.astype(NUMPY[datatype])}
    agree(tmp_path, onnx_graphs.identity(datatype), inputs, ["OUTPUT0"], device)
    size = inputs["INPUT0"].nbytes
    assert device.copied == ([size] * 2 if size else [])


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BF16])
def test_views_and_parts(tmp_path: Path, datatype: Datatype) -> None:
    whole = np.frombuffer(np.arange(12).astype(NUMPY[datatype]).tobytes(), NUMPY[datatype])
    inputs: dict[str, Array] = {"INPUT0": whole.reshape(4, 3)[::2, 1:]}
    agree(tmp_path, onnx_graphs.identity(datatype), inputs, ["OUTPUT0"], Device())


@pytest.mark.parametrize("outputs", [["OUTPUT0", "OUTPUT1"], ["OUTPUT1", "OUTPUT0"], ["OUTPUT1"]])
def test_outputs_come_in_the_order_asked_for(tmp_path: Path, outputs: list[str]) -> None:
    row = np.arange(4, dtype=np.float32).reshape(1, 4)
    inputs: dict[str, Array] = {"INPUT0": row, "INPUT1": row[:, ::-1]}
    agree(tmp_path, onnx_graphs.add_sub(), inputs, outputs, Device())


def test_an_input_with_a_default_value_may_be_left_out(tmp_path: Path) -> None:
    model = onnx_graphs.with_default()
    plain = load(tmp_path, model)
    required = {i.name: np.ones((1, 2), np.float32) for i in plain.inputs if not i.optional}
    agree(tmp_path, model, required, [plain.outputs[0].name], Device())


def test_shapes_that_change_from_run_to_run(tmp_path: Path) -> None:
    bound = load(tmp_path, onnx_graphs.identity(), Device())
    for rows in (3, 1, 5):
        array = np.full((rows, 2), rows, np.float32)
        (result,) = bound.infer({"INPUT0": array}, ["OUTPUT0"])
        assert result.tolist() == array.tolist()


def test_outputs_are_in_the_given_memory(tmp_path: Path) -> None:
    given: list[Array] = []

    def allocate(nbytes: int) -> Array | None:
        if nbytes < 16:
            return None
        given.append(np.empty(nbytes, np.uint8))
        return given[-1]

    bound = load(tmp_path, onnx_graphs.identity(), Device(allocate))
    (large,) = bound.infer({"INPUT0": np.ones((2, 2), np.float32)}, ["OUTPUT0"])
    (small,) = bound.infer({"INPUT0": np.ones((1, 2), np.float32)}, ["OUTPUT0"])
    assert np.shares_memory(large, given[0])
    assert (len(given), small.tolist()) == (1, [[1, 1]])


def test_inputs_are_not_held_after_a_run(tmp_path: Path) -> None:
    bound = load(tmp_path, onnx_graphs.identity(), Device())
    array: Array = np.ones((4, 2), np.float32)
    gone = weakref.ref(array)
    bound.infer({"INPUT0": array}, ["OUTPUT0"])
    del array
    gc.collect()
    assert gone() is None


def test_a_failed_run_leaves_nothing_bound(tmp_path: Path) -> None:
    bound = load(tmp_path, onnx_graphs.lookup(), Device())
    name, out = bound.inputs[0].name, bound.outputs[0].name
    with pytest.raises(Exception, match="out of"):
        bound.infer({name: np.array([[99]], np.int64)}, [out])
    plain = load(tmp_path, onnx_graphs.lookup())
    inputs: dict[str, Array] = {name: np.array([[3]], np.int64)}
    assert bound.infer(inputs, [out])[0].tolist() == plain.infer(inputs, [out])[0].tolist()
    with pytest.raises(Exception, match=name):
        bound.infer({}, [out])  # the last run's input is not there any more


@pytest.mark.parametrize(
    "model",
    [
        onnx_graphs.mixed(), onnx_graphs.identity(Datatype.BYTES), onnx_graphs.bf16_and_others(),
    ],
)  # fmt: skip
def test_models_with_text_are_not_bound(tmp_path: Path, model: bytes) -> None:
    device = Device()
    plain = load(tmp_path, model)
    inputs: dict[str, Array] = {
        info.name: np.full([abs(size) for size in info.shape], b"1", object)
        if info.datatype is Datatype.BYTES
        else np.ones([abs(size) for size in info.shape], NUMPY[info.datatype or Datatype.FP32])
        for info in plain.inputs
    }
    agree(tmp_path, model, inputs, [info.name for info in plain.outputs], device)
    assert device.copied == []
