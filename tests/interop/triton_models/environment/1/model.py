import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.region = os.environ["SHOP_REGION"]  # a KeyError here fails the load
        self.token = os.environ["SHOP_TOKEN"]

    def execute(self, requests):
        responses = []
        for request in requests:
            names = pb_utils.get_input_tensor_by_name(request, "NAMES").as_numpy()
            values = [os.environ.get(name.decode(), "-").encode() for name in names]
            output = pb_utils.Tensor("VALUES", np.array(values, dtype=np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
