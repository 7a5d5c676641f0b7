"""Weight of the server beside its budgets: `scripts/weight`.

Budgets are where the code is to come to. Limits are where it has come to: `make check` fails on a
value above its limit, so that nothing grows, and whoever has made something smaller lowers the
limit here. Values depend on the code alone, never on the machine. How long the tests take does,
so that it is not here; `time make test` says it.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.calls import ROOT, SERVER
from benchmarks.report import table
from benchmarks.request_path import TOGETHER, Door, measure, other_interpreter
from benchmarks.server import BenchmarkError

_GENERATED = "_pb2.py"
_BESIDE_CORE = ("plugins", "cli")
_LAYOUT = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sources:
    """Some Python files: how many, and their lines with code."""

    files: int
    lines: int


class Weight:
    """All that can be counted; files are read when their lines are asked for."""

    def __init__(self, http: Door, grpc: Door) -> None:
        self.http = http
        self.grpc = grpc

    @cached_property
    def core(self) -> Sources:
        """The server without its plugins and commands."""
        return count(f for f in SERVER.rglob("*.py") if not _beside_core(f))

    @cached_property
    def everything(self) -> Sources:
        """The server."""
        others = count(f for f in SERVER.rglob("*.py") if _beside_core(f))
        return Sources(self.core.files + others.files, self.core.lines + others.lines)

    @cached_property
    def test_lines(self) -> int:
        """All lines of the tests."""
        tests = (ROOT / "tests").rglob("*.py")
        return sum(len(test.read_text(encoding="utf-8").splitlines()) for test in tests)


@dataclass(frozen=True, slots=True)
class Budget:
    """Final and current limit of a value; without a limit it is only printed."""

    what: str
    budget: float
    limit: float | None
    value: Callable[[Weight], float]


BUDGETS = (
    Budget("core, code lines", 33_500, 47_170, lambda w: w.core.lines),
    Budget("core, files", 195, 268, lambda w: w.core.files),
    Budget("all, code lines", 45_500, 74_430, lambda w: w.everything.lines),
    Budget("tests, lines", 45_000, None, lambda w: w.test_lines),
    Budget("HTTP JSON, Python calls alone", 32, 27, lambda w: w.http.calls),
    Budget(f"HTTP JSON, of {TOGETHER} together", 18, 11.7, lambda w: w.http.calls_together),
    Budget("gRPC, Python calls alone", 45, 32, lambda w: w.grpc.calls),
    Budget(f"gRPC, of {TOGETHER} together", 24, 18.4, lambda w: w.grpc.calls_together),
    Budget("HTTP JSON, files passed", 10, 9, lambda w: w.http.files),
    Budget("gRPC, files passed", 12, 11, lambda w: w.grpc.files),
    Budget("HTTP JSON, objects made", 3, 3, lambda w: w.http.made),
    Budget("gRPC, objects made", 3, 3, lambda w: w.grpc.made),
)


def code_lines(source: str) -> int:
    """Lines with code: none that are blank or hold nothing but comments or docstrings."""
    docstrings = set(_docstrings(ast.parse(source)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.start not in docstrings:
            texts = enumerate(token.string.splitlines(), token.start[0])
            lines.update(number for number, text in texts if text.strip())
    return len(lines)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The positions of docstrings of a module, its classes and its functions: line and column."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
                | ast.AsyncFunctionDef(body=[first, *_])
            ):
                match first:
                    case ast.Expr(value=ast.Constant(value=str())):
                        yield first.lineno, first.col_offset


def count(files: Iterable[Path]) -> Sources:
    """Files and lines of code, but for generated files."""
    texts = [f.read_text(encoding="utf-8") for f in files if not f.name.endswith(_GENERATED)]
    return Sources(len(texts), sum(map(code_lines, texts)))


def _beside_core(path: Path) -> bool:
    return any(path.is_relative_to(SERVER / part) for part in _BESIDE_CORE)


def show(weight: Weight, budgets: Sequence[Budget] = BUDGETS) -> str:
    """A table of values beside their limits and budgets."""
    rows = [
        (b.what, _number(b.value(weight)), _number(b.limit), _number(b.budget)) for b in budgets
    ]
    return table(("", "value", "limit", "budget"), rows, left=1)


def above(weight: Weight, budgets: Sequence[Budget] = BUDGETS) -> list[str]:
    """Messages for the values above their limits."""
    return [
        f"{b.what}: {_number(b.value(weight))}, and the limit is {_number(b.limit)}"
        for b in budgets
        if b.limit is not None and b.value(weight) > b.limit
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,g}".replace(",", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the values, or check them; 1 if one is above its limit, or nothing was counted."""
    parser = argparse.ArgumentParser(
        "scripts/weight", description="Print what the server weighs beside its budgets."
    )
    parser.add_argument("--check", action="store_true", help="print only what is above its limit")
    check = parser.parse_args(arguments).check
    if wrong := other_interpreter():
        print(f"scripts/weight: {wrong}", file=sys.stderr)
        return 0 if check else 1
    try:
        weight = Weight(*measure())
    except BenchmarkError as error:
        print(f"scripts/weight: {error}", file=sys.stderr)
        return 1
    if not check:
        print(show(weight))
    faults = above(weight)
    for fault in faults:
        print(f"scripts/weight: {fault}", file=sys.stderr)
    return 1 if faults else 0
