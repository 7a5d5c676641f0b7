"""A BentoML service around ONNX Runtime, with the V2 protocol's JSON.

The model's path is in `model.txt` beside this file.
"""

# It runs in the peer's own environment, whose packages the type checker does not have.
# mypy: ignore-errors

from pathlib import Path

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Mlp:
    """One session, with one thread: the server has one core."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = Path(__file__).with_name("model.txt").read_text()
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )

    @bentoml.api(route="/v2/models/mlp/infer")
    async def infer(self, inputs: list[dict]) -> dict:
        """Answer one request."""
        tensor = inputs[0]
        array = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        (result,) = self._session.run(["output"], {"input": array})
        output = {
            "name": "output",
            "datatype": "FP32",
            "shape": list(result.shape),
            "data": result.ravel().tolist(),
        }
        return {"model_name": "mlp", "model_version": "1", "outputs": [output]}
