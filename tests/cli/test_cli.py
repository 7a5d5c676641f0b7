"""The `headrace` command: options, error messages and exit."""

import os
import pty
import re
import socket
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from headrace import __version__
from headrace.cli import main
from headrace.cli.serve import BY_VALUE, WITHOUT_EFFECT, example_repository, translate
from headrace.settings import OPTIONS, SECTIONS, from_environment
from tests.support.command import FREE_PORTS, run, write_model
from tests.support.http_client import HttpClient
from tests.support.http_socket import ask
from tests.support.remote import free_port
from tests.support.server_process import EXAMPLES, ServerProcess


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Message of a command refused for its usage."""
    if words[:1] == ("serve",):  # which otherwise takes rights from this process before it refuses
        words = ("serve", "--allow-debugging", *words[1:])
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    return captured.err


# --- usage


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "", "serve", "infer", "top", "models", "models check", "models list", "models load",
        "models unload", "models config", "models stats", "models traffic", "models traffic set",
        "environments build", "completion",
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*line.split(), "--help"])
        assert ended.value.code == 0
        assert "usage: headrace" in capsys.readouterr().out


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for option in OPTIONS:
        for name in (option.name, *option.aliases):
            assert f"--{name}" in text
        assert option.meaning.split()[0] in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


@pytest.mark.parametrize(("words", "text"), [
    (["sevre"], "invalid choice: 'sevre'"),
    (["models", "check"], "the following arguments are required: PATH"),
    (["serve"], "give --model-repository DIR, or a model file"),
    (["serve", "--model-repository"], "--model-store: expected at least one argument"),
    (["serve", "--http-port"], "--http-port: expected one argument"),
    (["infer", "m", "--scale", "-1/255"], "; write --scale=VALUE if it begins with -"),
])  # fmt: skip
def test_incomplete_commands(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], text: str
) -> None:
    assert text in _refused(capsys, *words)


@pytest.mark.parametrize(("words", "lines"), [
    ([], ["usage: headrace [-h]", "serve model repositories", "send an inference request"]),
    (["models"], ["usage: headrace models", "validate repositories"]),
    (["models", "traffic"], ["usage: headrace models traffic", "restore the configuration"]),
])  # fmt: skip
def test_without_a_command_there_is_help(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], lines: Sequence[str]
) -> None:
    text = _refused(capsys, *words)
    assert "error" not in text
    for line in lines:
        assert line in text


@pytest.mark.parametrize(("words", "text"), [
    (["serve", "--htp-port", "1"], "unknown option '--htp-port'; did you mean '--http-port'?"),
    (["serve", "--htp-port=1"], "unknown option '--htp-port'; did you mean '--http-port'?"),
    (["serve", "--http-por=1"], "unknown option '--http-por'; did you mean '--http-port'?"),
    (["serve", "--confg-file=x"], "did you mean '--config-file'?"),
    (["serve", "--model-repositry", "x"], "did you mean '--model-repository'?"),
    (["serve", "--http-max-input-sise=1"], "did you mean '--http-max-input-size'?"),
    (["serve", "--zzzzzzzzzz"], "unknown option '--zzzzzzzzzz'\n"),
    (["models", "check", "--jsn", "x"], "unknown option '--jsn'; did you mean '--json'?"),
    (["models", "check", "x", "--http-port=1"], "unknown option '--http-port'\n"),
    (["models", "traffic", "promote", "m", "--version", "2"],
     "unknown option '--version'; VERSION is given without it: headrace models traffic"
     " promote MODEL VERSION\n"),
])  # fmt: skip
def test_unknown_options(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], text: str
) -> None:
    assert text in _refused(capsys, *words)


@pytest.mark.parametrize(("option", "text"), [
    ("--http-port=abc", "--http-port must be a whole number, got 'abc'"),
    ("--http-port=1.5", "--http-port must be a whole number, got '1.5'"),
    ("--http-port=-1", "--http-port must be at least 0, got -1"),
    ("--http-port=65536", "--http-port must be at most 65535, got 65536"),
    ("--max-request-bytes=0", "--max-request-bytes must be at least 1, got 0"),
    ("--allow-grpc=maybe", "--allow-grpc must be true or false, got 'maybe'"),
    ("--metrics-config=latencies=true", "--metrics-config: expected NAME=VALUE with one of"),
    ("--log-format=xml", "--log-format must be one of default, ISO8601, json, got 'xml'"),
])  # fmt: skip
def test_invalid_values(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    assert text in _refused(capsys, "serve", "--model-repository", "x", option)


# --- environment and settings file


@pytest.mark.parametrize(("name", "value", "text"), [
    ("HEADRACE_HTTP_PORT", "abc", "HEADRACE_HTTP_PORT must be a whole number, got 'abc'"),
    ("HEADRACE_STRICT_READINESS", "2", "HEADRACE_STRICT_READINESS must be true or false"),
    ("HEADRACE_HTP_PORT", "1",
     "unknown environment variable 'HEADRACE_HTP_PORT'; did you mean 'HEADRACE_HTTP_PORT'?"),
])  # fmt: skip
def test_invalid_environment_variables(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    text: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert text in _refused(capsys, "serve", "--model-repository", "x")


@pytest.mark.parametrize(("content", "text"), [
    ("htp-port = 1", "unknown setting 'htp-port'; did you mean 'http-port'?"),
    ("[http]\nport = 1", "unknown setting 'http'"),
    ("http-port = 'abc'", "http-port must be a whole number, got 'abc'"),
    ("http-port = 1.5", "http-port must be a whole number, got '1.5'"),
    ("http-port = true", "http-port must be a whole number, got 'True'"),
    ("http-port = [1]", "http-port must be a single value, got [1]"),
    ("id = ['a', 'b']", "id must be a single value, got ['a', 'b']"),
    ("access-log = 3", "access-log must be true or false, got '3'"),
    ("http-port = ", "Invalid value"), ("\xff", "settings file"),
])  # fmt: skip
def test_invalid_settings_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(content.encode("latin-1"))
    message = _refused(capsys, "serve", "--config-file", str(file))
    assert text in message
    assert str(file) in message


def test_missing_settings_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = str(tmp_path / "none.toml")
    assert missing in _refused(capsys, "serve", "--config-file", missing)
    monkeypatch.setenv("HEADRACE_CONFIG_FILE", missing)
    assert missing in _refused(capsys, "serve")


def test_command_line_wins_over_environment_over_file(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        f"model-repository = ['{good}']\n"
        "id = 'from the file'\nlog_format = 'json'\nhttp-max-input-size = 1234\n"
    )
    environment = {
        "HEADRACE_CONFIG_FILE": str(file), "HEADRACE_ID": "from the environment",
        "HEADRACE_LOG_FORMAT": "ISO8601", "HEADRACE_ACCESS_LOG": "true",
    }  # fmt: skip
    options = ["--id=from the command line"]
    with ServerProcess(good, options=options, environment=environment) as server:
        with HttpClient(server.url, binary=False) as client:
            assert client.server_metadata().name == "from the command line"
            answer = ask(server.http, "POST", "/v2/models/same/infer", b" " * 2000)
        assert "maximum allowed value of 1234 bytes" in answer.error
        server.stop()
        line = next(line for line in server.log.splitlines() if "headrace.access" in line)
    assert line[10] == "T"  # an ISO date, not JSON
    assert line[23] == "Z"


# --- serving


def test_start_up_shows_addresses_and_models(good: Path) -> None:
    with ServerProcess(good) as server:
        assert f"HTTP     http://{server.http}  (documentation at http://{server.http}/docs)" in (
            server.output
        )
        assert f"gRPC     {server.grpc}\n" in server.output
        assert f"metrics  http://{server.metrics}/metrics\n" in server.output
        [row] = [line.split() for line in server.output.splitlines() if line.startswith("same")]
        assert row[:3] == ["same", "1", "onnxruntime"]
        assert "READY" in row


@pytest.mark.slow
def test_only_the_selected_doors(good: Path) -> None:
    options = ["--allow-grpc=false", "--allow-metrics=0"]
    with ServerProcess(good, options=options, wait=True) as server:
        assert ask(server.http, "GET", "/v2/health/ready").status == 200
        assert "gRPC" not in server.output
        assert "metrics" not in server.output


def test_a_single_model_file(tmp_path: Path) -> None:
    file = tmp_path / "files" / "alone.onnx"
    write_model(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    with (
        ServerProcess(empty, options=["--model-file", str(file)]) as server,
        HttpClient(server.url, binary=False) as client,
    ):
        answer = client.infer("alone", {"INPUT0": np.ones((1, 2), np.float32)})
    assert (answer.model_version, answer["OUTPUT0"].tolist()) == ("1", [[1, 1]])


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("words", "says"), [
    ("serve --model-repository {tmp}/nowhere", "model repository {tmp}/nowhere cannot be read"),
    ("{serve} --http-port={taken}", "headrace serve: cannot listen on 127.0.0.1:{taken} for HTTP"),
    slow("{serve} --grpc-port={taken}", "serve: cannot listen on 127.0.0.1:{taken} for gRPC"),
    slow("{serve} --metrics-port={taken}", "serve: cannot listen on 127.0.0.1:{taken} for metrics"),
    slow("{serve} --http-port={free} --grpc-port={free}", "listen on 127.0.0.1:{free} for gRPC"),
    slow("models check {tmp}/nowhere", "model repository {tmp}/nowhere cannot be read"),
    slow("serve {tmp}/none.onnx", "headrace serve: there is no model file {tmp}/none.onnx\n"),
    slow("{serve} --log-file={tmp}/no/such.log", "serve: cannot write the log {tmp}/no/such.log: "),
    slow("{serve} --model-repository {good}/same/1/model.onnx",
         "headrace serve: model repository {good}/same/1/model.onnx is a file; a file that is"),
])  # fmt: skip
def test_failed_starts(good: Path, tmp_path: Path, words: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve = " ".join(("serve --model-repository", str(good), *FREE_PORTS))
        names = {"good": good, "tmp": tmp_path, "serve": serve, "free": free_port()}
        names["taken"] = listener.getsockname()[1]
        ended = run(*words.format(**names).split())
    assert ended.returncode == 1
    assert says.format(**names) in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_on_a_terminal_nothing_is_printed_twice(good: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "headrace", "serve"]
    words += ["--model-repository", str(good), *FREE_PORTS]
    with subprocess.Popen(words, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        output = b""
        try:
            while b"\nready after" not in output:
                output += os.read(ours, 4096)
            process.terminate()
            while piece := os.read(ours, 4096):
                output += piece
        except OSError:  # the terminal's other end is closed
            pass
        finally:
            process.terminate()
            os.close(ours)
    assert b"stopped; every admitted request was answered" in output
    assert output.count(b"ready after") == 1, output.decode()


def test_exit_on_error(bad: Path) -> None:
    ended = run("serve", "--model-repository", str(bad), *FREE_PORTS)
    assert ended.returncode == 1
    assert "misconfigured, no_model version 1 cannot be loaded; --exit-on-error" in ended.stderr
    assert "misconfigured/config.pbtxt:2" in ended.stderr
    assert "did you mean 'max_batch_size'?" in ended.stderr
    assert "READY" in ended.stdout


@pytest.mark.slow
def test_exit_on_error_false(bad: Path) -> None:
    with ServerProcess(bad, options=["--exit-on-error=false"]) as server:
        assert ask(server.http, "GET", "/v2/health/ready").status == 200
        assert ask(server.http, "GET", "/v2/models/same/ready").status == 200
        assert ask(server.http, "GET", "/v2/models/no_model/ready").status == 503
        assert server.stop() == 0


@pytest.mark.parametrize(("word", "says"), [
    ("--allow-sagemaker", "is an option of Triton's that headrace does not offer"),
    ("--allow-vertex-ai=true", "is an option of Triton's that headrace does not offer"),
    ("--backend-config=python", "must be BACKEND,SETTING=VALUE, got 'python'"),
    ("--backend-config=onnxruntime,default-max-batch-size=x", "must be a whole number"),
    ("--strict-model-config=maybe", "must be true or false, got 'maybe'"),
])  # fmt: skip
def test_refused_options_of_triton(
    capsys: pytest.CaptureFixture[str], word: str, says: str
) -> None:
    assert says in _refused(capsys, "serve", "--model-repository", "x", word)


def test_options_of_triton_that_are_settings() -> None:
    settings, lines = translate(
        [
            ("--strict-model-config", "false"),
            ("--backend-config", "onnxruntime,default-max-batch-size=4"),
            ("--backend-config", "python,shm-default-byte-size=1"),
            ("--allow-sagemaker", "false"),
        ]
    )
    assert settings == {"disable_auto_complete_config": "false", "default_max_batch_size": "4"}
    assert lines == [
        "--backend-config has no effect: shm-default-byte-size: settings of a backend lie in a"
        " model's parameters",
        "--allow-sagemaker has no effect: there is no door of this kind",
    ]


def test_help_of_serve_names_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: headrace serve [OPTIONS] [FILE ...]\n")
    # An option with two names has a comma behind the first from Python 3.13 on.
    told = Counter(re.findall(r"\n  --([a-z0-9-]+)[ ,]", text))
    assert [told[option.name] for option in OPTIONS] == [1] * len(OPTIONS)
    assert [line[:-1] for line in text.splitlines() if line[:-1] in SECTIONS] == list(SECTIONS)


def test_options_of_tritons_internals_are_accepted(good: Path) -> None:
    """In either form; each is reported once."""
    options = (
        "--http-thread-count", "4", "--http-thread-count=8", "--cuda-memory-pool-byte-size=0:1",
        "--cuda-memory-pool-byte-size=1:1",
    )  # fmt: skip
    with ServerProcess(good, options=options) as server:
        assert ask(server.http, "GET", "/v2/health/ready").status == 200
        lines = [line for line in server.log.splitlines() if "has no effect" in line]
    assert lines == [
        "headrace serve: --http-thread-count has no effect: one event loop answers all connections",
        "headrace serve: --cuda-memory-pool-byte-size has no effect:"
        " a model's GPU memory is limited by gpu_mem_limit in its configuration",
    ]


def test_no_option_of_triton_is_also_a_setting() -> None:
    settings = {f"--{name}" for option in OPTIONS for name in (option.name, *option.aliases)}
    assert not settings & {*BY_VALUE, *WITHOUT_EFFECT}
    assert not BY_VALUE.keys() & WITHOUT_EFFECT.keys()


def test_a_server_without_doors_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--allow-http=false", "--allow-grpc=false")
    assert "nothing could be asked" in _refused(capsys, "serve", "--model-repository", "x", *words)


def test_examples_of_a_source_tree_are_those_of_the_package() -> None:
    with ExitStack() as stack:
        directory = Path(example_repository(stack))
        assert (directory / "simple" / "1" / "model.onnx").is_file()
        names = {model.name for model in directory.iterdir()}
    assert not directory.exists()
    wheel = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["tool"]["hatch"][
        "build"
    ]
    shipped = map(Path, wheel["targets"]["wheel"]["only-include"])
    assert names == {path.name for path in shipped if path.parent.name == EXAMPLES.name}


def test_a_transport_that_is_not_installed_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)  # as where it is not installed
    words = ("--model-repository", "x", "--grpc-transport=grpcio")
    assert "pip install 'headrace[grpcio]'" in _refused(capsys, "serve", *words)


def test_the_server_address_of_commands_is_not_a_setting() -> None:
    assert from_environment({"HEADRACE_URL": "http://127.0.0.1:8000"}) == {}


def test_service_variables_of_kubernetes_are_ignored() -> None:
    links = {
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_HTTP": "8000",
        "HEADRACE_PORT": "tcp://10.0.0.1:8000",
        "HEADRACE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HEADRACE_GRPC_SERVICE_HOST": "10.0.0.2",
        "HEADRACE_GRPC_PORT": "tcp://10.0.0.2:8001",  # the name of a setting, too
        "HEADRACE_GRPC_PORT_8001_TCP_PROTO": "tcp",
        "HEADRACE_HTTP_PORT": "9000",
    }
    assert from_environment(links) == {"http_port": 9000}
