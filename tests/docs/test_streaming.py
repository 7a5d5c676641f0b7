"""Examples of docs/streaming.md: the model is served, and clients get the documented output."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.entrance import GIVE_UP_BYTES, PAUSE_BYTES
from headrace.workers import triton_api
from tests.docs.pages import ROOT, blocks
from tests.support.server_process import ServerProcess

PAGE = (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8")
senders = pytest.mark.skipif(
    not hasattr(triton_api, "InferenceResponseSender"), reason="there are no response senders yet"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the page's model."""
    root = tmp_path_factory.mktemp("words")
    (root / "words" / "1").mkdir(parents=True)
    (root / "words" / "1" / "model.py").write_text(blocks(PAGE, "python")[0])
    (root / "words" / "config.pbtxt").write_text(blocks(PAGE, "protobuf")[0])
    with ServerProcess(root) as running:
        yield running


@pytest.mark.slow
@senders
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_command_gives_the_events(server: ServerProcess) -> None:
    command = blocks(PAGE, "sh")[0].replace("localhost:8000", server.http)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert answer.stdout.strip() == blocks(PAGE, "text")[0].strip()


@pytest.mark.slow
@senders
def test_the_client_program_prints_the_words(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    program = blocks(PAGE, "python")[1].replace("localhost:8001", server.grpc)
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, cwd=tmp_path
    )
    assert answer.stdout.split() == ["one", "after", "the"]


def test_the_bounds_are_those_of_the_server() -> None:
    assert f"{PAUSE_BYTES >> 10} KiB of a request's responses" in PAGE
    assert f"{GIVE_UP_BYTES >> 20} MiB of responses" in PAGE
