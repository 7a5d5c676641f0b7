import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            for [line] in pb_utils.get_input_tensor_by_name(request, "LINE").as_numpy():
                pb_utils.Logger.log_info(f"took {line.decode()}")
            responses.append(pb_utils.InferenceResponse(output_tensors=[]))
        return responses
