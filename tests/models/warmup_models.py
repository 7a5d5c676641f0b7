"""Source texts of Python models that record their warm-up, and samples for configurations."""

from tests.models.python_models import tensors

# Appends a line to the file `seen` beside it for each batch: how many requests, and the rows and
# values of each. It returns its input. A negative value fails.
RECORDER = """
    import json
    import os
    from pathlib import Path

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.file = Path(args["model_repository"]) / "seen"

        def execute(self, requests):
            given = [request.inputs()[0].as_numpy() for request in requests]
            with self.file.open("a") as file:
                print(json.dumps([os.getpid(), [array.tolist() for array in given]]), file=file)
            if any((array < 0).any() for array in given):
                raise ValueError("below zero")
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in given
            ]
"""
# Calls `recorder` with its input, and returns the number of responses.
ASKER = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            assert pb_utils.is_model_ready("recorder")
            assert not pb_utils.is_model_ready("nobody")
            return [self.ask(request) for request in requests]

        def ask(self, request):
            asked = pb_utils.InferenceRequest(
                model_name="recorder", requested_output_names=["OUTPUT0"], inputs=request.inputs()
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            return pb_utils.InferenceResponse(answer.output_tensors())
"""
# Loads the model that its file `next` names.
LOADER = """
    from pathlib import Path

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.next = (Path(args["model_repository"]) / "next").read_text()

        def execute(self, requests):
            pb_utils.load_model(self.next)
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())])
                for r in requests
            ]
"""
RECORDER_CONFIG = (
    "max_batch_size: 4\n"
    + tensors("input", ("INPUT0", "FP32", "2"))
    + tensors("output", ("OUTPUT0", "FP32", "2"))
)


def sample(
    name: str, data: str, batch_size: int = 1, more: str = "", kind: str = "FP32", dims: int = 2
) -> str:
    """A sample for such an input; `data` is the source of its values."""
    return (
        f'model_warmup {{ name: "{name}" batch_size: {batch_size} {more}\n'
        f'  inputs {{ key: "INPUT0" value {{ data_type: TYPE_{kind} dims: {dims} {data} }} }} }}\n'
    )
