"""Examples of docs/shared-memory.md run as documented."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.server_process import ServerProcess, onnx_examples

PAGE = (ROOT / "docs" / "shared-memory.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_program_prints_the_sums(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    with ServerProcess(onnx_examples(tmp_path), options=("--allow-client-shm",)) as server:
        program = blocks(PAGE, "python")[0].replace("127.0.0.1:8000", server.http)
        answer = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, text=True
        )
    assert answer.stdout.split()[-3:] == ["26", "28", "30]]"]
