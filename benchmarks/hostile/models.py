"""The small repository that is attacked."""

from pathlib import Path

from onnx import GraphProto, TensorProto, helper

from benchmarks.models import MLP, write_repository

ECHO, TEXT, WHOLE, PYTHON, ENDLESS = "echo", "text", "whole", "python", "endless"
GROW, GRAM = "grow", "gram"
_ON_A_THREAD = 'parameters { key: "execution" value { string_value: "thread" } }'
_LONG_AS_TEXT = 0.123456789
_OPSET, _IR_VERSION = 17, 8
_MANY = 1_000
_ONNX = {ECHO: TensorProto.FLOAT, TEXT: TensorProto.STRING, WHOLE: TensorProto.INT64}
FLOOD = b"flood"  # the text for which the Python model writes a flood to the log
_MODEL = """
import logging
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "input").as_numpy() for r in requests]
        if any(a.size == 1 and a[0] == b"flood" for a in arrays):
            for n in range(50_000):
                print(n)
                logging.info("%d", n)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("output", a)]) for a in arrays]
"""
_CONFIG = """backend: "python"
max_batch_size: 0
input { name: "input" data_type: TYPE_STRING dims: [-1] }
output { name: "output" data_type: TYPE_STRING dims: [-1] }
"""


def write_models(root: Path) -> None:
    """An MLP, identities of three datatypes in ONNX, and one of text in a Python worker.

    Beside them, a model that gives as many numbers as it is asked for, and the sum of a matrix
    multiplied by its transpose: light for an element, heavy for millions.
    """
    write_repository(root, [MLP])
    for name, element in _ONNX.items():
        _write_onnx(root, name, _identity(name, element))
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [_LONG_AS_TEXT])
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["input"], ["output"], value=value)],
        GROW,
        [helper.make_tensor_value_info("input", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n"])],
    )
    _write_onnx(root, GROW, graph, _ON_A_THREAD)
    nodes = [
        helper.make_node("Transpose", ["input"], ["turned"]),
        helper.make_node("MatMul", ["input", "turned"], ["product"]),
        helper.make_node("ReduceSum", ["product"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        GRAM,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1])],
    )
    _write_onnx(root, GRAM, graph)
    folder = root / PYTHON
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_MODEL)
    (folder / "config.pbtxt").write_text(_CONFIG)


def write_many_models(root: Path) -> None:
    """An MLP, and a thousand identities."""
    write_repository(root, [MLP])
    for number in range(_MANY):
        name = f"{ECHO}{number}"
        _write_onnx(root, name, _identity(name, TensorProto.FLOAT))


def _identity(name: str, element: int) -> GraphProto:
    return helper.make_graph(
        [helper.make_node("Identity", ["input"], ["output"])],
        name,
        [helper.make_tensor_value_info("input", element, ["n"])],
        [helper.make_tensor_value_info("output", element, ["n"])],
    )


def _write_onnx(root: Path, name: str, graph: GraphProto, more: str = "") -> None:
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\nmax_batch_size: 0\n{more}')
