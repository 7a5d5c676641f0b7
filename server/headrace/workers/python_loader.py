"""Models that are Python files."""

import difflib
import importlib.util
import os
import re
import sys
from types import ModuleType
from typing import Any

from headrace.workers.model_class import FreshLoader

_NO_SUCH_NAME = re.compile(r"cannot import name '(\w+)' from 'headrace' \(.*\)")


def load(document: dict[str, Any]) -> Any:
    """The class `TritonPythonModel` of a file, or its `@model` as such a class.

    Its module is `model`, unless the document has another name for it. Raises what importing it
    raises, `LookupError` if it has neither or several.
    """
    _offer_names(sys.modules["headrace"])
    try:
        module = _import(document.get("module", "model"), document["file"])
    except ImportError as error:
        _suggest(error)
        raise
    found = getattr(module, "TritonPythonModel", None)
    if found is not None:
        return found
    from headrace.workers.functions.adapter import adapted, find

    declaration = find(module, document["parameters"].get("function", ""))
    if declaration is None:
        defined = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        raise LookupError(
            "the model's file has neither a class TritonPythonModel nor a function or class that"
            " is decorated with @model (from headrace import model); it defines"
            f" {', '.join(defined[:10]) or 'nothing'}"
        )
    return adapted(declaration)


def _offer_names(package: ModuleType) -> None:
    """Make `from headrace import model` work where the package has no root of its own."""

    def name(wanted: str) -> Any:
        from headrace.workers import functions

        if wanted == "__all__":
            return [*functions.__all__, "__version__"]
        if wanted in functions.__all__:
            return getattr(functions, wanted)
        raise AttributeError(f"module 'headrace' has no attribute {wanted!r}")

    if "__all__" not in vars(package):
        vars(package)["__getattr__"] = name


def _suggest(error: ImportError) -> None:
    """Add what was probably meant to an error, where `headrace` has no such name."""
    found = _NO_SUCH_NAME.fullmatch(str(error))
    if found is None:
        return
    from headrace.workers import functions

    near = difflib.get_close_matches(found[1], functions.__all__, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    error.msg = f"cannot import name {found[1]!r} from 'headrace'{hint}"


def _import(name: str, path: str) -> ModuleType:
    loader = FreshLoader(name, path)
    # A package whose modules are the files beside it, for `from . import another`.
    folder = os.path.dirname(path)
    spec = importlib.util.spec_from_file_location(
        name, path, loader=loader, submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
