"""Start with an invalid model, address or repository."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.faults.requests import infer
from tests.models import onnx_graphs
from tests.support.busy_model import write_busy_model
from tests.support.command import FREE_PORTS, run
from tests.support.http_client import HttpClient
from tests.support.raw_clients import call, code_of, get, open_channel
from tests.support.scrape import until
from tests.support.server_process import ServerProcess

ROWS = {"INPUT0": np.array([[1, 2]], np.float32)}


@pytest.fixture
def half_bad(tmp_path: Path) -> Path:
    """A repository with one valid model, and one whose file is not a model."""
    write_busy_model(tmp_path)
    version = tmp_path / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"this is no model")
    return tmp_path


@pytest.mark.slow
def test_a_failed_model_ends_the_start(half_bad: Path) -> None:
    done = run("serve", "--model-repository", str(half_bad), *FREE_PORTS)
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


@pytest.mark.parametrize("options", [
    [], pytest.param(["--strict-readiness"], marks=pytest.mark.slow),
    pytest.param(["--load-on-request"], marks=pytest.mark.slow),
])  # fmt: skip
async def test_an_empty_repository_is_not_ready(tmp_path: Path, options: list[str]) -> None:
    with ServerProcess(tmp_path, options=options) as server:
        assert (await get(server.http, "/v2/health/live")).status == 200
        answer = await get(server.http, "/v2/health/ready")
        assert answer.status == 503
        assert "there is no model in the model repository" in orjson.loads(answer.body)["reason"]
        assert f"no models in {tmp_path}: expected a file such as" in server.log
        assert server.stop() == 0


@pytest.mark.slow
async def test_clients_who_control_models_may_begin_with_none(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, options=["--model-control-mode=explicit"]) as server:
        assert (await get(server.http, "/v2/health/ready")).status == 200
        assert server.stop() == 0


@pytest.mark.slow
async def test_a_repository_that_is_filled_later(tmp_path: Path) -> None:
    """The files of a model appear in the directory itself."""
    options = ["--model-control-mode=poll", "--repository-poll-secs=1", "--model-name=net"]
    with ServerProcess(tmp_path, options=options) as server:
        assert (await get(server.http, "/v2/health/ready")).status == 503
        (tmp_path / "model.onnx").write_bytes(onnx_graphs.identity())
        with HttpClient(server.url, binary=False) as client:
            until(client.ready, "a ready server")
            assert client.infer("net", ROWS)["OUTPUT0"].tolist() == [[1.0, 2.0]]
        assert server.stop() == 0


@pytest.mark.parametrize(("path", "options", "name"), [
    ("models/model.onnx", ["--model-name=net"], "net"),
    pytest.param("models/1/model.onnx", [], "models", marks=pytest.mark.slow),
    pytest.param("models/net.onnx", [], "models", marks=pytest.mark.slow),
])  # fmt: skip
async def test_a_directory_that_is_a_model(
    tmp_path: Path, path: str, options: list[str], name: str
) -> None:
    """The layout that KServe mounts: the contents of `storageUri`."""
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_bytes(onnx_graphs.identity())
    if options:  # written where its directory had another name
        (tmp_path / "models" / "config.pbtxt").write_text('name: "another"')
    with ServerProcess(tmp_path / "models", options=["--strict-readiness", *options]) as server:
        with HttpClient(server.url, binary=False) as client:
            assert client.ready()
            assert client.infer(name, ROWS)["OUTPUT0"].tolist() == [[1.0, 2.0]]
        assert server.stop() == 0


@pytest.mark.slow
def test_a_directory_that_is_a_model_of_no_backend_here(tmp_path: Path) -> None:
    (tmp_path / "net" / "variables").mkdir(parents=True)
    (tmp_path / "net" / "saved_model.pb").write_bytes(b"")
    done = run("serve", "--model-repository", str(tmp_path / "net"), *FREE_PORTS)
    assert done.returncode == 1
    assert "failed to load net: " in done.stderr
    assert "found saved_model.pb, variables" in done.stderr


@pytest.mark.slow
def test_a_missing_repository(tmp_path: Path) -> None:
    done = run("serve", "--model-repository", str(tmp_path / "nowhere"), *FREE_PORTS)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
@pytest.mark.slow
def test_a_port_in_use(tmp_path: Path, door: str) -> None:
    write_busy_model(tmp_path)
    with ServerProcess(tmp_path) as server:
        port = getattr(server, door).rpartition(":")[2]
        options = [option for option in FREE_PORTS if not option.startswith(f"--{door}")]
        done = run("serve", "--model-repository", str(tmp_path), f"--{door}-port={port}", *options)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
