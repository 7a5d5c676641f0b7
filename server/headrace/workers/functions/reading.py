"""Reading a function's signature, once, when it is decorated."""

import collections.abc as abc
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from headrace.workers.functions.annotations import (
    Columns,
    Dim,
    Element,
    Form,
    SignatureError,
    Tensor,
    read,
)
from headrace.workers.functions.context import Context
from headrace.workers.functions.signature import Mode, Options, Packing, Port, Signature, Value

DEFAULT_ROWS = 64  # of a request or batch, for functions that are called for each row
_STREAMS = (abc.Iterator, abc.Iterable, abc.Generator)
_ASYNC_STREAMS = (abc.AsyncIterator, abc.AsyncIterable, abc.AsyncGenerator)
_MISSING = Element("bool", "BOOL")


def read_signature(
    function: Callable[..., Any], name: str, options: Options, method: bool = False
) -> Signature:
    """The signature of a function, or of a method; raises `SignatureError`."""
    try:
        return _read(function, name, options, method)
    except SignatureError as error:
        raise SignatureError(f"model {name}: {error}") from None


def _read(function: Callable[..., Any], name: str, options: Options, method: bool) -> Signature:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise SignatureError(f"its annotations cannot be read: {error}") from error
    parameters, context = _parameters(function, hints, method)
    if "return" not in hints:
        raise SignatureError("it has no return type, which says what its outputs are")
    if hints["return"] is type(None):
        raise SignatureError("its return type is None, but a model has at least one output")
    streams, asynchronous, result = _streaming(function, hints["return"])
    outputs, packing = _outputs(result, options.outputs)
    mode, rows = _mode(parameters, options, streams)
    for value in (*parameters, *outputs):
        _check_rows(value, mode)
    _check_context(context, mode)
    if mode is Mode.BATCH:
        _check_row_dimension([*parameters, *outputs])
    signature = Signature(
        name,
        mode,
        rows,
        asynchronous,
        tuple(replace(value, ports=_ports(value, mode)) for value in parameters),
        tuple(replace(value, ports=_ports(value, mode)) for value in outputs),
        packing,
        next(iter(context), ""),
    )
    _check_names("input", signature.inputs)
    _check_names("output", signature.results)
    return signature


def _parameters(
    function: Callable[..., Any], hints: dict[str, Any], method: bool
) -> tuple[list[Value], dict[str, Any]]:
    """What are tensors, and what is told of requests, with its annotation."""
    found = []
    context: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[method:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SignatureError(
                f"parameter '{parameter}' has no name of its own in a call; every input needs one"
            )
        if parameter.name not in hints:
            raise SignatureError(f"parameter '{parameter.name}' has no annotation")
        if hints[parameter.name] in (Context, list[Context]):
            context[parameter.name] = hints[parameter.name]
            continue
        with _at(f"parameter '{parameter.name}'"):
            declared, nullable = read(hints[parameter.name])
        defaulted = parameter.default is not parameter.empty
        optional = nullable or defaulted
        if optional and isinstance(declared, Columns):
            raise SignatureError(f"parameter '{parameter.name}': a data frame is never missing")
        found.append(Value(parameter.name, declared, optional, defaulted))
    if not found:
        raise SignatureError("it takes nothing; a model has at least one input")
    return found, context


def _check_context(context: dict[str, Any], mode: Mode) -> None:
    if len(context) > 1:
        raise SignatureError(f"{' and '.join(context)} are told the same: one Context is enough")
    many = mode is Mode.BATCH
    for name, hint in context.items():
        if (hint is not Context) is not many:
            raise SignatureError(
                f"parameter '{name}': with max_batch_size a call is for the rows of several"
                " requests, so that it is list[Context], one for each row"
                if many
                else f"parameter '{name}': a call is for one request, so that it is Context"
            )


def _streaming(function: Callable[..., Any], hint: Any) -> tuple[bool, bool, Any]:
    """Whether it streams, whether it is asynchronous, and what one answer is."""
    origin = get_origin(hint) or hint
    sync, other = origin in _STREAMS, origin in _ASYNC_STREAMS
    for yields, fits, wanted in (
        (inspect.isgeneratorfunction(function), sync, "it yields, so its return type is Iterator"),
        (inspect.isasyncgenfunction(function), other, "it yields, which is an AsyncIterator"),
        (inspect.iscoroutinefunction(function), not (sync or other), "a coroutine gives no stream"),
    ):
        if yields and not fits:
            raise SignatureError(f"{wanted}, but it is declared as {hint!r}")
    if not (sync or other):
        return False, inspect.iscoroutinefunction(function), hint
    if not get_args(hint):
        raise SignatureError("its return type does not say what it yields, as in Iterator[str]")
    return True, other, get_args(hint)[0]


def _outputs(hint: Any, names: tuple[str, ...] | None) -> tuple[list[Value], Packing]:
    packing, named = _unpacked(hint)
    if names is not None and packing in (Packing.FIELDS, Packing.KEYS):
        raise SignatureError(f"{hint.__name__} names the outputs already; leave `outputs` out")
    if names is not None and len(names) != len(named):
        raise SignatureError(
            f"`outputs` has {len(names)} names, but the function gives {len(named)} values"
        )
    found = []
    own = [name for name, _ in named]
    for name, (_, one) in zip(names or own, named, strict=True):
        with _at(f"output '{name}'"):
            declared, nullable = read(one)
        if nullable:
            raise SignatureError(f"output '{name}': an output is never missing")
        found.append(Value(name, declared))
    return found, packing


def _unpacked(hint: Any) -> tuple[Packing, list[tuple[str, Any]]]:
    """How outputs are given, and their own names and annotations."""
    if get_origin(hint) is tuple:
        hints = get_args(hint)
        if not hints or Ellipsis in hints:
            raise SignatureError("its return type does not say how many outputs there are")
        return Packing.TUPLE, [(f"output{n}", one) for n, one in enumerate(hints)]
    fields = isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    )
    if fields or is_typeddict(hint):
        try:
            named = list(get_type_hints(hint, include_extras=True).items())
        except (NameError, TypeError) as error:
            raise SignatureError(f"{hint.__name__} cannot be read: {error}") from error
        return (Packing.FIELDS if fields else Packing.KEYS), named
    return Packing.ONE, [("output", hint)]


