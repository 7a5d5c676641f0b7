"""The source of a function or class as an importable file, wherever it was defined.

Definitions beside it, in the same module, notebook or function, are copied as far as they are used:
functions, classes, and values that Python literals can express. Names from other modules are
imported. Anything else, such as an array or a loaded model, has no source: the function has to load
it itself, or a class in its `load`.
"""

import __future__

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from headrace.plugins.functions.decorator import MARK


class ServeError(Exception):
    """A server that did not start, or not with its models; the text ends with its log."""


class SourceError(ServeError):
    """A function or class that cannot be written to a file, with the reason."""


def name_of(target: Any) -> str:
    """The name of a function or class; raises `SourceError` for anything else."""
    if not isinstance(target, type | FunctionType):
        expected = "a model is a function or class, a path, or a mapping of names to them"
        raise SourceError(f"{target!r} has no source: {expected}")
    return target.__name__


def source_of(target: Any) -> str:
    """The source of a module that serves `target` under its name; raises `SourceError`."""
    name = name_of(target)
    parts: dict[str, str] = {}
    _define(target, parts)
    flag = __future__.annotations.compiler_flag
    later = any(code.co_flags & flag for code in _codes(target))
    return "\n".join([
        "from __future__ import annotations" if later else "",
        "import sys",
        f"sys.path += [path for path in {sys.path!r} if path not in sys.path]",
        *parts.values(),
        f"if not hasattr({name}, {MARK!r}):",
        f"    {name} = __import__('headrace').model({name})\n",
    ])  # fmt: skip


def _define(target: Any, parts: dict[str, str]) -> None:
    """Add the definition of a function or class, after its dependencies."""
    name = target.__name__
    if name in parts:
        return
    parts[name] = ""
    node = _definition(target)
    known = _namespace(target)
    for used in _used(node):
        if used in known and used != name:
            _add(used, known[used], target, parts)
    del parts[name]
    parts[name] = ast.unparse(node)


def _add(name: str, value: Any, user: Any, parts: dict[str, str]) -> None:
    """Add a name used by a definition."""
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
        return
    origin = getattr(value, "__module__", None)
    if origin == user.__module__ and isinstance(value, type | FunctionType):
        _define(value, parts)
        if value.__name__ != name:
            parts[name] = f"{name} = {value.__name__}"
        return
    for known in (name, getattr(value, "__name__", name)):
        module = sys.modules.get(str(origin))
        if origin != user.__module__ and getattr(module, known, None) is value:
            parts[name] = f"from {origin} import {known} as {name}"
            return
    try:
        same = bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise SourceError(
            f"{user.__name__} uses {name}, a {type(value).__name__} that has no source: load it in"
            " the function, or in the method `load` of a class"
        )
    parts[name] = f"{name} = {value!r}"


def _definition(target: Any) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """The statement that defines a function or class."""
    for code in _codes(target):
        text = "".join(linecache.getlines(code.co_filename))
        found = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == target.__name__
        ]
        if found:
            line = code.co_firstlineno
            within = [n for n in found if _first(n) <= line <= (n.end_lineno or 0)]
            return (within or found)[-1]
    raise SourceError(f"{target!r} has no source: write it into a file, and serve that")


def _used(node: ast.AST) -> list[str]:
    """The names that a definition uses from its surroundings."""
    top = symtable.symtable(ast.unparse(node), "definition", "exec")
    tables, found = [top], dict[str, None]()
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                found[symbol.get_name()] = None
        tables += table.get_children()
    return list(found)


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _codes(target: Any) -> list[CodeType]:
    """The code objects of a function, or of a class's methods."""
    methods = vars(target).values() if isinstance(target, type) else [target]
    return [found.__code__ for found in methods if isinstance(found, FunctionType)]


def _namespace(target: Any) -> Mapping[str, Any]:
    """Values of the names that a definition may use, without `builtins`."""
    known: dict[str, Any] = dict(vars(sys.modules[target.__module__]))
    methods = vars(target).values() if isinstance(target, type) else [target]
    for found in methods:
        if isinstance(found, FunctionType):
            known.update(found.__globals__, **inspect.getclosurevars(found).nonlocals)
    return {name: value for name, value in known.items() if name not in vars(builtins)}
