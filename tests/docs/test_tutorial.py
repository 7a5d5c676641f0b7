"""Commands of the tutorial run in order and print the documented output."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, ROOT
from tests.support.server_process import ServerProcess

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
TOOK = re.compile(r"[\d.]+ [mµ]s$", re.MULTILINE)


def said(form: str, text: str) -> object:
    """Normalized output of a command."""
    return json.loads(text) if form == "json" else TOOK.sub("", text).strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_step(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    checked = 0
    with ExitStack() as servers:
        for (kind, text), (form, answer) in pairwise([*BLOCK.findall(PAGE), ("", "")]):
            if kind == "console":
                servers.close()
                words = shlex.split(text)[2:]
                options = [str(tmp_path / word) if word == "models" else word for word in words]
                server = servers.enter_context(ServerProcess(options=options))
                continue
            if kind not in ("sh", "python"):
                continue
            text = text.replace("headrace infer", f"headrace infer --url={server.url}")
            text = text.replace("localhost:8000", server.http)
            text = text.replace("localhost:8001", server.grpc)
            text = text.replace("AsyncClient()", f"AsyncClient({server.url!r})")
            words = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
            ran = subprocess.run(
                words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PATH": path}
            )
            assert ran.returncode == 0, (text, ran.stdout, ran.stderr)
            if form in ("json", "text"):
                checked += 1
                assert said(form, ran.stdout) == said(form, answer)
    assert checked == 6
