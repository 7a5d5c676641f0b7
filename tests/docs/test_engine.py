"""The programs of docs/engine.md run as they stand."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, check_program

PROGRAMS = blocks((ROOT / "docs" / "engine.md").read_text(encoding="utf-8"), "python")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [*zip(PROGRAMS, ["[[0]]\n1\n", "[  2. 198.]\n"], strict=True)]
)
def test_programs(program: str, printed: str, tmp_path: Path) -> None:
    check_program(program, printed, tmp_path, "-W", "error", seconds=60)
