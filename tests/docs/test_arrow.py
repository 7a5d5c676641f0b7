"""The programs of docs/arrow.md, against a server with the examples."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.server_process import clean_server, onnx_examples

pa = pytest.importorskip("pyarrow")
PAGE = (ROOT / "docs" / "arrow.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    rows, labels = blocks(PAGE, "python")
    curl, serve = blocks(PAGE, "sh")
    assert "--door flight=8815" in serve
    subprocess.run([sys.executable, "-c", rows], cwd=tmp_path, check=True)
    with clean_server(onnx_examples(tmp_path), options=["--door=flight=0"]) as server:
        command = curl.replace("localhost:8000", server.http)
        subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
        found = pa.ipc.open_stream((tmp_path / "labels.arrow").read_bytes()).read_all()
        assert found.column_names == ["probabilities", "label"]
        port = server.door("flight").removeprefix("grpc://127.0.0.1:")
        program = labels.replace("8815", port)
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == str(found["label"].to_pylist()[0])
