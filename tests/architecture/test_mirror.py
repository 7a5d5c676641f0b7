"""Unit tests mirror the server: a source names its tests, and a test names its source.

A unit test lies in the folder of its source and is named after a module there, or after the folder
if its subject is the package as a whole. A topic may follow: `scheduling/test_batcher_states.py`.
No module imports one of tests: what tests share is beside them, or in `tests/support`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "server" / "headrace"
# Tests of whole servers, of everything but the server, and what tests share.
OTHERS = {
    "architecture", "benchmarks", "contract", "deploy", "docs", "faults", "hosts", "interop",
    "models", "packaging", "soak", "support",
}  # fmt: skip
# Few files have such an import, and only those are parsed.
LIKELY = re.compile(r"^\s*(?:from|import)\b[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE)


def subjects(folder: Path) -> set[str]:
    """Names of a package's modules, and its own; none without such a package."""
    modules = {path.stem for path in folder.glob("*.py")}
    return modules and {folder.name, *modules}


def misnamed(path: Path, tests: Path = TESTS, source: Path = SOURCE) -> bool:
    """True for a unit test that is named after no source in its folder."""
    place = path.relative_to(tests)
    if place.parts[0] in OTHERS:
        return False
    name = place.stem.removeprefix("test_")
    return not any(f"{name}_".startswith(f"{one}_") for one in subjects(source / place.parent))


def imported_tests(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each imported module of tests."""
    if not LIKELY.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if any(part.startswith("test_") for part in name.split(".")):
                yield node.lineno, name


def test_unit_tests_are_named_after_their_source() -> None:
    paths = sorted(TESTS.rglob("test_*.py"))
    assert len(paths) > 300
    assert [str(path.relative_to(TESTS)) for path in paths if misnamed(path)] == []


def test_other_suites_are_no_packages_of_the_server() -> None:
    assert [
        name for name in OTHERS if (SOURCE / name).exists() or not (TESTS / name).is_dir()
    ] == []


def test_no_module_imports_one_of_tests() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in imported_tests(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(("place", "expected"), [
    ("engine/test_model.py", False), ("engine/test_model_states.py", False),
    ("engine/test_engine_whole.py", False), ("test_headrace.py", False), ("test_app.py", False),
    ("faults/test_model.py", False), ("engine/test_models.py", True), ("test_model.py", True),
    ("test_engine.py", True), ("engine/loads/test_model.py", True), ("queue/test_queue.py", True),
])  # fmt: skip
def test_misnamed_files_are_found(place: str, expected: bool, tmp_path: Path) -> None:
    source = tmp_path / "headrace"
    for module in ("app.py", "engine/__init__.py", "engine/model.py"):
        (source / module).parent.mkdir(parents=True, exist_ok=True)
        (source / module).touch()
    assert misnamed(tmp_path / "tests" / place, tmp_path / "tests", source) is expected


@pytest.mark.parametrize(("statement", "found"), [
    ("from tests.engine.test_chain import Counted", ["tests.engine.test_chain.Counted"]),
    ("from tests.contract import graphs, test_grpc", ["tests.contract.test_grpc"]),
    ("import tests.docs.test_readme", ["tests.docs.test_readme"]),
    ("def f():\n    from .test_x import y", ["test_x.y"]),
    ("from tests.docs import (\n    pages,\n    test_readme,\n)", ["tests.docs.test_readme"]),
    ("from tests.engine.fakes import FakeEngine", []), ("import tests.support.client", []),
])  # fmt: skip
def test_imported_tests_are_found(statement: str, found: list[str]) -> None:
    assert [name for _, name in imported_tests(statement)] == found
