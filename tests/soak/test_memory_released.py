"""Memory of large requests returns to the system, in all processes of a server."""

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.models import onnx_graphs
from tests.support.raw_clients import HttpConnection, call, open_channel
from tests.support.server_process import ServerProcess
from tests.support.watching import until

MIB = 1 << 20
SIZE = 16 * MIB
REQUESTS, AT_ONCE = 32, 8
KEPT = 128 * MIB  # of each process, as docs/operations.md says
STRAY = 48 * MIB  # bytes of further growth, in partly used pages
_PYTHON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a)]) for a in inputs]
"""
_CONFIG = """max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1, 2] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1, 2] }
"""
_DATA = np.ones((SIZE // 8, 2), np.float32).tobytes()


def repository(root: Path) -> Path:
    for name, file, content in (
        ("onnx", "model.onnx", onnx_graphs.identity()),
        ("python", "model.py", _PYTHON.encode()),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / file).write_bytes(content)
        (root / name / "config.pbtxt").write_text(_CONFIG)
    return root


async def ask_http(address: str, model: str, count: int) -> None:
    head = (
        f'{{"inputs":[{{"name":"INPUT0","datatype":"FP32","shape":[{SIZE // 8},2],"parameters":'
        f'{{"binary_data_size":{SIZE}}}}}],"parameters":{{"binary_data_output":true}}}}'
    ).encode()
    async with await HttpConnection.open(address) as connection:
        for _ in range(count):
            answer = await connection.post(
                f"/v2/models/{model}/infer", head + _DATA,
                {"Inference-Header-Content-Length": str(len(head))},
            )  # fmt: skip
            assert answer.status == 200, answer.body[:200]


async def ask_grpc(address: str, model: str, count: int) -> None:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[_DATA])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[SIZE // 8, 2])
    request = message.SerializeToString()
    async with open_channel(address) as channel:
        for _ in range(count):
            await call(channel, "ModelInfer", request)


def resident(pid: int) -> dict[int, int]:
    """Resident bytes of a process and of its descendants."""
    process = psutil.Process(pid)
    return {p.pid: p.memory_info().rss for p in (process, *process.children(recursive=True))}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "front_ends"), [("onnx", 0), ("python", 2)])
def test_memory_of_large_requests_is_released(tmp_path: Path, model: str, front_ends: int) -> None:
    async def work(server: ServerProcess) -> None:
        before = resident(server.pid)

        async def excess() -> dict[int, int]:
            now = resident(server.pid)
            return {pid: now[pid] - size for pid, size in before.items()}

        for ask, address in ((ask_http, server.http), (ask_grpc, server.grpc)):
            each = REQUESTS // AT_ONCE
            await asyncio.gather(*(ask(address, model, each) for _ in range(AT_ONCE)))
            await until(excess, lambda more: all(size <= KEPT + STRAY for size in more.values()))

    options = (f"--frontends={front_ends}",)
    with ServerProcess(repository(tmp_path), options=options) as server:
        asyncio.run(work(server))
        assert server.stop() == 0
        assert "bug" not in server.log, server.log
