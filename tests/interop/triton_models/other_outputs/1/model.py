import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Its configuration was copied from another model."""

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            lengths = np.array([[len(text)] * 2 for [text] in texts], dtype=np.int64)
            letters = np.array([[text[:1], text[-1:]] for [text] in texts], dtype=np.object_)
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("LENGTHS", lengths), pb_utils.Tensor("LETTERS", letters)]
                )
            )
        return responses
