"""The package of docs/extending.md is found by the server and serves."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PIP = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
pytestmark = pytest.mark.slow
BROKEN = "[headrace.backends]\nbroken = headrace_examples.missing:Backend\n"
WEIGHTS, BIAS = np.array([[1, 2], [3, 4]]) / 3, np.array([0.5, 0.25])


def install(root: Path, target: Path) -> None:
    """Install the page's package by pip, and one that is broken."""
    (root / "pyproject.toml").write_text(blocks(PAGE, "toml")[0])
    package = root / "headrace_examples"
    package.mkdir()
    (package / "__init__.py").touch()
    for source in blocks(PAGE, "python"):
        found = re.match(r'"""(\w+\.py): ', source)
        assert found
        (package / found[1]).write_text(source)
    command = "-m pip install --quiet --no-deps --no-build-isolation --no-index --target"
    subprocess.run([sys.executable, *command.split(), target, root], check=True, env=PIP)
    metadata = target / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(BROKEN)


def write_models(root: Path) -> None:
    """The models of the page, and one whose stage refuses its parameter."""
    subprocess.run([sys.executable, "-c", blocks(PAGE, "py")[0]], cwd=root, check=True)
    wrong = root / "models" / "wrong"
    shutil.copytree(root / "models" / "rounded", wrong)
    config = wrong / "config.pbtxt"
    config.write_text(config.read_text().replace('"1"', '"few"'))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packages")
    install(tmp_path_factory.mktemp("headrace-examples"), target)
    return target


@pytest.fixture(scope="module")
def server(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    write_models(models)
    door = f"--door=lines={models / 'lines.sock'}"
    options = ("--exit-on-error=false", "--strict-readiness=false", door)
    environment = {"PYTHONPATH": str(packages)}
    with ServerProcess(models / "models", options=options, environment=environment) as running:
        yield running


def headrace(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True, text=True, env={"PYTHONPATH": str(packages)}, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "decimals"), [("exact", None), ("rounded", 1)])
def test_the_backend_and_the_stage_serve(
    server: ServerProcess, model: str, decimals: int | None
) -> None:
    rows = np.array([[1, 2], [5, 6], [0.1, 0.7]], np.float32)
    content = {"name": "x", "shape": [3, 2], "datatype": "FP32", "data": rows.tolist()}
    answer = httpx.post(
        f"{server.url}/v2/models/{model}/infer", json={"inputs": [content]}, verify=False
    )
    assert answer.status_code == 200, answer.text
    [output] = answer.json()["outputs"]
    expected = (rows @ WEIGHTS + BIAS).astype(np.float32)
    if decimals is not None:
        expected = np.round(expected, decimals)
    np.testing.assert_allclose(np.reshape(output["data"], (3, 2)), expected, rtol=1e-6)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_request_of_the_page(server: ServerProcess) -> None:
    command = blocks(PAGE, "sh")[-1].replace("localhost:8000", server.http)
    ran = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert json.loads(ran.stdout) == json.loads(blocks(PAGE, "json")[0])


def test_the_models_configuration_is_completed(server: ServerProcess) -> None:
    config = httpx.get(f"{server.url}/v2/models/exact/config", verify=False).json()
    assert (config["backend"], config["platform"]) == ("linear", "numpy_linear")
    assert config["max_batch_size"] == 64
    assert "decimals has no effect" not in server.log


def test_a_refused_stage_parameter_names_its_line(server: ServerProcess) -> None:
    index = httpx.post(f"{server.url}/v2/repository/index", verify=False).json()
    [wrong] = (entry for entry in index if entry["name"] == "wrong")
    assert wrong["state"] == "UNAVAILABLE"
    assert "config.pbtxt:1: parameters['decimals']: expected a whole number" in wrong["reason"]


def test_a_broken_plugin_is_named_and_affects_no_other(
    server: ServerProcess,
) -> None:
    server.await_logged("plugin left out: backend 'broken' (headrace_examples.missing:Backend)")
    server.await_logged("ModuleNotFoundError: No module named 'headrace_examples.missing'")


def test_the_door_takes_calls(server: ServerProcess) -> None:
    with socket.socket(socket.AF_UNIX) as client, client.makefile("rwb") as lines:
        client.settimeout(30)
        client.connect(server.door("lines").removeprefix("unix:"))
        lines.write(b'exact {"x": [1.0, 2.0]}\nnothing {}\nexact {"x": "text"}\n')
        lines.flush()
        first, *others = sorted(lines.readline() for _ in range(3))
        errors = [json.loads(line)["error"] for line in (first, others[0])]
        assert any("unknown model: 'nothing'" in error for error in errors)
        output = json.loads(others[1])
        np.testing.assert_allclose(output["y"], [1, 2] @ WEIGHTS + BIAS, rtol=1e-6)
        with Scraper(server.metrics) as scraper:
            metrics = scraper.now()
        assert metrics.value("headrace_connections", door="lines") == 1
        counted = {"door": "lines", "operation": "generate"}
        assert metrics.value("headrace_requests_total", status="200", **counted) == 1
        assert metrics.value("headrace_requests_total", status="404", **counted) == 1
        assert metrics.value("headrace_requests_total", status="400", **counted) == 1


ACCESS = """
[roles.scorer]
may = ["infer"]
models = ["exact"]

[[peers]]
user = %d
name = "neighbour"
roles = ["scorer"]
"""


