"""A server leaves no files in the home directory of its user."""

from pathlib import Path

import httpx
import pytest

from tests.models.python_models import write_python_model
from tests.support.server_process import ServerProcess, onnx_examples

# Loads and runs an ONNX model of its own, as the example `text_embedding` does.
OWN_SESSION = """
    import os

    import numpy as np
    import onnxruntime
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.session = onnxruntime.InferenceSession(os.environ["HOME"] + "/../own.onnx")

        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.ones((1, 1), np.float32))])
                for _ in requests
            ]
"""
OWN_CONFIG = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.mark.slow
def test_onnx_runtime_keeps_no_telemetry(tmp_path: Path) -> None:
    home, models = tmp_path / "home", tmp_path / "models"
    home.mkdir()
    models.mkdir()
    onnx_examples(models)
    (tmp_path / "own.onnx").write_bytes((models / "digits" / "1" / "model.onnx").read_bytes())
    write_python_model(models, "own", OWN_SESSION, OWN_CONFIG)
    environment = {"HOME": str(home), "XDG_CACHE_HOME": "", "ORT_DISABLE_TELEMETRY": ""}
    with ServerProcess(models, environment=environment) as server:
        one = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        answer = httpx.post(
            f"{server.url}/v2/models/own/infer", json={"inputs": [one]}, verify=False
        )
        assert answer.json()["outputs"][0]["data"] == [1]
        assert server.stop() == 0
    assert [str(path) for path in home.rglob("*")] == []
