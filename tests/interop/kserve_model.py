"""A server of KServe's own, run as `python kserve_model.py PORT` in an interpreter of its own.

The model `told` declares its signature, `untold` does not. The server lists no extension for
binary tensors, but accepts them.
"""

import sys
from typing import Any

import kserve
import numpy as np
from kserve.protocol.infer_type import InferOutput, InferResponse


class AddOne(kserve.Model):  # type: ignore[misc]  # the package has no types
    """Adds one to numbers, and returns them in other datatypes."""

    def __init__(self, name: str, told: bool) -> None:
        super().__init__(name)
        self.told = told
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}] if self.told else []

    def get_output_types(self) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = [
            {"name": "y", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "half", "datatype": "FP16", "shape": [-1, 2]},
            {"name": "text", "datatype": "BYTES", "shape": [-1, 2]},
        ]
        return outputs if self.told else []

    async def predict(self, payload: Any, *args: Any, **kwargs: Any) -> Any:
        x = payload.inputs[0].as_numpy()
        if (x < 0).any():
            raise kserve.errors.InvalidInput("negative numbers are not for this model")
        given = {
            "y": ("FP32", x + 1),
            "half": ("FP16", x.astype(np.float16)),
            "text": ("BYTES", np.array([[f"ä{v}" for v in row] for row in x.tolist()], object)),
        }
        outputs = [
            InferOutput(name, list(array.shape), kind, array)
            for name, (kind, array) in given.items()
        ]
        return InferResponse(
            payload.id or "none", self.name, outputs, use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )  # fmt: skip


if __name__ == "__main__":
    models = [AddOne("told", True), AddOne("untold", False)]
    kserve.ModelServer(http_port=int(sys.argv[1]), enable_grpc=False).start(models)
