"""Models on KServe's own Python server as upstream, over HTTP."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest
from tests.support.grpc_client import GrpcClient
from tests.support.remote import free_ports, write_remote
from tests.support.server_process import ServerProcess
from tests.support.started import until_answers

pytestmark = pytest.mark.slow

# Not imported: KServe's messages cannot be in one interpreter with those of tritonclient.
_SERVER = Path(__file__).with_name("kserve_model.py")
_START_SECS = 60
_UNTOLD = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("kserve") / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-W", "ignore", str(_SERVER), str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        until_answers(f"{url}/v2/models/told/ready", process, log, _START_SECS)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def through(there: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcClient]:
    root = tmp_path_factory.mktemp("front")
    write_remote(root, "told", there)
    write_remote(root, "binary", there, remote_model="told", http_tensors="binary")
    write_remote(root, "untold", there, more=_UNTOLD)
    with ExitStack() as stack:
        process = stack.enter_context(ServerProcess(root))
        yield stack.enter_context(GrpcClient(process.grpc))
        assert process.stop() == 0
        assert "Traceback" not in process.log


@pytest.mark.parametrize("name", ["told", "binary"])
def test_answers(through: GrpcClient, name: str) -> None:
    x = np.array([[1.5, 2], [0, 1e30]], np.float32)
    answer = through.infer(name, {"x": x}, id="7")
    assert answer.id == "7"
    np.testing.assert_array_equal(answer["y"], x + 1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(answer["half"], x.astype(np.float16))
    assert answer["text"][0].tolist() == ["ä1.5".encode(), "ä2.0".encode()]


def test_a_model_with_a_declared_signature(through: GrpcClient) -> None:
    x = np.array([[1.5, 2]], np.float32)
    assert through.infer("untold", {"x": x}).outputs.keys() == {"y"}
    config = through.model_config("untold")
    assert config.max_batch_size == 0


def test_model_errors_reach_the_client(through: GrpcClient) -> None:
    with pytest.raises(InvalidRequest, match="negative numbers are not for this model"):
        through.infer("told", {"x": np.full((1, 2), -1, np.float32)})
