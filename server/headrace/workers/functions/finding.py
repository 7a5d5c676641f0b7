"""The model among what a file defines, as a class for the worker."""

from types import ModuleType
from typing import Any

from headrace.workers.functions.adapter import AsyncModel, FunctionModel, PlainModel
from headrace.workers.functions.decorator import Declaration, declared
from headrace.workers.functions.signature import Mode
from headrace.workers.functions.streams import AsyncStreamModel, StreamModel


def find(module: ModuleType, wanted: str = "") -> Declaration | None:
    """The one model of a module, or that of the name `wanted`; None if it has none.

    What is imported counts only where nothing is defined. Raises `LookupError` if there are several
    or not that one, `SignatureError` for one that cannot be a model.
    """
    found: dict[int, Declaration] = {}
    for value in vars(module).values():
        declaration = declared(value)
        if declaration is not None:
            found[id(value)] = declaration
    models = list(found.values())
    own = [one for one in models if one.target.__module__ == module.__name__]
    models = own or models
    names = ", ".join(sorted(one.name for one in models)) or "none"
    if wanted:
        models = [one for one in models if one.name == wanted]
        if not models:
            raise LookupError(f"there is no @model called {wanted}; there are: {names}")
    if len(models) > 1:
        raise LookupError(
            f"expected one @model, found {names}; parameters['function'] in the config.pbtxt of a"
            " model repository says which one is meant, and a file that is served by itself has to"
            " be split"
        )
    return models[0] if models else None


def adapted(declaration: Declaration) -> type[FunctionModel]:
    """A class with the methods of Triton's Python models that is this model."""
    signature = declaration.signature
    base: Any = AsyncModel if signature.asynchronous else PlainModel
    if signature.mode is Mode.STREAM:
        base = AsyncStreamModel if signature.asynchronous else StreamModel
    namespace = {"declaration": declaration, "reads_parameters": bool(signature.context)}
    made: type[FunctionModel] = type(declaration.name, (base,), namespace)
    return made
