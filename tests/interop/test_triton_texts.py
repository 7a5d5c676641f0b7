"""Words of errors that Triton's clients look for: this server, and a real Triton, have them.

Triton's own tests match these parts. A newer Triton has some others, which `tests/contract` covers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.python_models import tensors, write_python_model
from tests.support.http_socket import RawAnswer, ask
from tests.support.server_process import clean_server
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

_SAME = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            arrays = [request.inputs()[0].as_numpy() for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", a)]) for a in arrays]
"""
_RAISES = """
    class TritonPythonModel:
        def execute(self, requests):
            raise ValueError("it goes wrong")
"""
_ONE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            one = pb_utils.Tensor("Y", np.array([7], np.float32))
            return [pb_utils.InferenceResponse([one]) for _ in requests]
"""
_ASKS = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils


    def ask(model, name="X", outputs=("Y",), rows=1):
        given = pb_utils.Tensor(name, np.zeros((rows, 1), np.float32))
        return pb_utils.InferenceRequest(
            model_name=model, inputs=[given], requested_output_names=list(outputs))


    class TritonPythonModel:
        def initialize(self, args):
            try:
                ask("same").exec()
            except pb_utils.TritonModelException as error:
                self.early = str(error)

        def execute(self, requests):
            asked = [
                ask("nobody"), ask("same", name="Z"), ask("same", outputs=["Z"]),
                ask("same", rows=9), ask("raises"),
            ]
            told = [self.early, *[each.exec().error().message() for each in asked]]
            array = np.array([[json.dumps(told).encode()]], object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for _ in requests]
"""
_FLOATS = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))
_TEXTS = tensors("input", ("X", "STRING", "2")) + tensors("output", ("Y", "STRING", "2"))
_TOLD = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "STRING", "1"))
_UNBATCHED = 'parameters { key: "batching" value { string_value: "off" } }\n'


@pytest.fixture(scope="module", params=["headrace", "triton"])
def address(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The HTTP address of a server with these models."""
    root = tmp_path_factory.mktemp("texts")
    for name, source, config in (
        ("same", _SAME, _FLOATS), ("texts", _SAME, _TEXTS), ("raises", _RAISES, _FLOATS),
        ("one", _ONE, _FLOATS + _UNBATCHED), ("asks", _ASKS, _TOLD),
    ):  # fmt: skip
        write_python_model(root, name, source, f"max_batch_size: 8\n{config}")
    if request.param == "triton":
        with Triton(real_program(), root, Path(tmp_path_factory.mktemp("log"), "log")) as triton:
            yield triton.http
        return
    with clean_server(root, options=["--allow-client-shm"]) as server:
        yield server.http


def infer(address: str, model: str, rows: int = 1, **more: Any) -> RawAnswer:
    item = {"name": "X", "shape": [rows, 1], "datatype": "FP32", "data": [1] * rows}
    document = json.dumps({"inputs": [item], **more}).encode()
    return ask(address, "POST", f"/v2/models/{model}/infer", document)


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), [
    ("GET", "/v2/models/same/versions/7/stats", None, 400,
     "requested model version is not available for model 'same'"),
    ("POST", "/v2/repository/models/same/load", {}, 503,
     "explicit model load / unload is not allowed if polling is enabled"),
    ("POST", "/v2/repository/models/same/unload", {}, 503,
     "explicit model load / unload is not allowed if polling is enabled"),
    ("POST", "/v2/systemsharedmemory/region/r/register", {"key": "/headrace-no", "byte_size": 8},
     500, "Unable to open shared memory region: '/headrace-no'"),
])  # fmt: skip
def test_operations(
    address: str, method: str, path: str, body: object, status: int, text: str
) -> None:
    given = b"" if body is None else json.dumps(body).encode()
    answer = ask(address, method, path, given)
    assert (answer.status, text in answer.error) == (status, True), answer.error


@pytest.mark.parametrize(("data", "text"), [
    (b"\1\0\0\0a", "expected 2 string elements {}, got 1"),
    (b"\1\0\0\0a" * 3, "unexpected number of string elements 3 {}, expecting 2"),
    (b"\1\0\0\0a\1\0", "incomplete string length indicator {}, expecting 4 bytes but only 2 bytes"
     " available"),
])  # fmt: skip
def test_strings_that_do_not_fit_their_shape(address: str, data: bytes, text: str) -> None:
    size = {"binary_data_size": len(data)}
    item = {"name": "X", "shape": [1, 2], "datatype": "BYTES", "parameters": size}
    document = json.dumps({"id": "seven", "inputs": [item]}).encode()
    answer = ask(
        address, "POST", "/v2/models/texts/infer", document + data,
        **{"Inference-Header-Content-Length": str(len(document))},
    )  # fmt: skip
    expected = text.format("for inference input 'X' for model 'texts'")
    assert answer.status == 400
    assert answer.error.startswith(f"[request id: seven] {expected}")


def test_reserved_parameters(address: str) -> None:
    answer = infer(address, "same", parameters={"triton_x": 1})
    assert answer.status == 400
    assert "are reserved for Triton usage and should not be specified" in answer.error


def test_a_model_that_raises(address: str) -> None:
    answer = infer(address, "raises")
    assert answer.status == 500
    text = "Failed to process the request(s) for model 'raises_0', message: ValueError: it goes"
    assert json.loads(answer.body)["error"].startswith(text)


def test_a_model_that_gives_one_row_for_two(address: str) -> None:
    answer = infer(address, "one", rows=2)
    assert answer.status == 200
    [output] = json.loads(answer.body)["outputs"]
    assert (output["shape"], output["data"]) == ([1], [7])


def test_calls_of_other_models(address: str) -> None:
    answer = infer(address, "asks")
    assert answer.status == 200
    [told] = json.loads(answer.body)["outputs"][0]["data"]
    early, unknown, given, wanted, rows, raised = json.loads(told)
    assert early.startswith("BLS is only supported during the 'execute' function.")
    lead = "Model {} - Error when running inference: "
    text = "Failed for execute the inference request. Model 'nobody' is not ready"
    assert unknown.startswith(lead.format("nobody") + text)
    for found, part in (
        (given, "unexpected inference input 'Z' for model 'same'"),
        (wanted, "unexpected inference output 'Z' for model 'same'"),
        (rows, "inference request batch-size must be <= 8 for 'same'"),
    ):
        assert found.startswith(lead.format("same"))
        assert part in found
    assert raised.startswith("Failed to process the request(s) for model 'raises_0', message: ")
