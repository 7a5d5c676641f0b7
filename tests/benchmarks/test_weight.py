"""Counts of code, and values beside their limits and budgets."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.request_path import Door, other_interpreter
from benchmarks.weight import BUDGETS, Budget, Sources, Weight, above, code_lines, count, show

ROOT = Path(__file__).parents[2]
DOOR = Door("a door", (), (), ())


@pytest.mark.parametrize(("source", "lines"), [
    ("", 0), ("# only\n\n# comments\n", 0), ('"""A docstring\n\nof a module."""\n', 0),
    ("x = 1  # a comment behind code\n\ny = 2\n", 2),
    ("f(\n    1,\n\n    # a comment\n    2,\n)\n", 4), ('x = """a\n\nb"""\n', 2),
    ('def f():\n    """A docstring."""\n    return "no docstring"\n', 2),
    ('class A:\n    """One."""\n\n    async def f():\n        """Another\n        one."""\n', 2),
    ('x = 1\n"no docstring"\n', 2), ('def f():\n    "ä"\n    x = "ä" + f"{x}"\n', 2),
])  # fmt: skip
def test_lines_of_code(source: str, lines: int) -> None:
    assert code_lines(source) == lines


def test_generated_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a_pb2.py").write_text("x = 1\n")
    assert count(tmp_path.glob("*.py")) == Sources(2, 2)


def test_values_above_their_limits_are_named() -> None:
    budgets = [
        Budget("at its limit", 1, 2, lambda weight: 2),
        Budget("too many", 1, 57.2, lambda weight: 57.3),
        Budget("without a limit", 1, None, lambda weight: 48_000),
    ]
    weight = Weight(DOOR, DOOR)
    assert above(weight, budgets) == ["too many: 57.3, and the limit is 57.2"]
    rows = """\
        | at its limit | 2 | 2 | 1 |
        | too many | 57.3 | 57.2 | 1 |
        | without a limit | 48 000 |  | 1 |"""
    assert show(weight, budgets).endswith(dedent(rows))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(bool(other_interpreter()), reason=other_interpreter())
def test_every_budget_is_printed_beside_a_value() -> None:
    script = ROOT / "scripts" / "weight"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(BUDGETS), done.stderr
    for line, budget in zip(lines[2:], BUDGETS, strict=True):
        what, value, *_ = line.strip("| ").split(" | ")
        assert what == budget.what
        assert float(value.replace(" ", "")) > 0
