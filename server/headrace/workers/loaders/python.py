"""Models that are Python files."""

import importlib.util
import sys
from types import ModuleType
from typing import Any


def load(document: dict[str, Any]) -> Any:
    """The class `TritonPythonModel` of a file; raises what importing it raises."""
    module = _import("model", document["file"])
    found = getattr(module, "TritonPythonModel", None)
    if found is None:
        raise AttributeError(f"{document['file']} has no class TritonPythonModel")
    return found


def _import(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
