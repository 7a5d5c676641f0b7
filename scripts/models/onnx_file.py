"""Reproducible writing of ONNX graphs, and running of the files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

Shape = Sequence[int | str]
BATCH = "batch"  # the name of the dimension that counts rows

# The oldest IR version for each operator set in use, so that old runtimes load the file.
IR_VERSIONS = {17: 8, 20: 9}


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]],
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
) -> None:
    """Check the graph of `nodes` and write it; inputs and outputs are (element type, shape)."""
    graph = helper.make_graph(
        nodes,
        path.parent.parent.name,
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(
        graph,
        producer_name="headrace",
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=IR_VERSIONS[opset],
    )
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def run(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of the model in the file `path`, by name."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))
