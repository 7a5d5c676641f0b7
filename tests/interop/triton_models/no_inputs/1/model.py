import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        responses = []
        for _ in requests:
            self.count += 1
            output = pb_utils.Tensor("COUNT", np.array([self.count], dtype=np.int64))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