def _mode(parameters: Sequence[Value], options: Options, streams: bool) -> tuple[Mode, int]:
    """How requests become calls, and how many rows of them there may be."""
    size, per_row = options.max_batch_size, options.per_row
    if size is not None and (type(size) is not int or size < 0):
        raise SignatureError(f"max_batch_size is a number from 0 on, got {size!r}")
    if streams:
        if size or per_row:
            raise SignatureError(
                "what yields answers one request at a time: leave max_batch_size and per_row out"
            )
        return Mode.STREAM, 0
    if per_row is None:
        per_row = size != 0 and all(
            isinstance(value.declared, Tensor) and value.declared.form is Form.SINGLE
            for value in parameters
        )
    if per_row:
        if size == 0:
            raise SignatureError("a function of rows needs a max_batch_size of 1 or more")
        return Mode.ROW, size or DEFAULT_ROWS
    return (Mode.BATCH, size) if size else (Mode.REQUEST, 0)


def _check_rows(value: Value, mode: Mode) -> None:
    """Whether a value can be what `mode` makes of it; raises `SignatureError`."""
    declared = value.declared
    if isinstance(declared, Columns):
        if mode is Mode.ROW:
            raise SignatureError(f"'{value.name}' is a data frame, which is more than a row")
    elif mode is Mode.BATCH and (not declared.dims or declared.dims[0].size >= 0):
        raise SignatureError(
            f"'{value.name}' is {declared}, but with max_batch_size a call is for the rows of"
            " several requests, and every input and output has to begin with the dimension that"
            " counts them, as in Float32[N] or list[float]; per_row=True calls the function once"
            " for each row instead"
        )


def _check_row_dimension(values: Sequence[Value]) -> None:
    """All have to begin with the same dimension, and have it nowhere else."""
    first: dict[str, str] = {}
    tensors = [(v.name, v.declared) for v in values if isinstance(v.declared, Tensor)]
    for name, declared in tensors:
        if declared.dims[0].name:
            first.setdefault(declared.dims[0].name, name)
    if len(first) > 1:
        (one, there), (other, here), *_ = first.items()
        raise SignatureError(
            f"with max_batch_size the first dimension counts rows and has one name everywhere: it"
            f" is {one} in '{there}' and {other} in '{here}'"
        )
    for name, declared in tensors:
        if any(dim.name in first for dim in declared.dims[1:]):
            raise SignatureError(
                f"'{name}' is {declared}: with max_batch_size {declared.dims[0]} counts rows of"
                " several requests, and can only come first"
            )


def _ports(value: Value, mode: Mode) -> tuple[Port, ...]:
    declared = value.declared
    dims: tuple[Dim, ...]
    if isinstance(declared, Columns):
        dims = (Dim(f"{value.name}.rows"),) if mode is not Mode.BATCH else ()
        ports = []
        for column in declared.columns:
            ports.append(Port(column.name, column.element, dims))
            if column.nullable:
                ports.append(Port(f"{column.name}.null", _MISSING, dims, optional=True))
        return tuple(ports)
    dims = declared.dims[1:] if mode is Mode.BATCH else declared.dims
    if declared.form is Form.SINGLE and mode is not Mode.ROW:
        dims = (Dim(size=1),)
    return (Port(value.name, declared.element, dims, value.optional),)


def _check_names(kind: str, ports: Sequence[Port]) -> None:
    names = [port.name for port in ports]
    for name in names:
        if not name or not isinstance(name, str):
            raise SignatureError(f"{kind} {name!r} has no name")
        if names.count(name) > 1:
            raise SignatureError(f"there are two {kind}s of the name '{name}'")


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Says in a `SignatureError` where it was found."""
    try:
        yield
    except SignatureError as error:
        raise SignatureError(f"{where}: {error}") from None
