"""A function's signature, read once when it is decorated: annotations, tensors, calls.

`Float32[N, 4]` and the like are parsed to a `Tensor`, `Frame[Schema]` to `Columns`; so are Python's
own types if they are unambiguous. All of them are plain values.

There are four modes of calling a function. ROW: for each row, with single values. BATCH: for the
concatenated rows of all requests of a batch. REQUEST: for each request, with all its rows. STREAM:
likewise, and each yielded value is a response.
"""

import collections.abc as abc
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from headrace.ipc.elements import datatype_of


class SignatureError(TypeError):
    """The annotations of a model are missing or invalid."""

    __module__ = "headrace"  # the public location, for tracebacks


@dataclass(frozen=True, slots=True)
class Element:
    """The type of a tensor's elements: the protocol's datatype, and its form in Python code.

    `text` marks BYTES containing UTF-8, which a function sees as `str`.
    """

    spelled: str
    datatype: str
    text: bool = False


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension. Dimensions of one name have one size; -1 is any size."""

    name: str = ""
    size: int = -1

    def __str__(self) -> str:
        return self.name or ("int" if self.size < 0 else str(self.size))


class TensorForm(Enum):
    """The form in which a function takes or returns a tensor."""

    ARRAY = "array"
    LIST = "list"
    SINGLE = "single value"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An annotation for one tensor. `single` is the Python type of its elements."""

    element: Element
    dims: tuple[Dim, ...]
    form: TensorForm
    single: type

    def __str__(self) -> str:
        if self.form is TensorForm.ARRAY:
            return f"{self.element.spelled}[{', '.join(map(str, self.dims)) or '()'}]"
        depth = len(self.dims)
        return "list[" * depth + self.single.__name__ + "]" * depth


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a data frame: a tensor with one value per row."""

    name: str
    element: Element
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """An annotation for a data frame of a library, `pandas` or `pyarrow`."""

    library: str
    columns: tuple[TableColumn, ...]

    def __str__(self) -> str:
        kind = "Frame" if self.library == "pandas" else "Table"
        return f"{kind}[{', '.join(column.name for column in self.columns)}]"


Declared = Tensor | Columns


class ArrayOf:
    """Base class of `Float32` and the like; with dimensions in brackets, an annotation."""

    element: ClassVar[Element]

    def __class_getitem__(cls, given: Any) -> Any:
        dims = tuple(_dim(one) for one in (given if isinstance(given, tuple) else (given,)))
        return Annotated[np.ndarray, Tensor(cls.element, dims, TensorForm.ARRAY, np.ndarray)]


@dataclass(frozen=True, slots=True, eq=False)
class FrameOf:
    """A data frame whose schema was not read yet."""

    library: str
    schema: Any


_SINGLES: dict[type, Element] = {
    bool: Element("bool", "BOOL"),
    int: Element("int", "INT64"),
    float: Element("float", "FP64"),
    str: Element("str", "BYTES", text=True),
    bytes: Element("bytes", "BYTES"),
}
_LISTS = (list, Sequence)
_HOW = "say its type and dimensions, as in Float32[N, Literal[4]]"


def read(hint: Any) -> tuple[Declared, bool]:
    """The tensor of an annotation, and whether it is optional; raises `SignatureError`."""
    if hasattr(hint, "__value__"):  # type Scores = Float32[N]
        return read(hint.__value__)
    if get_origin(hint) in (Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        if len(inner) != 1 or len(inner) == len(get_args(hint)):
            raise SignatureError(f"{_spelled(hint)} may be several things, a tensor is one")
        return read(inner[0])[0], True
    if get_origin(hint) is Annotated:
        base, *said = get_args(hint)
        for one in said:
            if isinstance(one, Tensor):
                return one, False
            if isinstance(one, FrameOf):
                return Columns(one.library, _columns(one.schema)), False
        return read(base)
    if isinstance(hint, type) and issubclass(hint, ArrayOf):
        raise SignatureError(
            f"{hint.__name__} has no dimensions: {hint.__name__}[N] has one value for each row,"
            f" {hint.__name__}[N, Literal[4]] four"
        )
    if get_origin(hint) is np.ndarray:
        return _numpy(hint), False
    return _plain(hint), False


def _plain(hint: Any) -> Tensor:
    """The tensor for a single value, or for lists of them."""
    depth, leaf = 0, hint
    while get_origin(leaf) in _LISTS:
        depth, leaf = depth + 1, get_args(leaf)[0]
    element = _single(leaf)
    if element is None:
        raise SignatureError(f"{_spelled(hint)} is no type of a tensor: {_HOW}{_hint(leaf)}")
    return Tensor(element, (Dim(),) * depth, TensorForm.LIST if depth else TensorForm.SINGLE, leaf)


def _single(hint: Any) -> Element | None:
    """The element for a single value of this type; None if there is none."""
    if not isinstance(hint, type):
        return None
    if hint in _SINGLES:
        return _SINGLES[hint]
    if issubclass(hint, np.generic):
        try:
            datatype = datatype_of(np.dtype(hint))
        except TypeError:  # an abstract type, such as np.floating
            return None
        if datatype is not None and datatype != "BYTES":
            return Element(f"np.{hint.__name__}", datatype)
    return None


def _numpy(hint: Any) -> Tensor:
    """`np.ndarray[tuple[int, Literal[4]], np.dtype[np.float32]]`."""
    shape, dtype = get_args(hint)
    element = _single((get_args(dtype) or (None,))[0])
    dims = get_args(shape)
    if get_origin(shape) is not tuple or Ellipsis in dims or element is None:
        raise SignatureError(f"{_spelled(hint)} leaves open what it is: {_HOW}")
    return Tensor(element, tuple(_dim(one) for one in dims), TensorForm.ARRAY, np.ndarray)


def _columns(schema: Any) -> tuple[TableColumn, ...]:
    """The columns declared by a schema; raises `SignatureError`."""
    try:
        hints = schema if isinstance(schema, Mapping) else get_type_hints(schema, None, None, True)
    except (TypeError, NameError) as error:
        raise SignatureError(f"the schema {_spelled(schema)} cannot be read: {error}") from None
    if not hints:
        raise SignatureError(f"the schema {_spelled(schema)} has no columns")
    return tuple(_column(name, hint) for name, hint in hints.items())


def _column(name: str, hint: Any) -> TableColumn:
    inner = [one for one in get_args(hint) if one is not type(None)]
    nullable = get_origin(hint) in (Union, types.UnionType) and len(inner) == 1
    kind = inner[0] if nullable else hint
    if isinstance(kind, type) and issubclass(kind, ArrayOf):
        return TableColumn(name, kind.element, nullable)
    element = _single(kind)
    if element is None:
        raise SignatureError(
            f"column '{name}' is {_spelled(hint)}, which no column can be: it has one value for"
            " each row, as in int, float | None, np.float32 or Strings"
        )
    return TableColumn(name, element, nullable)


def _dim(given: Any) -> Dim:
    """Parse a dimension; raises `SignatureError`."""
    if get_origin(given) is Literal and len(get_args(given)) == 1:
        given = get_args(given)[0]
    if given is int:
        return Dim()
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return Dim(size=given)
    if isinstance(given, str) and given.isidentifier():
        return Dim(given)
    named = isinstance(given, (TypeVar, NewType)) or (
        isinstance(given, type) and given.__module__ != "builtins"
    )
    if named:
        return Dim(given.__name__)
    raise SignatureError(
        f"{_spelled(given)} is no dimension: expected N or another name, int for any size, or"
        " Literal[4] for four"
    )


def _hint(leaf: Any) -> str:
    """A hint at what was probably meant."""
    module = getattr(leaf, "__module__", "").partition(".")[0]
    if module == "pandas":
        return ", or the columns, as in Frame[Schema]"
    return ", or the columns, as in Table[Schema]" if module == "pyarrow" else ""


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else repr(hint)


@dataclass(frozen=True, slots=True)
class Context:
    """The request of a call, or of a row: the client's id for it, and its parameters.

    `parameters` are those not reserved by the protocol.
    """

    request_id: str = ""
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


class CallMode(Enum):
    """The mode of converting requests to calls."""

    ROW = "row"
    BATCH = "batch"
    REQUEST = "request"
    STREAM = "stream"


class Packing(Enum):
    """The form in which a function returns several outputs."""

    ONE = "one"
    TUPLE = "tuple"
    FIELDS = "fields"
    KEYS = "keys"


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor in the protocol; `dims` without rows, if the model batches."""

    name: str
    element: Element
    dims: tuple[Dim, ...]
    optional: bool = False

    @property
    def shape(self) -> list[int]:
        """The dimensions as a configuration declares them."""
        return [dim.size for dim in self.dims]


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter or output of the function, and its tensors in the protocol.

    An optional one without default is None if missing.
    """

    name: str
    declared: Declared
    optional: bool = False
    defaulted: bool = False
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """The signature of a function. `max_batch_size` 0 means that requests are not batched."""

    name: str
    mode: CallMode
    max_batch_size: int
    asynchronous: bool
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    packing: Packing
    context: str = ""  # the parameter of type Context, if any

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The tensors of a request."""
        return tuple(port for value in self.parameters for port in value.ports)

    @property
    def results(self) -> tuple[Port, ...]:
        """The tensors of a response."""
        return tuple(port for value in self.outputs for port in value.ports)


