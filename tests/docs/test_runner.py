"""The programs of docs/runner.md print what the page says."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, check_program

PAGE = (ROOT / "docs" / "runner.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [*zip(blocks(PAGE, "python"), blocks(PAGE, "text"), strict=True)]
)
def test_programs(program: str, printed: str, tmp_path: Path) -> None:
    check_program(program, printed, tmp_path, "-W", "error", seconds=60)
