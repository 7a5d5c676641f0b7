"""The models `simple`, `simple_string` and `simple_identity` of Triton's client examples."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from scripts.models.onnx_file import BATCH, save

NAMES = ("simple", "simple_string", "simple_identity")
WIDTH = 16


def build(repository: Path) -> None:
    _save_arithmetic(
        repository / "simple" / "1" / "model.onnx",
        TensorProto.INT32,
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
    )
    _save_arithmetic(
        repository / "simple_string" / "1" / "model.onnx",
        TensorProto.STRING,
        [
            helper.make_node("Cast", ["INPUT0"], ["left"], to=TensorProto.INT32),
            helper.make_node("Cast", ["INPUT1"], ["right"], to=TensorProto.INT32),
            helper.make_node("Add", ["left", "right"], ["sum"]),
            helper.make_node("Sub", ["left", "right"], ["difference"]),
            helper.make_node("Cast", ["sum"], ["OUTPUT0"], to=TensorProto.STRING),
            helper.make_node("Cast", ["difference"], ["OUTPUT1"], to=TensorProto.STRING),
        ],
    )
    save(
        repository / "simple_identity" / "1" / "model.onnx",
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        {"INPUT0": (TensorProto.STRING, (BATCH, "elements"))},
        {"OUTPUT0": (TensorProto.STRING, (BATCH, "elements"))},
    )


def _save_arithmetic(path: Path, element: int, nodes: Sequence[onnx.NodeProto]) -> None:
    spec = (element, (BATCH, WIDTH))
    save(path, nodes, {"INPUT0": spec, "INPUT1": spec}, {"OUTPUT0": spec, "OUTPUT1": spec})


def probes() -> dict[str, dict[str, np.ndarray]]:
    """Inputs on which two builds of a model can be compared, by model name."""
    left = np.arange(-WIDTH, WIDTH, dtype=np.int32).reshape(2, WIDTH)
    right = left[::-1] * 1000
    return {
        "simple": {"INPUT0": left, "INPUT1": right},
        "simple_string": {
            "INPUT0": left.astype(str).astype(object),
            "INPUT1": right.astype(str).astype(object),
        },
        "simple_identity": {"INPUT0": np.array([["", "naïve", "火"]], dtype=object)},
    }


def report(repository: Path) -> list[str]:
    """Names of the models built; there is no accuracy to measure."""
    return [f"{name}/1: exact" for name in NAMES if (repository / name / "1").is_dir()]
