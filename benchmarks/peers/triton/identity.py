"""A model that gives back what it gets, for Triton's Python backend."""

# It runs inside Triton, whose package the type checker does not have.
# mypy: ignore-errors

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that Triton's Python backend loads."""

    def execute(self, requests):
        """Answer each request with its own tensor."""
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "input").as_numpy()
            tensor = pb_utils.Tensor("output", array)
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
