"""Workers on the oldest supported interpreter."""

import ast
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

from headrace import ipc, workers
from headrace.plugins import loaders
from headrace.plugins.environments.interpreters import OLDEST

NAMES = sorted(
    module.name
    for package in (ipc, workers, loaders)
    for module in walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_module_parses_on_the_oldest_python(name: str) -> None:
    module = import_module(name)
    assert module.__file__ is not None
    ast.parse(Path(module.__file__).read_bytes(), feature_version=OLDEST)
    named = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
    ]
    # Generic ones, which have another base, are an error before Python 3.11.
    assert [value for value in named if value.__bases__ != (tuple,)] == []
