"""The command line in docs/from-triton.md starts a server with the documented answers."""

import shlex
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.http_socket import ask
from tests.support.server_process import ServerProcess, examples

PAGE = (ROOT / "docs" / "from-triton.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    _, command = blocks(PAGE, "sh")
    words = shlex.split(command.replace("\\\n", "").replace("/tmp", str(tmp_path)))
    assert words[:2] == ["headrace", "serve"]
    options = [
        word for word in words[2:] if "-address" not in word and "model-repository=" not in word
    ]
    with ServerProcess(examples(tmp_path / "examples"), options=options) as server:
        assert ask(server.http, "GET", "/v2/models/simple/ready").status == 200
        assert ask(server.http, "POST", "/v2/repository/index", b"").status == 403
        lines = [line for line in server.log.splitlines() if line.startswith("headrace serve: ")]
    assert lines == blocks(PAGE, "text")[0].splitlines()
