"""Functions in README.md and docs/functions.md are served, answer as documented, and type-check."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "functions.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """The model files of the page and of the README, by name."""
    blocks = [text for kind, text in BLOCK.findall(PAGE) if kind == "python"]
    files = {text.split()[1]: text for text in blocks}
    short = next(t for kind, t in BLOCK.findall(README) if kind == "python" and "@model" in t)
    return files | {"short.py": short}


def questions() -> list[tuple[str, str]]:
    """Commands and their documented answers, which follow one another."""
    found = BLOCK.findall(PAGE)
    found += [(kind, text) for kind, text in BLOCK.findall(README) if "sentiment" in text]
    return [(a[1], b[1]) for a, b in pairwise(found) if (a[0], b[0]) == ("sh", "json")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files."""
    root = tmp_path_factory.mktemp("examples")
    for name, text in examples().items():
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    files = [str(path) for path in folder.glob("*.py")]
    (folder / "none").mkdir()
    with ServerProcess(folder / "none", options=files) as running:
        yield running


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("command", "answer"), questions())
def test_the_answers_are_as_shown(server: ServerProcess, command: str, answer: str) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    command = command.replace("localhost:8000", server.http)
    ran = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert json.loads(ran.stdout) == json.loads(answer)


@pytest.mark.slow
def test_all_are_served(server: ServerProcess) -> None:
    assert "UNAVAILABLE" not in server.output
    assert {"nearest", "short", "words"} <= set(
        re.findall(r"^(\w+) .* READY", server.output, re.MULTILINE)
    )


@pytest.mark.slow
def test_a_type_checker_accepts_the_functions(folder: Path) -> None:
    files = [str(path) for path in folder.glob("*.py")]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *files]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_a_linter_accepts_the_functions(folder: Path) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E9,F", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_the_error_that_is_shown() -> None:
    shown = next(text for kind, text in BLOCK.findall(PAGE) if "SignatureError" in text)
    program = """
from headrace import Float32, N, model
@model(max_batch_size=8)
def scale(x: Float32[N], factor: float) -> Float32[N]: ...
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert " ".join(shown.split()) in ran.stderr
