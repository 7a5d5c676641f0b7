"""Source texts of Python models for the tests."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

ADD_SUB = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                left, right = [tensor.as_numpy() for tensor in request.inputs()]
                responses.append(pb_utils.InferenceResponse([
                    pb_utils.Tensor("OUTPUT0", left + right),
                    pb_utils.Tensor("OUTPUT1", left - right),
                ]))
            return responses
"""

# It returns its inputs, of any type and shape.
IDENTITY = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]
                )
                for request in requests
            ]
"""


# It doubles X, and tells with every answer the inputs of all requests of its batch: shapes of
# numbers, and texts.
SHAPES = """
    import json

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            seen = [{t.name(): self.shown(t.as_numpy()) for t in r.inputs()} for r in requests]
            told = json.dumps(seen).encode()
            return [self.answer(request, told) for request in requests]

        def shown(self, array):
            if array.dtype != object:
                return array.shape
            return [[text.decode() for text in row] for row in array]

        def answer(self, request, told):
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            texts = np.array([[told]] * len(x), object)
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", 2 * x), pb_utils.Tensor("SEEN", texts)]
            )
"""


def write_python_model(root: Path, name: str, source: str, config: str = "") -> None:
    """A model with one version."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(dedent(source))
    if config:
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')


def tensors(kind: str, *declared: tuple[str, str, str]) -> str:
    """Inputs or outputs of a configuration, by name, type and dims."""
    return "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }}\n'
        for name, datatype, dims in declared
    )


def in_config(parameters: Mapping[str, object]) -> str:
    """Parameters of a configuration."""
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in parameters.items()
    )


def execution(kind: str) -> str:
    """The place of execution in a configuration."""
    return in_config({"execution": kind})


STRICT = in_config({"strict_outputs": "true"})
