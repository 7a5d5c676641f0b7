import numpy as np
import triton_python_backend_utils as pb_utils

from . import phrases


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy()[0].decode()
            greeting = np.array([phrases.greet(name).encode()], dtype=np.object_)
            output = pb_utils.Tensor("GREETING", greeting)
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