def test_the_door_knows_its_clients(packages: Path, tmp_path: Path) -> None:
    """By the process at the other end of its socket: a model of none of its roles is not there."""
    write_models(tmp_path)
    shutil.rmtree(tmp_path / "models" / "wrong")
    (tmp_path / "access.toml").write_text(ACCESS % os.getuid())
    (log := tmp_path / "audit.log").touch()
    options = (
        f"--door=lines={tmp_path / 'lines.sock'}", f"--access={tmp_path / 'access.toml'}",
        f"--audit-log={log}",
    )  # fmt: skip
    environment = {"PYTHONPATH": str(packages)}
    with (
        ServerProcess(tmp_path / "models", options=options, environment=environment),
        socket.socket(socket.AF_UNIX) as client,
        client.makefile("rwb") as lines,
    ):
        client.settimeout(30)
        client.connect(str(tmp_path / "lines.sock"))
        for model, answer in (("exact", b'"y":['), ("rounded", b"unknown model: 'rounded'")):
            lines.write(model.encode() + b' {"x": [1.0, 2.0]}\n')
            lines.flush()
            assert answer in lines.readline()
        until(lambda: log.read_text().count("\n") == 1, "the refusal")
        entry = json.loads(log.read_text())
        wanted = {
            "operation": "ModelInfer", "outcome": "refused", "status": "NOT_FOUND",
            "identity": "neighbour", "door": "lines", "address": f"unix:{os.getuid()}",
            "model": "rounded",
        }  # fmt: skip
        assert wanted.items() <= entry.items()


def test_a_client_that_waits_is_disconnected_at_the_end(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    options = (f"--door=lines={tmp_path / 'lines.sock'}", "--model-control-mode=explicit")
    environment = {"PYTHONPATH": str(packages)}
    with (
        ServerProcess(tmp_path / "models", options=options, environment=environment) as server,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.settimeout(30)
        client.connect(str(tmp_path / "lines.sock"))
        client.sendall(b"nothing {}\n")
        assert b"unknown model" in client.recv(1 << 10)
        assert server.stop() == 0
        assert client.recv(1) == b""
        assert "CancelledError" not in server.log


def test_a_door_that_no_package_has(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    words = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--door=wings=here")
    ran = headrace(packages, "serve", f"--model-repository={tmp_path / 'models'}", *words)
    assert ran.returncode == 1
    assert "--door wings=here: no installed package has a door 'wings'" in ran.stderr


FILL = """
import sqlite3, sys
from pathlib import Path

with sqlite3.connect(sys.argv[1]) as database:
    database.execute("CREATE TABLE IF NOT EXISTS files (model, path, content, revision)")
    database.execute("DELETE FROM files")
    for name, revision in (word.split("=") for word in sys.argv[3:]):
        for path in Path(sys.argv[2]).rglob("*.npz"):
            row = name, f"1/{path.name}", path.read_bytes(), int(revision)
            database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", row)
"""


def test_the_store_brings_models(packages: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", blocks(PAGE, "py")[0]], cwd=tmp_path, check=True)
    database, exact = tmp_path / "models.db", tmp_path / "models" / "exact"

    def fill(*models: str) -> None:
        subprocess.run([sys.executable, "-c", FILL, database, exact, *models], check=True)

    fill("one=1", "two=1")
    options = ("--model-control-mode=poll", "--repository-poll-secs=1")
    environment = {"PYTHONPATH": str(packages)}
    with ServerProcess(f"shelf:{database}", options=options, environment=environment) as server:
        content = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        for name in ("one", "two"):
            url = f"{server.url}/v2/models/{name}/infer"
            answer = httpx.post(url, json={"inputs": [content]}, verify=False)
            assert answer.status_code == 200, answer.text
        fill("one=2", "three=1")
        server.await_logged("model one has changed in its repository")
        server.await_logged("model three is new in its repository")
        server.await_logged("model two is gone from its repository")
        server.await_logged("loaded three version 1")
        database.rename(tmp_path / "away.db")
        server.await_logged("unable to open database file: the models loaded from it stay")
        answer = httpx.get(f"{server.url}/v2/models/one/ready", verify=False)
        assert answer.status_code == 200


def test_a_store_that_cannot_be_reached(packages: Path, tmp_path: Path) -> None:
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    ran = headrace(packages, "serve", f"--model-repository=shelf:{tmp_path / 'none.db'}", *ports)
    assert ran.returncode == 1
    assert f"shelf:{tmp_path / 'none.db'}: unable to open database file" in ran.stderr


def test_the_command_is_added_to_headrace(server: ServerProcess, packages: Path) -> None:
    assert "ping " in headrace(packages, "--help").stdout
    asked = headrace(packages, "ping", f"--url={server.url}")
    assert (asked.returncode, asked.stdout) == (0, "ready\n"), asked.stderr
    assert headrace(packages, "ping", "--url=http://127.0.0.1:9").returncode == 1


def test_the_list_of_plugins(packages: Path) -> None:
    listed = headrace(packages, "--list-plugins")
    rows = [line.split(maxsplit=5) for line in listed.stdout.splitlines()]
    assert listed.returncode == 1
    found = {(row[0], row[1]): (row[2], *row[3:]) for row in rows if row[2] != "headrace"}
    assert found[("backend", "linear")] == ("headrace-examples", "1.0", "loaded", "model.npz")
    assert found[("backend", "broken")][:3] == ("broken", "1.0", "failed")
    stage = found[("stage", "rounding")]
    assert stage[-1] == "Rounds floating-point outputs to the model's parameter `decimals`."
    assert found[("store", "shelf")][:3] == ("headrace-examples", "1.0", "loaded")
    assert found[("command", "ping")][-1] == "check if a server is ready"
    assert ["backend", "onnxruntime", "headrace", "loaded", "model.onnx"] in rows
