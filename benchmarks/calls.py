"""Calls of Python functions as trees, and objects as they are made, seen by profile hooks.

A hook sees the thread that it was installed on (`sys.setprofile`). A root is a call that no
recorded call has made: a callback of the event loop. C functions, also those of uvloop, NumPy and
protobuf, are not seen.
"""

import ast
import gc
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "server" / "headrace"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("platlib", "purelib", "stdlib"))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function, with the calls that it made, in order.

    `file` of the server's `own` functions is relative to its package. `line` is where the function
    begins, or the class for which `dataclass` has written it; 0 for libraries' functions.
    """

    name: str
    file: str
    line: int
    own: bool
    children: tuple["Call", ...] = ()

    def walk(self) -> Iterator["Call"]:
        """This call and all below it, in the order in which they began."""
        yield self
        for child in self.children:
            yield from child.walk()


def walk(roots: Iterable[Call]) -> Iterator[Call]:
    """All calls of some trees."""
    for root in roots:
        yield from root.walk()


class CallRecorder:
    """A profile hook that builds trees of calls."""

    def __init__(self) -> None:
        self._open: list[tuple[FrameType, list[Call]]] = []  # with the calls made so far
        self._roots: list[Call] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._open.append((frame, []))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, children = self._open.pop()
            siblings = self._open[-1][1] if self._open else self._roots
            siblings.append(_called(frame, tuple(children)))

    def take(self) -> tuple[Call, ...]:
        """The roots that have ended, but for the benchmark's own; they are forgotten."""
        roots, self._roots = self._roots, []
        self._open.clear()
        return tuple(root for root in roots if not root.file.startswith("benchmarks/"))


class ObjectRecorder:
    """A profile hook that counts the objects of the classes in `package`, by class.

    It looks through the collector's youngest generation at every call and return, so it sees what
    lives from one of these to the next, however it was made. The collector has to be disabled, and
    to have collected just before.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._held: dict[int, object] = {}  # by id: held, so that no id is used twice

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        for item in gc.get_objects(generation=0):
            # A class may have anything for its `__module__`.
            module = str(type(item).__module__)
            if module.partition(".")[0] == self._package:
                self._held.setdefault(id(item), item)

    def take(self) -> tuple[tuple[str, int], ...]:
        """Names of classes and how many objects of each there were; they are forgotten."""
        held, self._held = self._held, {}
        return tuple(sorted(Counter(type(item).__qualname__ for item in held.values()).items()))


def _called(frame: FrameType, children: tuple[Call, ...]) -> Call:
    code = frame.f_code
    if not code.co_filename.startswith("<") or not code.co_argcount:
        file, own = _place(code.co_filename)
        return Call(code.co_qualname, file, code.co_firstlineno if own else 0, own, children)
    # Compiled from a text: a method that `dataclass` or `NamedTuple` has written.
    first = frame.f_locals.get(code.co_varnames[0])
    made = first if isinstance(first, type) else type(first)
    path = getattr(sys.modules.get(made.__module__), "__file__", None) or code.co_filename
    file, own = _place(path)
    line = _class_line(path, made.__qualname__) if own else 0
    return Call(f"{made.__qualname__}.{code.co_name}", file, line, own, children)


@cache
def _place(filename: str) -> tuple[str, bool]:
    """The file as it is shown, and whether it is the server's own."""
    path = Path(filename)
    if path.is_relative_to(SERVER):
        return path.relative_to(SERVER).as_posix(), True
    for folder in (*_LIBRARIES, str(ROOT)):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix(), False
    return filename, False


@cache
def _class_line(path: str, name: str) -> int:
    """The line of a class, by the last part of its name; 0 if it is not in the file."""
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.ClassDef) and node.name == name.rpartition(".")[2]:
            return node.lineno
    return 0
