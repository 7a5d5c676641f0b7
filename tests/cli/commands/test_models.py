"""`headrace models` on a running server: output and failures."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from tests.cli.conftest import Headrace
from tests.support.command import run
from tests.support.server_process import ServerProcess


def test_list(headrace: Headrace) -> None:
    ended = headrace("models", "list")
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].split() == ["MODEL", "VERSION", "STATE", "REASON"]
    assert ["digits", "2", "READY"] in [line.split() for line in lines]
    assert len({line.index("READY") for line in lines[1:]}) == 1  # they are below one another


def test_list_as_json(headrace: Headrace) -> None:
    ended = headrace("models", "list", "--json", "--ready", "sim*_id*", "dig*")
    assert ended.document == {
        "models": [
            {"name": "digits", "version": "1", "state": "READY", "reason": ""},
            {"name": "digits", "version": "2", "state": "READY", "reason": ""},
            {"name": "simple_identity", "version": "1", "state": "READY", "reason": ""},
        ]
    }


def test_list_with_signatures(headrace: Headrace) -> None:
    lines = headrace("models", "list", "--long", "simple").out.splitlines()
    # A slow machine has it run on a thread.
    assert lines.pop(1) in [f"  runs on  onnxruntime, 1 x {kind}" for kind in ("inline", "thread")]
    assert lines == [
        "simple 1  READY", "  inputs   INPUT0  INT32 [-1,16]", "           INPUT1  INT32 [-1,16]",
        "  outputs  OUTPUT0  INT32 [-1,16]", "           OUTPUT1  INT32 [-1,16]",
    ]  # fmt: skip
    [model] = headrace("models", "list", "--long", "--json", "simple").document["models"]
    assert (model["backend"], model["instances"]) == ("onnxruntime", 1)
    assert model["inputs"][1] == {"name": "INPUT1", "datatype": "INT32", "shape": [-1, 16]}


def test_names(headrace: Headrace) -> None:
    assert headrace("models", "list", "--names", "d*").out == "digits\n"
    ended = headrace("models", "list", "no*")
    assert (ended.status, ended.out) == (0, "no models called no*\n")


def test_an_unknown_model(headrace: Headrace) -> None:
    ended = headrace("models", "list", "nope", "simple")
    assert (ended.status, ended.err) == (1, "headrace models list: no model called nope\n")
    assert [line.split()[0] for line in ended.out.splitlines()] == ["MODEL", "simple"]
    ended = headrace("models", "list", "--ready", "--json", "nope")
    assert (ended.status, ended.document) == (1, {"models": []})


def test_config(headrace: Headrace) -> None:
    config = ModelConfig()
    text_format.Parse(headrace("models", "config", "digits").out, config)
    assert (config.name, config.max_batch_size) == ("digits", 64)
    document = headrace("models", "config", "digits", "--version=1", "--json").document
    assert document["output"][0]["label_filename"] == "labels.txt"


def test_stats(headrace: Headrace) -> None:
    def counts() -> tuple[int, int, int]:
        [found] = headrace("models", "stats", "simple", "--json").document["model_stats"]
        succeeded = found["inference_stats"]["success"]["count"]
        return succeeded, found["inference_count"], found["execution_count"]

    requests, rows, batches = counts()
    for _ in range(2):
        headrace("infer", "simple", "--random", "--rows=3")
    assert counts() == (requests + 2, rows + 6, batches + 2)
    [row] = [
        line.split()
        for line in headrace("models", "stats").out.splitlines()
        if line.startswith("simple ")
    ]
    assert row[:5] == ["simple", "1", str(requests + 2), row[3], str(rows + 6)]
    details = headrace("models", "stats", "simple").out
    assert details.startswith("simple version 1\n")
    assert f"requests  {requests + 2} answered, {row[3]} failed, the last" in details
    assert f"rows      {rows + 6} in {batches + 2} batches, {row[5]} in each" in details
    assert any(line.split()[:1] == ["3"] for line in details.splitlines())


@pytest.mark.parametrize(("words", "text"), [
    (["config", "digts"], "unknown model: 'digts' is not found; did you mean 'digits'?\n"),
    (["stats", "digts"], "did you mean 'digits'?\n"),
    (["config", "zzz"], "there are digits, simple, simple_identity, simple_string"),
    (["config", "digits", "--version=7"], "version 7 is not found\n"),
    (["load", "simple", "--config=/nowhere.pbtxt"], "/nowhere.pbtxt: No such file"),
    (["load", "simple", "--file=a=/nowhere"], "/nowhere: No such file"),
    (["load", "simple", '--config={"max_batch": 1}'], 'no field named "max_batch"'),
    (["load", "simple", '--config={"max_batch'], "--config: Failed to load JSON"),
])  # fmt: skip
def test_failures(headrace: Headrace, words: list[str], text: str) -> None:
    ended = headrace("models", *words)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"headrace models {words[0]}: ")
    assert text in ended.err


def test_a_configuration_with_an_error_in_it(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text('name: "simple"\nmax_bach_size: 8\n')
    ended = headrace("models", "load", "simple", f"--config={file}")
    assert ended.status == 1
    assert f"{file}:2" in ended.err
    assert "did you mean 'max_batch_size'?" in ended.err


@pytest.mark.parametrize(("words", "text"), [
    (["models", "stats", "--version=1"], "--version is of a model: name one"),
    (["models", "config", "m", "--version=a"], "--version: expected a number, got 'a'"),
    (["models", "config", ""], "MODEL: expected a model's name, got ''"),
    (["models", "load", "a", ""], "MODEL: expected a model's name, got ''"),
    (["models", "traffic", "show", ""], "MODEL: expected a model's name, got ''"),
    (["infer", ""], "MODEL: expected a model's name, got ''"),
    (["models", "load", "a", "b", "--config={}"], "--config and --file are for one model"),
    (["models", "load", "a", "--file=b"], "--file: expected PATH=LOCAL, got 'b'"),
    (["models", "list", "--url=ftp://x"], "'ftp://x' begins with neither http:// nor https"),
    (["models", "list", "--url=http://x:99999"], "has no number from 0 to 65535 for a port"),
    (["models", "list", "--url=http://"], "is no address such as http://127.0.0.1:8000"),
    (["models", "list", "--header=x"], "expected 'NAME: VALUE', got 'x'"),
    (["models", "list", "--header=a b: c"], "expected 'NAME: VALUE'"),
    (["models", "list", "--header=a: b\r\nc: d"], "expected 'NAME: VALUE'"),
    (["models", "list", "--timeout=0"], "--timeout: expected a number above 0, got '0'"),
    (["models", "list", "--jsn"], "unknown option '--jsn'; did you mean '--json'?"),
    (["models", "config", "a", "b"], "unexpected argument 'b'"),
    (["models", "lst"], "invalid choice: 'lst'"),
])  # fmt: skip
def test_wrong_usage(command: Headrace, words: list[str], text: str) -> None:
    ended = command(*words)
    assert (ended.status, ended.out) == (2, "")
    assert text in ended.err
    assert "--help'" in ended.err


def test_servers_that_do_not_answer(command: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        ended = command("models", "list", f"--url={address}")
    assert ended.status == 1
    assert ended.err == (
        f"headrace models list: no server at http://{address}: connection refused;"
        " 'headrace serve' starts one, --url names another\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ended = command("models", "list", "--timeout=0.05", f"--url={address}")
    assert (ended.status, ended.out) == (1, "")
    assert f"no answer from http://{address} within 0.05 s" in ended.err
    monkeypatch.setenv("HEADRACE_URL", "gopher://x")
    ended = command("models", "list")
    assert ended.status == 2
    assert "HEADRACE_URL: 'gopher://x' begins with neither" in ended.err


def test_headers_go_with_every_request(command: Headrace) -> None:
    received: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.1 403 x\r\nContent-Length: 29\r\n\r\n")
            connection.sendall(json.dumps({"error": "expecting header"}).encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"--url=http://127.0.0.1:{listener.getsockname()[1]}/behind/"
        ended = command("models", "list", url, "--header", "Secret: 1:2", "--header=b:")
        thread.join()
    assert received[0].startswith(b"POST /behind/v2/repository/index HTTP/1.1\r\n")
    assert b"\r\nsecret: 1:2\r\n" in received[0]
    assert b"\r\nb: \r\n" in received[0]
    assert ended.status == 1
    assert ended.err == "headrace models list: expecting header; --header sends one\n"


def test_texts_beyond_the_terminals_encoding(server: ServerProcess) -> None:
    ended = run(
        "infer", "text_language", "…", "--id=…", "--json", f"--url={server.url}",
        environment={"PYTHONIOENCODING": "ascii:strict"},
    )  # fmt: skip
    assert ended.returncode == 0
    assert '"id": "\\u2026"' in ended.stdout


def test_a_closed_pipe(server: ServerProcess) -> None:
    words = [sys.executable, "-m", "headrace", "models", "list", f"--url={server.url}"]
    ours, theirs = os.pipe()
    os.close(ours)
    with subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (141, b"")
