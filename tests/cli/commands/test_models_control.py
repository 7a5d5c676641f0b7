"""`headrace models load|unload` on a server that allows it with a header."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Headrace
from tests.support.server_process import EXAMPLES, ServerProcess, clean_server, onnx_examples

_SECRET = "--header=Secret: 7"


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that loads nothing by itself."""
    options = (
        "--model-control-mode=explicit",
        "--load-overrides=files",
        "--http-restricted-api=model-repository,statistics:secret=7",
    )
    folder = onnx_examples(tmp_path_factory.mktemp("controlled"))
    with clean_server(folder, options=options) as process:
        yield process


@pytest.fixture
def control(
    command: Headrace, controlled: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Headrace:
    """Runs the command with that server's address in the environment."""
    monkeypatch.setenv("HEADRACE_URL", controlled.url)
    return command


def states(control: Headrace, name: str) -> list[tuple[str, str, str]]:
    """Version, state and reason of each line of a model."""
    models = control("models", "list", name, _SECRET, "--json").document["models"]
    return [(model["version"], model["state"], model["reason"]) for model in models]


def test_loading_and_unloading(control: Headrace) -> None:
    assert states(control, "digits") == [("", "", "")]
    assert "not loaded" in control("models", "list", "digits", _SECRET).out
    ended = control("models", "load", "digits", "simple", _SECRET)
    assert (ended.status, ended.err) == (0, "")
    first, second = ended.out.splitlines()
    assert first.startswith("loaded digits in ")
    assert second.startswith("loaded simple in ")
    assert states(control, "digits") == [("1", "READY", ""), ("2", "READY", "")]
    assert control("infer", "digits", "--random", "--output=label").status == 0
    ended = control("models", "unload", "digits", _SECRET, "--dependents", "--json")
    [report] = ended.document["models"]
    assert (report["name"], report["ok"], report["error"]) == ("digits", True, None)
    assert states(control, "digits")[0][1:] == ("UNAVAILABLE", "unloaded")
    ended = control("infer", "digits", "--random")
    assert "unknown model: 'digits' has no available versions" in ended.err


def test_failed_loads(control: Headrace) -> None:
    ended = control("models", "load", "dgits", "simple_string", _SECRET)
    assert ended.status == 1
    assert ended.err.startswith("headrace models load: dgits: failed to load 'dgits', failed to")
    assert ended.err.endswith("; did you mean 'digits'?\n")
    assert ended.out.startswith("loaded simple_string in ")
    ended = control("models", "load", "dgits", "--json", _SECRET)
    [report] = ended.document["models"]
    assert not report["ok"]
    assert report["error"].endswith("did you mean 'digits'?")


@pytest.mark.parametrize(
    "words", [("models", "list"), ("models", "stats"), ("models", "load", "m")]
)
def test_without_the_header(control: Headrace, words: tuple[str, ...]) -> None:
    ended = control(*words)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        f"headrace {words[0]} {words[1]}: This API is restricted, expecting header 'secret';"
        " --header sends one\n"
    )


def test_a_configuration_and_files_of_the_request(control: Headrace, tmp_path: Path) -> None:
    model = EXAMPLES / "simple" / "1" / "model.onnx"
    config = tmp_path / "config.pbtxt"
    config.write_text("max_batch_size: 4\nversion_policy { all {} }\n")
    words = ("models", "load", "simple_identity", _SECRET)
    assert control(*words, "--config", str(config)).status == 0
    document = control("models", "config", "simple_identity", "--json").document
    assert document["max_batch_size"] == 4
    assert control(*words, '--config={"max_batch_size": 2}').status == 0
    document = control("models", "config", "simple_identity", "--json").document
    assert document["max_batch_size"] == 2
    files = [f"--file={version}/model.onnx={model}" for version in (3, 7)]
    assert control(*words, "--config", str(config), *files).status == 0
    found = states(control, "simple_identity")
    assert [version for version, state, _ in found if state == "READY"] == ["3", "7"]
    assert control(*words, files[0]).status == 0  # the configuration is derived from the file
    ended = control(*words, f"--file=../model.onnx={model}")
    assert ended.status == 1
    assert "file path '../model.onnx' must consist of names" in ended.err
    assert control(*words).status == 0  # as in the repository
    document = control("models", "config", "simple_identity", "--json").document
    assert document["max_batch_size"] == 8


def test_other_servers_refuse(headrace: Headrace) -> None:
    ended = headrace("models", "unload", "simple")
    assert ended.status == 1
    assert "explicit model load / unload is not allowed" in ended.err


def test_a_file_that_is_sent(control: Headrace, tmp_path: Path) -> None:
    missing = tmp_path / "none.onnx"
    ended = control("models", "load", "simple", f"--file=1/model.onnx={missing}", _SECRET)
    assert (ended.status, ended.err) == (
        1, f"headrace models load: {missing}: No such file or directory\n",
    )  # fmt: skip
