"""What annotations say of tensors, and reading them.

`Float32[N, 4]` and its kin are read into a `Tensor`, `Frame[Schema]` into `Columns`; so are
Python's own types where it is clear what they mean. Plain values, made once when a model is
decorated.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
)

import numpy as np

from headrace.workers.elements import datatype_of


class SignatureError(TypeError):
    """A model's annotations do not say what it takes and gives."""

    __module__ = "headrace"  # where users find it, and what a traceback should say


@dataclass(frozen=True, slots=True)
class Element:
    """What a tensor is made of: the protocol's datatype, and how Python code spells it.

    `text` are BYTES that hold UTF-8, which a function sees as `str`.
    """

    spelled: str
    datatype: str
    text: bool = False


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension. Those of one name have one size; -1 is any size."""

    name: str = ""
    size: int = -1

    def __str__(self) -> str:
        return self.name or ("int" if self.size < 0 else str(self.size))


class Form(Enum):
    """What a function is given of a tensor, or gives for it."""

    ARRAY = "array"
    LIST = "list"
    SINGLE = "single value"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An annotation that stands for one tensor. `single` is the type of its elements in Python."""

    element: Element
    dims: tuple[Dim, ...]
    form: Form
    single: type

    def __str__(self) -> str:
        if self.form is Form.ARRAY:
            return f"{self.element.spelled}[{', '.join(map(str, self.dims)) or '()'}]"
        depth = len(self.dims)
        return "list[" * depth + self.single.__name__ + "]" * depth


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a frame: a tensor with one value for each row."""

    name: str
    element: Element
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """An annotation that stands for a data frame of a library, `pandas` or `pyarrow`."""

    library: str
    columns: tuple[Column, ...]

    def __str__(self) -> str:
        kind = "Frame" if self.library == "pandas" else "Table"
        return f"{kind}[{', '.join(column.name for column in self.columns)}]"


Declared = Tensor | Columns


class ArrayOf:
    """What `Float32` and its kin are at run time; with dimensions in brackets, an annotation."""

    element: ClassVar[Element]

    def __class_getitem__(cls, given: Any) -> Any:
        dims = tuple(_dim(one) for one in (given if isinstance(given, tuple) else (given,)))
        return Annotated[np.ndarray, Tensor(cls.element, dims, Form.ARRAY, np.ndarray)]


@dataclass(frozen=True, slots=True, eq=False)
class FrameOf:
    """A data frame whose schema is not read yet."""

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
    """What an annotation stands for, and whether it may be None; raises `SignatureError`."""
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
    """A single value, or lists of them."""
    depth, leaf = 0, hint
    while get_origin(leaf) in _LISTS:
        depth, leaf = depth + 1, get_args(leaf)[0]
    element = _single(leaf)
    if element is None:
        raise SignatureError(f"{_spelled(hint)} is no type of a tensor: {_HOW}{_hint(leaf)}")
    return Tensor(element, (Dim(),) * depth, Form.LIST if depth else Form.SINGLE, leaf)


def _single(hint: Any) -> Element | None:
    """The element that a single value of this type is; None if it is none."""
    if not isinstance(hint, type):
        return None
    if hint in _SINGLES:
        return _SINGLES[hint]
    if issubclass(hint, np.generic):
        try:
            datatype = datatype_of(np.dtype(hint))
        except TypeError:  # an abstract one, such as np.floating
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
    return Tensor(element, tuple(_dim(one) for one in dims), Form.ARRAY, np.ndarray)


def _columns(schema: Any) -> tuple[Column, ...]:
    """The columns that a schema declares; raises `SignatureError`."""
    try:
        hints = schema if isinstance(schema, Mapping) else get_type_hints(schema, None, None, True)
    except (TypeError, NameError) as error:
        raise SignatureError(f"the schema {_spelled(schema)} cannot be read: {error}") from None
    if not hints:
        raise SignatureError(f"the schema {_spelled(schema)} has no columns")
    return tuple(_column(name, hint) for name, hint in hints.items())


def _column(name: str, hint: Any) -> Column:
    inner = [one for one in get_args(hint) if one is not type(None)]
    nullable = get_origin(hint) in (Union, types.UnionType) and len(inner) == 1
    kind = inner[0] if nullable else hint
    if isinstance(kind, type) and issubclass(kind, ArrayOf):
        return Column(name, kind.element, nullable)
    element = _single(kind)
    if element is None:
        raise SignatureError(
            f"column '{name}' is {_spelled(hint)}, which no column can be: it has one value for"
            " each row, as in int, float | None, np.float32 or Strings"
        )
    return Column(name, element, nullable)


def _dim(given: Any) -> Dim:
    """A dimension; raises `SignatureError`."""
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
    """What somebody may have meant."""
    module = getattr(leaf, "__module__", "").partition(".")[0]
    if module == "pandas":
        return ", or the columns, as in Frame[Schema]"
    return ", or the columns, as in Table[Schema]" if module == "pyarrow" else ""


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else repr(hint)
