"""The mechanical part of how docstrings are worded: the first line names its thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PARTS = ("server/headrace", "benchmarks", "scripts", "tests/support")
# Words that only point at a thing, or paraphrase one; and references in place of a text.
FORBIDDEN = {
    "It", "That", "Those", "These", "They", "What", "Whatever", "Whichever", "Who", "Whoever",
    "Be", "Have", "Know", "Tell", "See", "Whether", "Which", "How", "Where", "When", "Why", "As",
    "So", "There", "Nobody", "Somebody", "Someone", "Nothing", "Something", "Everybody", "Anybody",
}  # fmt: skip


def python_files() -> Iterator[Path]:
    """The Python files of the checked parts; scripts have no suffix."""
    for part in PARTS:
        for path in sorted((REPOSITORY / part).rglob("*")):
            if path.suffix == ".py":
                yield path
            elif path.parent == REPOSITORY / "scripts" and path.is_file():
                lead = path.read_text(encoding="utf-8").partition("\n")[0]
                if "python" in lead:
                    yield path


def offenders(text: str) -> Iterator[tuple[int, str]]:
    """Line and summary of each docstring that begins with a forbidden word."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        if (first := re.match(r"\w+", summary)) and first[0] in FORBIDDEN:
            yield node.body[0].lineno, summary


def test_summaries_name_their_thing() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {summary}"
        for path in python_files()
        for line, summary in offenders(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["docstrings whose summaries name nothing:", *found])


def test_an_offender_is_found() -> None:
    text = '"""Values."""\n\ndef f() -> None:\n    """What is wanted.\n\n    More.\n    """\n'
    assert list(offenders(text)) == [(4, "What is wanted.")]
