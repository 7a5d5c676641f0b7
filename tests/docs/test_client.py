"""Examples of docs/client.md run and print the documented output."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import headrace
from tests.docs.pages import BLOCK, ROOT
from tests.support.server_process import examples

PAGE = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    for name in ("digits", "storyteller", "text_language"):
        examples(tmp_path, name)
    # No plugin but those that a program names: to import the others takes longer than its test.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = 0
    with headrace.serve(tmp_path) as server:
        for (kind, program), (form, said) in pairwise([*BLOCK.findall(PAGE), ("", "")]):
            if kind != "python":
                continue
            ran += 1
            script = tmp_path / "program.py"
            script.write_text(program.replace("Client()", f"Client({server.url!r})"))
            words = [] if form == "text" else ["-m", "pytest", "-q"]
            command = [sys.executable, *words, str(script)]
            answer = subprocess.run(
                command, capture_output=True, text=True, cwd=tmp_path, env=environment
            )
            assert answer.returncode == 0, answer.stdout + answer.stderr
            assert form != "text" or answer.stdout == said
    assert ran == 6
