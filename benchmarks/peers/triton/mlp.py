"""The benchmark's MLP in numpy, for Triton's Python backend: one product for the whole batch."""

# It runs inside Triton, whose package the type checker does not have.
# mypy: ignore-errors

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that Triton's Python backend loads."""

    def initialize(self, args):
        """Read the weights."""
        folder = Path(args["model_repository"]) / args["model_version"]
        with np.load(folder / "weights.npz") as weights:
            self._layers = [(weights[f"weight{n}"], weights[f"bias{n}"]) for n in range(3)]

    def execute(self, requests):
        """Answer the requests that Triton gathered."""
        inputs = [pb_utils.get_input_tensor_by_name(r, "input").as_numpy() for r in requests]
        value = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        for weight, bias in self._layers[:-1]:
            value = np.maximum(value @ weight + bias, 0)
        weight, bias = self._layers[-1]
        value = value @ weight + bias
        responses = []
        begin = 0
        for array in inputs:
            part = value[begin : begin + len(array)]
            begin += len(array)
            tensor = pb_utils.Tensor("output", part)
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
