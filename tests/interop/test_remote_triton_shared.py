"""A real Triton on this machine with large tensors in shared memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import pytest

from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.grpc_client import GrpcClient
from tests.support.http_socket import ask
from tests.support.remote import write_remote
from tests.support.scrape import until
from tests.support.server_process import ServerProcess
from tests.support.triton_server import Triton, real_program

pytestmark = pytest.mark.slow

WIDTH = 1 << 18  # of rows of a MiB
# Takes half a second for a row that begins with a negative number.
_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if array[0, 0] < 0:
                time.sleep(0.5)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]))
        return responses
"""
_CONFIG = f"""
backend: "python" max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""


@pytest.fixture(scope="module")
def program() -> Path:
    return real_program()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    (root / "echo" / "1").mkdir(parents=True)
    (root / "echo" / "1" / "model.py").write_text(_MODEL)
    (root / "echo" / "config.pbtxt").write_text(_CONFIG)
    return root


@pytest.fixture
def triton(program: Path, models: Path, tmp_path: Path) -> Iterator[Triton]:
    """A Triton of a version that shares memory by default."""
    with Triton(program, models, tmp_path / "log") as server:
        yield server


@pytest.fixture
def front(triton: Triton, tmp_path: Path) -> Iterator[ServerProcess]:
    write_remote(tmp_path / "front", "echo", triton.grpc, shared_memory="true")
    with ServerProcess(tmp_path / "front") as process:
        yield process
        assert process.stop() == 0
        assert "bug " not in process.log
        assert not list(Path("/dev/shm").glob(f"headrace-{process.pid}-*"))


def regions(triton: Triton) -> set[str]:
    """Names of Triton's regions."""
    answer = ask(triton.http, "GET", "/v2/systemsharedmemory/status")
    return {region["name"] for region in orjson.loads(answer.body)}


def rows(count: int, first: float) -> Array:
    return (np.arange(count * WIDTH, dtype=np.float32) + first).reshape(count, WIDTH)


def check(client: GrpcClient, count: int, first: float) -> None:
    sent = rows(count, first)
    np.testing.assert_array_equal(client.infer("echo", {"X": sent})["Y"], sent)


def use(client: GrpcClient, triton: Triton) -> None:
    numbers = count()

    def shared() -> bool:
        number = next(numbers)
        check(client, 1, float(number))
        return number > 5 and len(regions(triton)) > 1

    until(shared, "regions")


def test_answers_are_right_and_nothing_is_left(triton: Triton, front: ServerProcess) -> None:
    with GrpcClient(front.grpc) as client, ThreadPoolExecutor(8) as threads:
        use(client, triton)
        list(threads.map(lambda n: check(client, 1 + n % 4, float(n)), range(64)))
        assert regions(triton)
    assert front.stop() == 0
    assert not regions(triton)


def test_cancelled_calls(triton: Triton, front: ServerProcess) -> None:
    slow = pb.ModelInferRequest(model_name="echo")
    slow.inputs.add(name="X", datatype="FP32", shape=[1, WIDTH])
    slow.raw_input_contents.append((-rows(1, 1.0)).tobytes())
    with GrpcClient(front.grpc) as client, grpc.insecure_channel(front.grpc) as channel:
        use(client, triton)
        before = regions(triton)
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for round in range(4):
            with pytest.raises(grpc.RpcError) as late:
                call(slow.SerializeToString(), timeout=0.1)
            assert "DEADLINE_EXCEEDED" in str(late.value)
            for number in range(8):
                check(client, 1, float(10 * round + number))
        use(client, triton)
        assert before <= regions(triton)
    assert triton.process.poll() is None