@dataclass(frozen=True, slots=True)
class Options:
    """The decorator's arguments; None if not given."""

    max_batch_size: int | None = None
    outputs: tuple[str, ...] | None = None
    per_row: bool | None = None


DEFAULT_ROWS = 64  # maximum rows of a batch, for functions called for each row
_STREAMS = (abc.Iterator, abc.Iterable, abc.Generator)
_ASYNC_STREAMS = (abc.AsyncIterator, abc.AsyncIterable, abc.AsyncGenerator)
_MISSING = Element("bool", "BOOL")


def read_signature(
    function: Callable[..., Any], name: str, options: Options, method: bool = False
) -> FunctionSignature:
    """The signature of a function, or of a method; raises `SignatureError`."""
    try:
        return _read(function, name, options, method)
    except SignatureError as error:
        raise SignatureError(f"model {name}: {error}") from None


def _read(
    function: Callable[..., Any], name: str, options: Options, method: bool
) -> FunctionSignature:
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
    if mode is CallMode.BATCH:
        _check_row_dimension([*parameters, *outputs])
    signature = FunctionSignature(
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
    """The parameters that are tensors, and the context parameter with its annotation."""
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


def _check_context(context: dict[str, Any], mode: CallMode) -> None:
    if len(context) > 1:
        raise SignatureError(f"{' and '.join(context)} are told the same: one Context is enough")
    many = mode is CallMode.BATCH
    for name, hint in context.items():
        if (hint is not Context) is not many:
            raise SignatureError(
                f"parameter '{name}': with max_batch_size a call is for the rows of several"
                " requests, so that it is list[Context], one for each row"
                if many
                else f"parameter '{name}': a call is for one request, so that it is Context"
            )


def _streaming(function: Callable[..., Any], hint: Any) -> tuple[bool, bool, Any]:
    """Return (streams, is asynchronous, annotation of one answer) for a return annotation."""
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
    """The form of outputs, with their own names and annotations."""
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


def _mode(parameters: Sequence[Value], options: Options, streams: bool) -> tuple[CallMode, int]:
    """The mode of calls, and the maximum number of rows."""
    size, per_row = options.max_batch_size, options.per_row
    if size is not None and (type(size) is not int or size < 0):
        raise SignatureError(f"max_batch_size is a number from 0 on, got {size!r}")
    if streams:
        if size or per_row:
            raise SignatureError(
                "what yields answers one request at a time: leave max_batch_size and per_row out"
            )
        return CallMode.STREAM, 0
    if per_row is None:
        per_row = size != 0 and all(
            isinstance(value.declared, Tensor) and value.declared.form is TensorForm.SINGLE
            for value in parameters
        )
    if per_row:
        if size == 0:
            raise SignatureError("a function of rows needs a max_batch_size of 1 or more")
        return CallMode.ROW, size or DEFAULT_ROWS
    return (CallMode.BATCH, size) if size else (CallMode.REQUEST, 0)


def _check_rows(value: Value, mode: CallMode) -> None:
    """Check that a value suits `mode`; raises `SignatureError`."""
    declared = value.declared
    if isinstance(declared, Columns):
        if mode is CallMode.ROW:
            raise SignatureError(f"'{value.name}' is a data frame, which is more than a row")
    elif mode is CallMode.BATCH and (not declared.dims or declared.dims[0].size >= 0):
        raise SignatureError(
            f"'{value.name}' is {declared}, but with max_batch_size a call is for the rows of"
            " several requests, and every input and output has to begin with the dimension that"
            " counts them, as in Float32[N] or list[float]; per_row=True calls the function once"
            " for each row instead"
        )


def _check_row_dimension(values: Sequence[Value]) -> None:
    """Check that all values begin with the same dimension, and have it nowhere else."""
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


def _ports(value: Value, mode: CallMode) -> tuple[Port, ...]:
    declared = value.declared
    dims: tuple[Dim, ...]
    if isinstance(declared, Columns):
        dims = (Dim(f"{value.name}.rows"),) if mode is not CallMode.BATCH else ()
        ports = []
        for column in declared.columns:
            ports.append(Port(column.name, column.element, dims))
            if column.nullable:
                ports.append(Port(f"{column.name}.null", _MISSING, dims, optional=True))
        return tuple(ports)
    dims = declared.dims[1:] if mode is CallMode.BATCH else declared.dims
    if declared.form is TensorForm.SINGLE and mode is not CallMode.ROW:
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
    """Add the location to a `SignatureError`."""
    try:
        yield
    except SignatureError as error:
        raise SignatureError(f"{where}: {error}") from None
