"""The source of a function or class as an importable file, wherever it was defined.

Definitions beside it, in the same module, notebook or function, are copied as far as they are used:
functions, classes, and values that Python literals can express. Names from other modules are
imported. Anything else, such as an array or a fitted model, is pickled as it is at that time: the
other process gets a copy. So is a fitted estimator, which is served without a function.
"""

import __future__

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

from headrace.workers.python_loader import MARK


class ServeError(Exception):
    """A server that did not start, or not with its models; the text ends with its log."""


class SourceError(ServeError):
    """A function or class that cannot be written to a file, with the reason."""


OBJECTS = "objects.pkl"
_METHODS = ("predict", "transform")  # of estimators; one of them is enough


@dataclass(frozen=True, slots=True)
class Source:
    """A module's text, and the pickled objects that it reads from the file `OBJECTS` beside it.

    `function` is the name of the model in it, "" for Triton's.
    """

    text: str
    objects: bytes = b""
    function: str = ""


def name_of(target: Any) -> str:
    """The name of a function or class; raises `SourceError` for anything else."""
    if not isinstance(target, type | FunctionType):
        expected = "a model is a function or class, a path, or a mapping of names to them"
        if _is_estimator(target):
            expected = f'an estimator is served by a name, as in serve({{"name": {target!r:.40}}})'
        raise SourceError(f"{target!r:.200} has no source: {expected}")
    return target.__name__


def source_of(target: Any) -> Source:
    """The source of a module that serves a function, class or fitted estimator.

    Raises `SourceError`.
    """
    if _is_estimator(target):
        return _estimator_source(target)
    name = name_of(target)
    parts: dict[str, str] = {}
    objects: dict[str, Any] = {}
    _define(target, parts, objects)
    flag = __future__.annotations.compiler_flag
    later = any(code.co_flags & flag for code in _codes(target))
    text = "\n".join([
        "from __future__ import annotations" if later else "",
        *_head(bool(objects)),
        *parts.values(),
        f"if not hasattr({name}, {MARK!r}):",
        f"    {name} = __import__('headrace').model({name})\n",
    ])  # fmt: skip
    return Source(text, _pickled(objects, target.__module__) if objects else b"", name)


def _is_estimator(target: Any) -> bool:
    """True for an object with a method of scikit-learn's estimators."""
    if isinstance(target, type | FunctionType):
        return False
    return any(callable(getattr(target, method, None)) for method in _METHODS)


def _estimator_source(target: Any) -> Source:
    module = sys.modules.get("sklearn.utils.validation")
    if module is not None:
        try:
            module.check_is_fitted(target)
        except (module.NotFittedError, TypeError) as error:
            raise SourceError(f"{target!r:.200} cannot be served: {error}") from None
    text = "\n".join([
        *_head(True),
        "from headrace.plugins.loaders.sklearn import model_of",
        "TritonPythonModel = model_of(_objects['model'])\n",
    ])  # fmt: skip
    return Source(text, _pickled({"model": target}, type(target).__module__))


def _head(objects: bool) -> Iterator[str]:
    """The lines that make this process's modules, and the pickled objects, available."""
    yield "import sys"
    yield f"sys.path += [path for path in {sys.path!r} if path not in sys.path]"
    if objects:
        yield "import pathlib, pickle"
        yield f"_objects = pickle.loads(pathlib.Path(__file__).with_name({OBJECTS!r}).read_bytes())"


def _pickled(objects: Mapping[str, Any], module: str) -> bytes:
    """Objects as bytes; those of classes of `module`, whose source is not there, by value.

    Raises `SourceError`.
    """
    try:
        library: Any = import_module("cloudpickle")
    except ImportError:
        name, value = next(iter(objects.items()))
        raise SourceError(
            f"{name}, a {type(value).__name__}, is copied to the other process by cloudpickle:"
            " pip install 'headrace[notebook]'"
        ) from None
    with _by_value(library, module):
        try:
            found: bytes = library.dumps(objects)  # together, since they may share parts
        except Exception as error:
            for name, value in objects.items():
                _check(library, name, value)
            raise SourceError(f"objects cannot be copied to another process: {error}") from error
    return found


def _check(library: Any, name: str, value: Any) -> None:
    """Raise `SourceError` for an object that cannot be pickled."""
    try:
        library.dumps(value)
    except Exception as error:
        raise SourceError(
            f"{name}, a {type(value).__name__}, cannot be copied to another process ({error}):"
            " load it in the function, or in the method `load` of a class"
        ) from None


@contextmanager
def _by_value(library: Any, module: str) -> Iterator[None]:
    """Let cloudpickle copy the classes of a module that the other process may not import."""
    known = sys.modules.get(module)
    if known is None or module in library.list_registry_pickle_by_value():
        yield
        return
    library.register_pickle_by_value(known)
    try:
        yield
    finally:
        library.unregister_pickle_by_value(known)


def _define(target: Any, parts: dict[str, str], objects: dict[str, Any]) -> None:
    """Add the definition of a function or class, after its dependencies."""
    name = target.__name__
    if name in parts:
        return
    parts[name] = ""
    node = _definition(target)
    known = _namespace(target)
    for used in _used(node):
        if used in known and used != name:
            _add(used, known[used], target, parts, objects)
    del parts[name]
    parts[name] = ast.unparse(node)


def _add(name: str, value: Any, user: Any, parts: dict[str, str], objects: dict[str, Any]) -> None:
    """Add a name used by a definition."""
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
        return
    origin = getattr(value, "__module__", None)
    if origin == user.__module__ and isinstance(value, type | FunctionType):
        _define(value, parts, objects)
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
    if same:
        parts[name] = f"{name} = {value!r}"
        return
    objects[name] = value
    parts[name] = f"{name} = _objects[{name!r}]"


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
