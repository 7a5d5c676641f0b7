"""`@model`: marks a function or class as a model, without changing it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from headrace.plugins.functions.signature import (
    FunctionSignature,
    Options,
    SignatureError,
    read_signature,
)
from headrace.workers.python_loader import MARK

_THREADS = 32
_T = TypeVar("_T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declaration:
    """A decorated function or class.

    `max_streams` is the number of threads for generators, `instances` that of processes.
    """

    target: Any
    signature: FunctionSignature
    max_streams: int
    instances: int = 1

    @property
    def name(self) -> str:
        """The name of the function or class in its file."""
        return self.signature.name


@overload
def model(target: _T, /) -> _T: ...


@overload
def model(
    *,
    max_batch_size: int | None = None,
    outputs: Sequence[str] | None = None,
    per_row: bool | None = None,
    max_streams: int = _THREADS,
    instances: int = 1,
) -> Callable[[_T], _T]: ...


def model(
    target: Any = None,
    /,
    *,
    max_batch_size: int | None = None,
    outputs: Sequence[str] | None = None,
    per_row: bool | None = None,
    max_streams: int = _THREADS,
    instances: int = 1,
) -> Any:
    """Declare a function, or a class with `predict` and optional `load` and `close`, as a model.

    The annotations declare inputs and outputs with names, types and dimensions. The decorated
    object is unchanged, and can be called as before.

    `max_batch_size` is the maximum number of rows per call. With it, a function of arrays gets the
    rows of several requests at once, and the first dimension of all its inputs and outputs counts
    them; without it, the function is called for each request. `per_row` calls it for each row,
    which is the default for functions whose parameters are all single values (`str`, `float`, ...).
    `outputs` names the outputs of a function that returns a tuple. `max_streams` is the number of
    requests that a generator may answer concurrently, each on a thread; others wait. `instances` is
    the number of processes that run the model, unless its `config.pbtxt` has instance groups.

    Raises `SignatureError` if the annotations are insufficient.
    """
    if isinstance(outputs, str):
        raise SignatureError(f"`outputs` is a list of names, got {outputs!r}")
    for name, number in (("max_streams", max_streams), ("instances", instances)):
        if type(number) is not int or number < 1:
            raise SignatureError(f"{name} is a number from 1 on, got {number!r}")
    options = Options(max_batch_size, None if outputs is None else tuple(outputs), per_row)

    def mark(found: _T) -> _T:
        signature = _signature(found, options)
        setattr(found, MARK, Declaration(found, signature, max_streams, instances))
        return found

    return mark if target is None else mark(target)


def declared(found: object) -> Declaration | None:
    """The declaration made by `@model`; None if the object is no model.

    Raises `SignatureError` if another decorator has wrapped the model.
    """
    declaration = getattr(found, "__dict__", {}).get(MARK)  # ignores inherited declarations
    if not isinstance(declaration, Declaration):
        return None
    if declaration.target is not found:
        raise SignatureError(
            f"model {declaration.name} is wrapped by another decorator; put @model above it"
        )
    return declaration


def _signature(found: Any, options: Options) -> FunctionSignature:
    name = getattr(found, "__name__", type(found).__name__)
    if not isinstance(found, type):
        if not inspect.isfunction(found):
            raise SignatureError(f"@model takes a function or a class, got {name}")
        return read_signature(found, name, options)
    predict = inspect.getattr_static(found, "predict", None)
    if not inspect.isfunction(predict):
        raise SignatureError(f"model {name}: a class needs a method `predict`")
    for step in ("load", "close"):
        if inspect.iscoroutinefunction(getattr(found, step, None)):
            raise SignatureError(f"model {name}: `{step}` cannot be a coroutine")
    return read_signature(predict, name, options, method=True)
