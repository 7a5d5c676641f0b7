"""The small repository that is attacked."""

from pathlib import Path

from onnx import TensorProto, helper

from benchmarks.models import MLP, write_repository

ECHO, TEXT, WHOLE, PYTHON, ENDLESS = "echo", "text", "whole", "python", "endless"
_OPSET, _IR_VERSION = 17, 8
_ONNX = {ECHO: TensorProto.FLOAT, TEXT: TensorProto.STRING, WHOLE: TensorProto.INT64}
_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "input").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("output", a)]) for a in arrays]
"""
_CONFIG = """backend: "python"
max_batch_size: 0
input { name: "input" data_type: TYPE_STRING dims: [-1] }
output { name: "output" data_type: TYPE_STRING dims: [-1] }
"""


def write_models(root: Path) -> None:
    """An MLP, identities of three datatypes in ONNX, and one of text in a Python worker."""
    write_repository(root, [MLP])
    for name, element in _ONNX.items():
        graph = helper.make_graph(
            [helper.make_node("Identity", ["input"], ["output"])],
            name,
            [helper.make_tensor_value_info("input", element, ["n"])],
            [helper.make_tensor_value_info("output", element, ["n"])],
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
        )
        folder = root / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
        (folder / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 0\n')
    folder = root / PYTHON
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL)
    (folder / "config.pbtxt").write_text(_CONFIG)
