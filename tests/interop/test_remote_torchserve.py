"""Models on a real TorchServe as upstream, over HTTP.

The program is taken from the environment variable HEADRACE_TORCHSERVE; `torch-model-archiver`
lies beside it, and Java is on the PATH.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed
from tests.support.grpc_client import GrpcClient
from tests.support.remote import free_ports, write_remote
from tests.support.server_process import ServerProcess
from tests.support.started import until_answers

pytestmark = pytest.mark.slow

_PROGRAM = os.environ.get("HEADRACE_TORCHSERVE", "")
_START_SECS = 120
_HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, rows, context):
        return [self.answer(row["body"]) for row in rows]

    def answer(self, body):
        if isinstance(body, (bytes, bytearray)):
            return {"size": len(body), "text": bytes(body).decode("latin-1")}
        if isinstance(body, dict):
            return {"sum": [a + b for a, b in zip(body["x"], body["y"])], "name": "sum"}
        if min(body) < 0:
            raise ValueError("negative")
        return [2 * value for value in body]
"""
_NUMBERS = """
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
"""
_SUM = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "sum" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "name" data_type: TYPE_STRING dims: [ 1 ] }
"""
_BYTES = """
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "size" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a TorchServe with the model `echo`."""
    if not _PROGRAM:
        pytest.skip("HEADRACE_TORCHSERVE does not say where TorchServe is")
    root = tmp_path_factory.mktemp("torchserve")
    (root / "handler.py").write_text(_HANDLER)
    (root / "store").mkdir()
    subprocess.run(
        [
            Path(_PROGRAM).with_name("torch-model-archiver"), "--model-name=echo", "--version=1.0",
            "--handler=handler.py", "--export-path=store",
        ],
        cwd=root, check=True,
    )  # fmt: skip
    http, management, metrics, grpc, grpc_management = free_ports(5)
    (root / "config").write_text(
        f"inference_address=http://127.0.0.1:{http}\n"
        f"management_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\n"
        f"grpc_inference_port={grpc}\ngrpc_management_port={grpc_management}\n"
        "default_workers_per_model=1\n"
    )
    path = f"{Path(_PROGRAM).parent}:{os.environ['PATH']}"
    with (root / "log").open("wb") as file:
        process = subprocess.Popen(
            [
                _PROGRAM, "--foreground", "--disable-token-auth", "--ts-config=config",
                "--model-store=store", "--models=echo=echo.mar",
            ],
            cwd=root, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            # Its PID file is there, and it does not start a second time.
            env={**os.environ, "PATH": path, "TMPDIR": str(root)}, start_new_session=True,
        )  # fmt: skip
    try:
        workers = f"http://127.0.0.1:{management}/models/echo"
        until_answers(workers, process, root / "log", _START_SECS, b'"READY"')
        yield f"http://127.0.0.1:{http}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it has Java and workers below it
        process.wait()


@pytest.fixture(scope="module")
def through(there: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcClient]:
    root = tmp_path_factory.mktemp("front")
    for name, more in (("numbers", _NUMBERS), ("sum", _SUM), ("bytes", _BYTES)):
        write_remote(root, name, there, more=more, protocol="torchserve", remote_model="echo")
    write_remote(
        root, "labelled", there, more=_NUMBERS, protocol="torchserve", remote_model="echo",
        remote_label="1.0",
    )  # fmt: skip
    with ExitStack() as stack:
        process = stack.enter_context(ServerProcess(root))
        yield stack.enter_context(GrpcClient(process.grpc))
        assert process.stop() == 0
        assert "Traceback" not in process.log


@pytest.mark.parametrize("name", ["numbers", "labelled"])
def test_one_input_of_numbers(through: GrpcClient, name: str) -> None:
    answer = through.infer(name, {"x": np.array([1, 2, 3], np.int32)})
    assert answer["y"].tolist() == [2, 4, 6]


def test_several_inputs(through: GrpcClient) -> None:
    x = np.array([1.5, 2], np.float32)
    answer = through.infer("sum", {"x": x, "y": x})
    assert (answer["sum"].tolist(), answer["name"].tolist()) == ([3, 4], [b"sum"])


def test_bytes(through: GrpcClient) -> None:
    answer = through.infer("bytes", {"image": np.array([b"\x00\xff"], object)})
    assert answer["size"].tolist() == [2]
    assert answer["text"].tolist() == ["\x00\xff".encode()]


def test_an_exception_of_the_handler(through: GrpcClient) -> None:
    for _ in range(8):  # no fault of the server
        with pytest.raises(ExecutionFailed, match="Prediction failed"):
            through.infer("numbers", {"x": np.array([-1], np.int32)})
    test_one_input_of_numbers(through, "numbers")
