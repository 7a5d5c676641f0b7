import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if not pb_utils.is_model_ready(model_name="child", model_version="1"):
            pb_utils.load_model(model_name="child")
        pb_utils.unload_model("no_longer_needed")

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            asked = pb_utils.InferenceRequest(
                model_name="child", requested_output_names=["Y"], inputs=[x]
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
