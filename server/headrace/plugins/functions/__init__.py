"""Functions and classes as models: the names of `from headrace import model`.

In reading order: `signature.py` reads a function's declarations, `decorator.py` stores them,
`calls.py` converts requests to calls and results to responses, and `adapter.py` makes the class
that the worker runs. `load` is the loader of Python files; it imports the rest for a file that
needs it.
"""

import difflib
import re
import sys
from types import ModuleType
from typing import Any

from headrace.workers.python_loader import class_of, import_file

_NO_SUCH_NAME = re.compile(r"cannot import name '(\w+)' from 'headrace' \(.*\)")


def load(document: dict[str, Any]) -> Any:
    """The class `TritonPythonModel` of a file, or its `@model` in the form of such a class.

    Passes on exceptions of the import; `LookupError` if the file has neither or several.
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
    """Make `from headrace import model` work if the package's root was not imported."""

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
    """Add a suggestion to an import error about a name of `headrace`."""
    found = _NO_SUCH_NAME.fullmatch(str(error))
    if found is None:
        return
    from headrace.plugins.functions import offered

    near = difflib.get_close_matches(found[1], offered.__all__, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    error.msg = f"cannot import name {found[1]!r} from 'headrace'{hint}"
