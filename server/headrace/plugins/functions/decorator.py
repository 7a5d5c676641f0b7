"""`@model`: marks a function or class as a model, and leaves it as it is."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from headrace.plugins.functions.signature import Options, Signature, SignatureError, read_signature

MARK = "__headrace_model__"
_THREADS = 32
_T = TypeVar("_T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declaration:
    """A decorated function or class. `max_streams` is how many threads of generators there are."""

    target: Any
    signature: Signature
    max_streams: int

    @property
    def name(self) -> str:
        """Name of the function or class in its file."""
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
) -> Callable[[_T], _T]: ...


def model(
    target: Any = None,
    /,
    *,
    max_batch_size: int | None = None,
    outputs: Sequence[str] | None = None,
    per_row: bool | None = None,
    max_streams: int = _THREADS,
) -> Any:
    """Make a model of a function, or of a class with `predict` and, if need be, `load` and `close`.

    Inputs and outputs, their names, types and dimensions are what the annotations say. What is
    decorated stays what it was, and can be called as ever.

    `max_batch_size` is how many rows one call may get. With it, a function of arrays gets the rows
    of several requests at once, and the first dimension of all its inputs and outputs counts them;
    without, it gets each request by itself. `per_row` has it called for each row by itself, which
    is the default for functions all of whose parameters are single values (`str`, `float`, ...).
    `outputs` names the outputs of a function that gives a tuple. `max_streams` is how many requests
    a generator may answer at once, each on a thread; others wait.

    Raises `SignatureError` if the annotations do not say enough.
    """
    if isinstance(outputs, str):
        raise SignatureError(f"`outputs` is a list of names, got {outputs!r}")
    if max_streams < 1:
        raise SignatureError(f"max_streams is at least 1, got {max_streams}")
    options = Options(max_batch_size, None if outputs is None else tuple(outputs), per_row)

    def mark(found: _T) -> _T:
        setattr(found, MARK, Declaration(found, _signature(found, options), max_streams))
        return found

    return mark if target is None else mark(target)


def declared(found: object) -> Declaration | None:
    """The declaration that `@model` has made of an object; None if it is no model.

    Raises `SignatureError` for one that another decorator has wrapped.
    """
    declaration = getattr(found, "__dict__", {}).get(MARK)  # not that of a class's base
    if not isinstance(declaration, Declaration):
        return None
    if declaration.target is not found:
        raise SignatureError(
            f"model {declaration.name} is wrapped by another decorator; put @model above it"
        )
    return declaration


def _signature(found: Any, options: Options) -> Signature:
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
