"""The programs of docs/runner.md print what the page says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "runner.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [*zip(blocks(PAGE, "python"), blocks(PAGE, "text"), strict=True)]
)
def test_programs(program: str, printed: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, "-W", "error", path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr
