import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """It answers those that wait when as many have come as they said: one that waits for its
    answers before it asks again never gets them."""

    def initialize(self, args):
        self.present = []

    def execute(self, requests):
        for request in requests:
            self.present.append(request.get_response_sender())
            count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
            if len(self.present) >= count:
                for number in range(1, count + 1):
                    output = pb_utils.Tensor("PRESENT", np.array([number], dtype=np.int32))
                    for sender in self.present:
                        sender.send(pb_utils.InferenceResponse([output]))
                for sender in self.present:
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                self.present = []
        return None
