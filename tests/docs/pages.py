"""Code blocks of the pages."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def check_program(program: str, printed: str, folder: Path, *options: str, seconds: float) -> None:
    """Assert that a program, run as a file of `folder`, prints this and ends well in time."""
    path = folder / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, *options, path], cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )
    assert (ran.stdout, ran.returncode) == (printed, 0), ran.stderr[-3000:]
