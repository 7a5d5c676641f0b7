"""h2load, nghttp2's load generator, as a client of gRPC: an independent HTTP/2 in C."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.interop.conftest import Served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program() -> str:
    """Path of h2load; without it the tests are skipped."""
    found = shutil.which("h2load")
    if found is None:
        pytest.skip("h2load is not here; it is in Debian's package nghttp2-client")
    return found


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the one message of a call of ModelInfer."""
    message = pb.ModelInferRequest(model_name="simple")
    for name in ("INPUT0", "INPUT1"):
        message.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        message.raw_input_contents.append(np.arange(16, dtype=np.int32).tobytes())
    data = message.SerializeToString()
    path = tmp_path_factory.mktemp("h2load") / "message"
    path.write_bytes(struct.pack(">BI", 0, len(data)) + data)
    return path


@pytest.mark.parametrize("options", [
    ("-n", "1000", "-c", "1", "-m", "1"), ("-n", "4000", "-c", "16", "-m", "1"),
    ("-n", "6000", "-c", "4", "-m", "100"),
    ("-n", "2000", "-c", "2", "-m", "10", "-w", "8", "-W", "10"),  # small windows
    ("-n", "2000", "-c", "2", "-m", "10", "--header-table-size", "0"),
    ("-n", "2000", "-c", "2", "-m", "10", "--encoder-header-table-size", "0"),
])  # fmt: skip
def test_h2load_reports_no_errors(
    program: str, served: Served, body: Path, options: tuple[str, ...]
) -> None:
    command = [
        program, *options, "-t", "1", "-d", str(body), "-H", "te: trailers",
        "-H", "content-type: application/grpc",
        f"http://{served.grpc}/inference.GRPCInferenceService/ModelInfer",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    count = int(options[1])
    counts = re.search(
        r"requests: (\d+) total, (\d+) started, (\d+) done, (\d+) succeeded, (\d+) failed,"
        r" (\d+) errored, (\d+) timeout",
        done.stdout,
    )
    assert counts is not None, done.stdout
    assert [int(n) for n in counts.groups()] == [count] * 4 + [0] * 3
    assert f"status codes: {count} 2xx, 0 3xx, 0 4xx, 0 5xx" in done.stdout
