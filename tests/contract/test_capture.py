"""Captured payloads of a real server, and their replay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.client import ClientError
from headrace.client.blocking import Client
from headrace.core.datatypes import Datatype
from headrace.plugins.capture.files import read_documents
from tests.contract.conftest import CLIENTS
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.support.command import run
from tests.support.http_socket import ask
from tests.support.scrape import Scraper, until
from tests.support.server_process import clean_server
from tests.support.shared_memory import SharedFile

CONFIG = "max_batch_size: 8"
ROW = np.array([[1.5, 2.5, 0.1]], np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "simple", add_sub(Datatype.INT32, 4), CONFIG)
    write_model(root, "identity", identity(Datatype.FP32, ["rows", 3]), CONFIG)
    return root


def captured(file: Path, key: str = "id") -> dict[str, dict[str, Any]]:
    return {document[key]: document for document in read_documents(str(file))}


@pytest.mark.parametrize("more", [(), pytest.param(("--frontends=1",), marks=pytest.mark.slow)])
def test_payloads_of_both_protocols(models: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "capture.jsonl"
    options = ["--capture-redact=INPUT1", "--capture-redact=parameter:token", *more]
    with clean_server(models, options=[f"--capture={file}", *options]) as server:
        for kind, make in CLIENTS.items():
            with make(server) as client:
                client.infer("identity", {"INPUT0": ROW}, id=kind)
        with Client(server.url) as http:
            numbers = np.arange(4, dtype=np.int32).reshape(1, 4)
            given = {"INPUT0": numbers, "INPUT1": numbers}
            http.infer("simple", given, id="both", parameters={"token": "x", "user": 7})
            with pytest.raises(ClientError):  # refused before it is queued: not captured
                http.infer("identity", {"INPUT0": ROW[0]}, id="wrong")
            flat = b'{"id": "flat", "INPUT0": [1.5, 2.5, 0.1]}'
            path = "/v2/models/identity/generate"
            assert ask(server.http, "POST", path, flat).status == 200
        with Scraper(server.metrics) as metrics:
            count = len(CLIENTS) + 2
            family = "headrace_captured_requests_total"
            until(lambda: metrics.now().value(family) == count, f"{count} captured requests")
            for reason in ("queue", "unwritten"):
                assert metrics.now().value("headrace_capture_lost_total", reason=reason) == 0
    found = captured(file)
    assert "wrong" not in found
    for kind in (*CLIENTS, "flat"):
        document = found[kind]
        assert document["inputs"] == [
            {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1.5, 2.5, 0.1]}
        ]
        [[output]] = document["responses"]
        assert output["data"] == [1.5, 2.5, 0.1]
        assert (document["model"], document["version"], document["status"]) == (
            "identity",
            "1",
            200,
        )
        assert document["door"] == ("grpc" if "grpc" in kind else "http")
    both = found["both"]
    assert both["parameters"] == {"token": "<redacted>", "user": 7}
    assert [one.get("redacted", False) for one in both["inputs"]] == [False, True]


def test_tensors_in_shared_memory(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "capture.jsonl"
    options = [f"--capture={file}", "--allow-client-shm"]
    with SharedFile(64) as memory, clean_server(models, options=options) as server:
        memory.put(ROW.tobytes())
        register = json.dumps({"key": memory.key, "offset": 0, "byte_size": 64}).encode()
        path = "/v2/systemsharedmemory/region/r/register"
        assert ask(server.http, "POST", path, register).status == 200
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
        there = {"name": "OUTPUT0", "parameters": place | {"shared_memory_offset": 32}}
        given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "parameters": place}
        body = json.dumps({"id": "shared", "inputs": [given], "outputs": [there]}).encode()
        assert ask(server.http, "POST", "/v2/models/identity/infer", body).status == 200
        assert memory.get(12, 32) == ROW.tobytes()
    document = captured(file)["shared"]
    assert document["inputs"][0]["data"] == [1.5, 2.5, 0.1]
    assert document["responses"][0][0]["data"] == [1.5, 2.5, 0.1]


@pytest.mark.parametrize("more", [(), pytest.param(("--frontends=1",), marks=pytest.mark.slow)])
def test_users_are_captured_as_a_whole(models: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "capture.jsonl"
    options = ["--capture-key=header:X-User", "--capture-rate=2", "--capture-models=ident*"]
    with clean_server(models, options=[f"--capture={file}", *options, *more]) as server:
        for user in range(16):
            for number in range(2):
                tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
                body = json.dumps({"id": f"{user} {number}", "inputs": [tensor]}).encode()
                path = "/v2/models/identity/infer"
                assert ask(server.http, "POST", path, body, **{"x-user": str(user)}).status == 200
    keys = [document["key"] for document in captured(file).values()]
    assert {keys.count(key) for key in keys} == {2}
    assert 2 <= len(set(keys)) <= 14


def test_captured_requests_are_replayed(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "capture.jsonl"
    with clean_server(models, options=[f"--capture={file}"]) as server:
        with Client(server.url) as client:
            for number in range(20):
                client.infer("identity", {"INPUT0": ROW + number}, id=str(number))
        # By lines: one that is being written is no document yet.
        until(lambda: file.exists() and file.read_bytes().count(b"\n") == 20, "all requests")
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(file.read_bytes())
        ran = run("replay", str(copy), "--speed=0", "--compare", "--json", f"--url={server.url}")
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert (report["sent"], report["equal"], report["failed_as_before"]) == (20, 20, 0)
        assert not report["failed"]
        assert not report["differing"]
        changed = [json.loads(line) for line in copy.read_text().splitlines()]
        changed[3]["responses"][0][0]["data"][0] += 1
        changed[4]["inputs"][0] = {**changed[4]["inputs"][0], "redacted": True}
        del changed[4]["inputs"][0]["data"]
        changed[5]["model"] = changed[6]["model"] = "gone"
        changed[6]["status"] = 500
        copy.write_text("\n".join(map(json.dumps, changed)))
        ran = run("replay", str(copy), "--speed=100", "--compare", f"--url={server.url}")
        assert ran.returncode == 1
        assert "differing: 1 (identity/OUTPUT0)" in ran.stdout
        assert "skipped: 1 (identity: tensor INPUT0 is redacted)" in ran.stdout
        assert "failed as before: 1" in ran.stdout
        assert "failed: 1 (gone: Request for unknown model: 'gone'" in ran.stdout
        with copy.open("a") as lines:
            lines.write("\nno JSON")
        ran = run("replay", str(copy), "--speed=0", f"--url={server.url}")
        assert (ran.returncode, "line 21: " in ran.stderr) == (1, True), ran.stderr
        assert "sent 19 requests\nskipped: 1 (" in ran.stdout  # before that line
        assert "Traceback" not in ran.stderr
        ran = run("replay", f"{tmp_path}/none.jsonl", f"--url={server.url}")
        assert (ran.returncode, "none.jsonl" in ran.stderr) == (1, True)
        assert "Traceback" not in ran.stderr


def test_parquet_is_replayed(models: Path, tmp_path: Path) -> None:
    options = [f"--capture={tmp_path}/capture.parquet"]
    with clean_server(models, options=options) as server, Client(server.url) as client:
        client.infer("identity", {"INPUT0": ROW}, id="one")
    [part] = tmp_path.glob("capture-*.parquet")
    with clean_server(models) as server:
        ran = run("replay", str(part), "--compare", "--json", f"--url={server.url}")
        assert json.loads(ran.stdout)["equal"] == 1, ran.stderr


def test_a_capture_that_cannot_begin(models: Path, tmp_path: Path) -> None:
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--model-repository={models}")
    ran = run("serve", *ports, f"--capture={tmp_path}/no/capture.jsonl")
    assert ran.returncode == 1
    assert "cannot write the capture" in ran.stderr
    ran = run("serve", *ports, f"--capture={tmp_path}/c.jsonl", "--capture-key=user")
    assert ran.returncode == 2
    assert "expected id, header:NAME or parameter:NAME, got 'user'" in ran.stderr
