"""Functions and classes as models: what `from headrace import model` and its kin give.

In reading order: `signature.py` reads what a function declares, `decorator.py` keeps it, `calls.py`
turns requests into calls and results into responses, and `adapter.py` makes of it what the worker
runs. `load` is the loader of Python files; it imports the rest for a file that needs it.
"""

import difflib
import re
import sys
from types import ModuleType
from typing import Any

from headrace.workers.python_loader import class_of, import_file

_NO_SUCH_NAME = re.compile(r"cannot import name '(\w+)' from 'headrace' \(.*\)")


def load(document: dict[str, Any]) -> Any:
    """The class `TritonPythonModel` of a file, or its `@model` as such a class.

    Raises what importing the file raises, `LookupError` if it has neither or several.
    """
    _offer_names(sys.modules["headrace"])
    try:
        module = import_file(document)
    except ImportError as error:
        _suggest(error)
        raise
    if hasattr(module, "TritonPythonModel"):
        return class_of(module)
    from headrace.plugins.functions.adapter import adapted, find

    declaration = find(module, document["parameters"].get("function", ""))
    return class_of(module) if declaration is None else adapted(declaration)


def _offer_names(package: ModuleType) -> None:
    """Make `from headrace import model` work where the package has no root of its own."""

    def name(wanted: str) -> Any:
        from headrace.plugins.functions import offered

        if wanted == "__all__":
            return [*offered.__all__, "__version__"]
        if wanted in offered.__all__:
            return getattr(offered, wanted)
        raise AttributeError(f"module 'headrace' has no attribute {wanted!r}")

    if "__all__" not in vars(package):
        vars(package)["__getattr__"] = name


def _suggest(error: ImportError) -> None:
    """Add what was probably meant to an error, where `headrace` has no such name."""
    found = _NO_SUCH_NAME.fullmatch(str(error))
    if found is None:
        return
    from headrace.plugins.functions import offered

    near = difflib.get_close_matches(found[1], offered.__all__, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    error.msg = f"cannot import name {found[1]!r} from 'headrace'{hint}"
