"""The mechanical part of the wording of docstrings, names of tests, and decision records."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PARTS = ("server/headrace", "benchmarks", "scripts", "tests")
# Words that only point at a thing, or paraphrase one; and references in place of a text.
FORBIDDEN = {
    "It", "That", "Those", "These", "They", "What", "Whatever", "Whichever", "Who", "Whoever",
    "Be", "Have", "Know", "Tell", "See", "Whether", "Which", "How", "Where", "When", "Why", "As",
    "So", "There", "Nobody", "Somebody", "Someone", "Nothing", "Something", "Everybody", "Anybody",
}  # fmt: skip
# Such a docstring, or a text that looks like one: few files have any, and only those are parsed.
LIKELY = re.compile(rf"""(?:\"{{3}}|'{{3}})\s*(?:{"|".join(sorted(FORBIDDEN))})\b""")
# The same for names of tests, which are sentences or noun phrases.
RIDDLE = re.compile(r"test_(its?|what(ever)?|who(ever)?|which|whether|how|where|why|those)_")
# Classes that programs of users name; the engine may use the same term for its own.
PUBLIC = {"Model", "Tensor"}
RECORD = ["Context", "Decision", "Alternatives considered", "Measurements", "Consequences"]


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
    if not LIKELY.search(text):
        return
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


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((REPOSITORY / "server" / "headrace").rglob("*.py")):
        if path.parent.name != "pb":
            for name in re.findall(r"(?m)^ *class (\w+)", path.read_text(encoding="utf-8")):
                places.setdefault(name, []).append(str(path.relative_to(REPOSITORY)))
    assert len(places) > 500
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() == PUBLIC, twice


def test_names_of_tests_are_no_riddles() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
        if RIDDLE.match(name)
    ]
    assert not found, "\n".join(["tests whose names name nothing:", *found])


def test_decision_records_have_the_usual_form() -> None:
    for path in sorted((REPOSITORY / "docs/adr").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        title = re.match(r"# \d+\. (\w+)", text)
        assert title, path
        assert title[1] not in FORBIDDEN, path
        assert re.search(r"^\*\*Status:\*\* (Accepted|Superseded)", text, re.MULTILINE), path
        sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert {"Context", "Decision", "Consequences"} <= set(sections), path
        assert sections == [name for name in RECORD if name in sections], path


def test_an_offender_is_found() -> None:
    text = '"""Values."""\n\ndef f() -> None:\n    """What is wanted.\n\n    More.\n    """\n'
    assert list(offenders(text)) == [(4, "What is wanted.")]
