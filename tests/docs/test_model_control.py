"""Commands and programs of docs/model-control.md work as documented."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.server_process import EXAMPLES, ServerProcess

PAGE = (ROOT / "docs" / "model-control.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--model-control-mode=explicit", "--load-model=simple", "--load-overrides=files")
    with ServerProcess(EXAMPLES, options=options) as process:
        yield process


def shell(server: ServerProcess, command: str) -> str:
    command = command.replace("localhost:8000", server.http)
    return subprocess.run(
        command.replace("curl -s", "curl -sf"), shell=True, capture_output=True, check=True,
        text=True,
    ).stdout  # fmt: skip


def rows(server: ServerProcess, model: str) -> int:
    """The largest batch of a model."""
    config = json.loads(shell(server, f"curl -s localhost:8000/v2/models/{model}/config"))
    return int(config["max_batch_size"])


def program(server: ServerProcess, text: str) -> list[str]:
    text = text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)
    ran = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, check=True, text=True, cwd=ROOT
    )
    return ran.stdout.splitlines()


@pytest.mark.slow
def test_the_commands(server: ServerProcess) -> None:
    _, index, load_and_unload, override = blocks(PAGE, "sh")
    assert json.loads(shell(server, index)) == json.loads(blocks(PAGE, "json")[0])
    assert shell(server, load_and_unload) == ""
    assert shell(server, override) == ""
    assert rows(server, "simple") == 4


@pytest.mark.slow
def test_the_programs(server: ServerProcess) -> None:
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    control, overrides = blocks(PAGE, "python")
    assert program(server, control) == ["True", "False"]
    assert program(server, overrides) == []
    assert '"max_batch_size":4' in shell(server, "curl -s localhost:8000/v2/models/mine/config")
    assert '"max_batch_size":4' not in shell(
        server, "curl -s localhost:8000/v2/models/simple/config"
    )
