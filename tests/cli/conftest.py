"""A server for the commands that ask a running one, and a way to run them."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from tests.support.command import write_bad_repository, write_model
from tests.support.server_process import ServerProcess, clean_server, onnx_examples


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a command."""

    status: object
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document that is its only output."""
        return json.loads(self.out)


Headrace = Callable[..., Ended]


@pytest.fixture(autouse=True)
def log_of_the_command() -> Iterator[None]:
    """A command run in this process configures its log: later tests must not write to it."""
    yield
    root = logging.getLogger()
    root.handlers[:] = [h for h in root.handlers if not type(h).__module__.startswith("headrace.")]
    root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with small examples, and one that streams; it must log no bug."""
    root = tmp_path_factory.mktemp("examples")
    folder = onnx_examples(root, "storyteller", "text_language")
    with clean_server(folder) as process:
        yield process


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Headrace:
    """Runs the command in this process."""

    def run(*words: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        return Ended(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def headrace(command: Headrace, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """Runs the command with the server's address in the environment."""
    monkeypatch.setenv("HEADRACE_URL", server.url)
    return command


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one model."""
    root = tmp_path_factory.mktemp("good")
    write_model(root / "same" / "1" / "model.onnx")
    return root


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bad_repository(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def lone_file(tmp_path: Path) -> Callable[[str, bytes | str], Path]:
    """Writes a file and returns its path."""

    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
