"""The status of a server: processes, limits, certificates, models, and what is degraded."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.cli import main
from headrace.plugins.access.keys import NewKey, new_key
from tests.contract.conftest import FRONT_ENDS
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.access_file import known_client
from tests.support.http_client import HttpClient
from tests.support.http_socket import ask
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.tls_files import Authority, tls_options

_PYTHON = """
class TritonPythonModel:
    def execute(self, requests):
        return [None] * len(requests)
"""
_DECLARED = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))


def status(server: ServerProcess, key: str = "") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.get(f"{server.url}/v2/status", headers=headers, verify=False)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _models(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in document["models"]}


@pytest.fixture(scope="module")
def keys() -> dict[str, NewKey]:
    return {name: new_key() for name in ("all", "watcher")}


@pytest.fixture(scope="module", params=["here", FRONT_ENDS])
def watched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
    keys: dict[str, NewKey],
) -> Iterator[ServerProcess]:  # fmt: skip
    """A server with TLS, a broken model, one in a worker, and a client that may see one model."""
    root = tmp_path_factory.mktemp("status")
    write_model(root, "same", identity())
    write_model(root, "broken", b"no model")
    write_python_model(root, "worked", _PYTHON, _DECLARED)
    certificate, key = Authority("status").sign("server", ["localhost"])
    (root.parent / "server.pem").write_bytes(certificate)
    (root.parent / "server.key").write_bytes(key)
    (root.parent / "access.toml").write_text(
        known_client("all", keys["all"])
        + known_client("watcher", keys["watcher"], ["observe"], ["same"])
    )
    options = (
        *tls_options("http", root.parent), f"--access={root.parent}/access.toml",
        "--exit-on-error=false", "--max-connections=8",
        *(("--frontends=1",) if request.param == "front ends" else ()),
    )  # fmt: skip
    with clean_server(root, options=options) as process:
        yield process


def test_models_and_what_is_wrong_with_them(
    watched: ServerProcess, keys: dict[str, NewKey]
) -> None:
    found = status(watched, keys["all"].key)
    models = _models(found)
    assert models.keys() == {"same", "broken", "worked"}
    assert (models["broken"]["state"], models["same"]["state"]) == ("UNAVAILABLE", "READY")
    assert models["same"]["memory_bytes"] > 0
    assert models["worked"]["instances"] == {"process": 1}
    assert found["client"] == {
        "name": "all", "kind": "key",
        "may": ["open", "infer", "read", "observe", "control", "admin"],
    }  # fmt: skip
    kinds = {each["kind"]: each for each in found["degraded"]}
    assert kinds["model"]["name"] == "broken"
    assert kinds["model"]["reason"] == models["broken"]["reason"] != ""
    assert "expires in 1.0 days" in kinds["certificate"]["reason"]
    [certificate] = found["certificates"]
    assert 0.9 < (certificate["expires"] - time.time()) / 86_400 < 1
    assert certificate["door"] == "http"


def test_processes_use_memory_and_threads(watched: ServerProcess, keys: dict[str, NewKey]) -> None:
    found = status(watched, keys["all"].key)
    assert {each["kind"] for each in found["processes"]} >= {"server", "worker"}
    assert found["processes"][0]["pid"] == watched.pid
    for process in found["processes"]:
        assert process["resident_bytes"] > 1 << 20
        assert process["threads"] >= 1
    sums = found["memory"]["resident_bytes"], found["cores"]["process_threads"]
    each = [(one["resident_bytes"], one["threads"]) for one in found["processes"]]
    assert sums == tuple(map(sum, zip(*each, strict=True)))
    limits = {limit["name"]: limit for limit in found["limits"]}
    assert limits["connections"]["limit"] == 8
    assert limits["connections"]["used"] <= 8
    assert found["server"]["addresses"].keys() == {"http", "grpc", "metrics"}


def test_a_client_sees_its_own_models_alone(
    watched: ServerProcess, keys: dict[str, NewKey]
) -> None:
    found = status(watched, keys["watcher"].key)
    assert _models(found).keys() == {"same"}
    assert "broken" not in str(found)
    assert "worked" not in str(found)
    assert found["client"]["may"] == ["open", "observe"]
    assert httpx.get(f"{watched.url}/v2/status", verify=False).status_code == 401


def test_counters_and_the_expiry_as_metrics(
    watched: ServerProcess, keys: dict[str, NewKey]
) -> None:
    secret = {"authorization": f"Bearer {keys['all'].key}"}
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
    before = _models(status(watched, keys["all"].key))["worked"]
    answer = httpx.post(
        f"{watched.url}/v2/models/worked/infer", json=body, headers=secret, verify=False
    )
    assert answer.status_code == 500  # the model has no answer
    after = _models(status(watched, keys["all"].key))["worked"]
    assert after["failures"] - before["failures"] == 1
    text = httpx.get(f"http://{watched.metrics}/metrics", headers=secret, verify=False).text
    [line] = [x for x in text.splitlines() if x.startswith("headrace_certificate_expiry_time")]
    [certificate] = status(watched, keys["all"].key)["certificates"]
    assert float(line.rpartition(" ")[2]) == certificate["expires"]


def test_the_log_needs_a_right(watched: ServerProcess, keys: dict[str, NewKey]) -> None:
    def ask_for(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {keys[key].key}"}
        return httpx.post(f"{watched.url}/v2/logging/tail", headers=headers, verify=False)

    assert any("loaded same version 1" in line for line in ask_for("all").json()["records"])
    assert ask_for("watcher").status_code == 403


@pytest.mark.parametrize("options", [(), ("--metrics-config=native_histograms=true",)])
def test_latencies_are_counted(tmp_path: Path, options: tuple[str, ...]) -> None:
    """By the same bounds, whichever the metrics have."""
    write_model(tmp_path, "same", identity())
    with (
        clean_server(tmp_path, options=options) as server,
        HttpClient(server.url, binary=False) as client,
    ):
        client.infer("same", {"INPUT0": np.zeros((1, 2), np.float32)})
        found = status(server)
        [model] = found["models"]
        assert model["requests"] == model["rows"] == sum(model["latency"]) == sum(model["queue"])
        assert len(model["latency"]) <= len(found["bounds_seconds"]) + 1
        assert found["degraded"] == []
        assert ask(server.http, "POST", "/v2/logging/tail").document["kept"] == 500


def test_a_server_open_to_others_keeps_no_log(tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    with clean_server(tmp_path, options=("--http-address=0.0.0.0",)) as server:
        port = server.output.partition("HTTP     http://0.0.0.0:")[2].split()[0]
        answer = ask(f"127.0.0.1:{port}", "POST", "/v2/logging/tail")
        assert answer.status == 501
        assert "--access" in answer.error


def test_a_front_end_that_has_ended(tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    with ServerProcess(tmp_path, options=("--frontends=2",)) as server:
        pids = [p["pid"] for p in status(server)["processes"] if p["kind"] == "front end"]
        assert len(set(pids)) == 2
        os.kill(pids[0], signal.SIGKILL)

        def replaced() -> bool:
            try:
                found = status(server)
            except httpx.HTTPError:  # the connection was to that one
                return False
            now = {p["pid"] for p in found["processes"] if p["kind"] == "front end"}
            return pids[0] not in now and 0 not in now

        until(replaced, "another front end")


def test_a_store_that_cannot_be_asked(tmp_path: Path) -> None:
    """The store is named once, not with each of its models."""
    pytest.importorskip("sqlalchemy")
    for name in ("one", "two"):
        write_model(tmp_path / "models", name, identity())
    database = tmp_path / "models.db"
    address = f"sqlite:///{database}"
    for name in ("one", "two"):
        with pytest.raises(SystemExit) as pushed:
            main(["models", "push", str(tmp_path / "models" / name), address])
        assert pushed.value.code == 0
    options = (
        "--model-control-mode=poll", "--repository-poll-secs=1", f"--store-cache={tmp_path}/cache",
    )  # fmt: skip
    with clean_server(address, options=options) as server:
        assert status(server)["degraded"] == []
        database.rename(tmp_path / "elsewhere.db")
        until(lambda: bool(status(server)["degraded"]), "an outage")
        found = status(server)
        [store] = found["degraded"]
        assert (store["kind"], store["name"]) == ("store", address)
        assert {model["state"] for model in found["models"]} == {"READY"}
        assert all(model["reason"] == store["reason"] for model in found["models"])
