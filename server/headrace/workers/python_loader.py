"""Loader of Python files with Triton's API."""

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from headrace.workers.model_class import FreshLoader

MARK = "__headrace_model__"  # attribute of functions and classes decorated with @model


def load(document: dict[str, Any]) -> Any:
    """The class `TritonPythonModel` of a file; raises what importing it raises, `LookupError`."""
    try:
        return class_of(import_file(document))
    except ImportError as error:
        if error.name == "headrace":  # as in `from headrace import model`
            error.msg += "; this server was installed without its part 'functions'"
        raise


def import_file(document: dict[str, Any]) -> ModuleType:
    """Import a file, as `model` by default; passes on its exceptions."""
    name, path = document.get("module", "model"), document["file"]
    loader = FreshLoader(name, path)
    # A package containing the files beside it, for `from . import another`.
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


def class_of(module: ModuleType) -> Any:
    """The class `TritonPythonModel` of a module; raises `LookupError` if it has none."""
    found = getattr(module, "TritonPythonModel", None)
    if found is not None:
        return found
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
