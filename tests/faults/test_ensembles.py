"""An ensemble under load: ONNX, Python, an upstream, and a decoupled model, one of which fails."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.contract import graphs
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.client import Input
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.remote import write_remote
from tests.support.server_process import clean_server

pytestmark = pytest.mark.slow

_ROWS = "max_batch_size: 8\n"
_CLIENTS, _REQUESTS = 24, 40
_FP32 = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))
# Fails at random, in one request of a batch, and now and then with all of its batch.
SHAKY = """
    from random import Random

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.random = Random(int(args["model_instance_name"].rpartition("_")[2]))

        def execute(self, requests):
            if self.random.random() < 0.02:
                raise ValueError("all of the batch")
            return [self.answer(request) for request in requests]

        def answer(self, request):
            if self.random.random() < 0.1:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError("at random"))
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", value * 2)])
"""
# X mod 4 responses: X, X + 1, and so on.
SEVERAL = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
                for number in range(int(value[0, 0]) % 4):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value + number)]))
                sender.send(flags=FINAL)
"""
# x -> shaky (2 x), plus (x + 1) on a server -> several -> with the sum of both -> plus again.
GRAPH = ensemble(
    (("x", "FP32", "1"),),
    (("y", "FP32", "1"),),
    step("shaky", {"X": "x"}, {"Y": "twice"}),
    step("elsewhere", {"INPUT0": "x"}, {"OUTPUT0": "next"}),
    step("several", {"X": "x"}, {"Y": "each"}),
    step("summed", {"A": "twice", "B": "next", "C": "each"}, {"Y": "sum"}),
    step("plus", {"INPUT0": "sum"}, {"OUTPUT0": "y"}),
)
SUM = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("Y", sum(tensor.as_numpy() for tensor in request.inputs()))
                ])
                for request in requests
            ]
"""


def write(root: Path, upstream: str) -> None:
    instances = "instance_group { count: 2 kind: KIND_CPU }\n"
    write_python_model(root, "shaky", SHAKY, _ROWS + instances + _FP32)
    write_remote(root, "elsewhere", upstream, remote_model="plus")
    decoupled = "model_transaction_policy { decoupled: true }\n"
    write_python_model(root, "several", SEVERAL, _ROWS + decoupled + _FP32)
    inputs = tensors("input", *((name, "FP32", "1") for name in "ABC"))
    write_python_model(root, "summed", SUM, _ROWS + inputs + tensors("output", ("Y", "FP32", "1")))
    write_model(root, "plus", graphs.add_constant(1), _ROWS)
    write_ensemble(root, "five", GRAPH)


def answers(x: int) -> list[float]:
    return [2 * x + (x + 1) + (x + n) + 1 for n in range(x % 4)]


def read(stream: Stream) -> list[float] | str:
    """The responses to one request, or its error."""
    found: list[float] = []
    while True:
        message = stream.receive()
        if message.error_message:
            return message.error_message
        response = message.infer_response
        if response.raw_output_contents:
            found.append(float(np.frombuffer(response.raw_output_contents[0], np.float32)[0]))
        if response.parameters["triton_final_response"].bool_param:
            return found


def ask(client: GrpcClient, seed: int) -> int:
    """Requests one after the other, each of them answered right or by the step's error."""
    random, failed = Random(seed), 0
    with Stream(client) as stream:
        for number in range(_REQUESTS):
            x = random.randint(0, 1000)
            given = [Input("x", np.array([[x]], np.float32))]
            ends = {"triton_enable_empty_final_response": True}
            stream.send(infer_message("five", given, id=f"{seed}-{number}", parameters=ends))
            found = read(stream)
            if isinstance(found, str):
                assert found.startswith("in ensemble 'five', "), found
                assert "at random" in found or "all of the batch" in found, found
                failed += 1
            else:
                assert found == answers(x)
    return failed


def test_one_step_fails_at_random(tmp_path: Path) -> None:
    (behind := tmp_path / "behind").mkdir()
    (front := tmp_path / "front").mkdir()
    write_model(behind, "plus", graphs.add_constant(1), _ROWS)
    with clean_server(behind) as upstream:
        write(front, upstream.grpc)
        with (
            clean_server(front) as server,
            GrpcClient(server.grpc) as client,
            ThreadPoolExecutor(_CLIENTS) as pool,
        ):
            failed = sum(pool.map(lambda seed: ask(client, seed), range(_CLIENTS)))
            assert 0 < failed < _CLIENTS * _REQUESTS / 2
            [found] = client.statistics("five")
            times = found.inference_stats
            assert times.fail.count == failed
            assert times.success.count == _CLIENTS * _REQUESTS - failed
            for name in ("shaky", "elsewhere", "several", "summed", "plus"):
                assert client.model_ready(name)
