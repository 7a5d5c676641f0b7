"""The programs of docs/engine.md run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

PROGRAMS = blocks((ROOT / "docs" / "engine.md").read_text(encoding="utf-8"), "python")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [*zip(PROGRAMS, ["[[0]]\n1\n", "[  2. 198.]\n"], strict=True)]
)
def test_programs(program: str, printed: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, "-W", "error", path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr
