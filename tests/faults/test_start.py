"""Start with an invalid model, address or repository."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.faults.requests import infer
from tests.support.busy_model import write_busy_model
from tests.support.raw_clients import call, code_of, get, open_channel
from tests.support.server_process import ServerProcess


@pytest.fixture
def half_bad(tmp_path: Path) -> Path:
    """A repository with one valid model, and one whose file is not a model."""
    write_busy_model(tmp_path)
    version = tmp_path / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"this is no model")
    return tmp_path


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself."""
    command = [sys.executable, "-m", "headrace", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def free_ports() -> tuple[str, ...]:
    """Options that bind every door to a free port."""
    return ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


@pytest.mark.slow
def test_a_failed_model_ends_the_start(half_bad: Path) -> None:
    done = start("--model-repository", str(half_bad), *free_ports())
    assert done.returncode == 1
    assert "broken" in done.stderr
    assert "--exit-on-error=false" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(("options", "ready"), [
    pytest.param([], {"ready": True}, marks=pytest.mark.slow),
    (["--strict-readiness=true"], {"ready": False,
     "reason": "models are not loaded (--strict-readiness): broken"}),
])  # fmt: skip
async def test_other_models_are_served_if_configured(
    half_bad: Path, options: list[str], ready: dict[str, object]
) -> None:
    with ServerProcess(half_bad, options=["--exit-on-error=false", *options]) as server:
        assert await infer(server, "busy", 3) == 3
        assert (await get(server.http, "/v2/health/live")).status == 200
        answer = await get(server.http, "/v2/health/ready")
        assert answer.status == (200 if ready["ready"] else 503)
        assert orjson.loads(answer.body) == ready
        assert (await get(server.http, "/v2/models/busy/ready")).status == 200
        assert (await get(server.http, "/v2/models/broken/ready")).status == 503
        async with open_channel(server.grpc) as channel:
            code = await code_of(call(channel, "ModelMetadata", b"\x0a\x06broken"))
            assert code.name == "NOT_FOUND"
        document = (await get(server.http, "/v2/models/stats")).body
        assert [entry["name"] for entry in orjson.loads(document)["model_stats"]] == ["busy"]
        assert server.stop() == 0


@pytest.mark.slow
def test_a_missing_repository(tmp_path: Path) -> None:
    done = start("--model-repository", str(tmp_path / "nowhere"), *free_ports())
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
@pytest.mark.slow
def test_a_port_in_use(tmp_path: Path, door: str) -> None:
    write_busy_model(tmp_path)
    with ServerProcess(tmp_path) as server:
        port = getattr(server, door).rpartition(":")[2]
        options = [option for option in free_ports() if not option.startswith(f"--{door}")]
        done = start("--model-repository", str(tmp_path), f"--{door}-port={port}", *options)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
