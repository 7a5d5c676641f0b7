"""Between arrays as they travel and what functions work with.

What a function gives is fitted to what it declares: numbers are converted where none of them loses
its meaning, and refused otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.workers.elements import DTYPES, Array
from headrace.workers.functions.annotations import Dim, Element, Form, Tensor

_FLOAT32 = np.dtype("<f4")


class ResultError(TypeError):
    """A function has given something else than it declares."""

    __module__ = "headrace"


class InvalidInput(ValueError):
    """What a request holds cannot be: raised by a model, it becomes 400 or INVALID_ARGUMENT."""

    __module__ = "headrace"


def dtype_of(element: Element) -> np.dtype[Any]:
    """The numpy type in which a function sees such elements."""
    return _FLOAT32 if element.datatype == "BF16" else DTYPES[element.datatype]


def received(array: Array, element: Element, name: str) -> Array:
    """An input as functions see it; raises `InvalidInput` for text that is not UTF-8."""
    if element.datatype == "BF16":
        return (array.astype("<u4") << 16).view(_FLOAT32)
    if not element.text:
        return array
    elements: list[bytes] = array.ravel().tolist()
    texts = np.empty(len(elements), object)
    try:
        texts[:] = [one.decode() for one in elements]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}': {error.object!r:.80} is not UTF-8") from None
    return texts.reshape(array.shape)


def sent(array: Array, element: Element) -> Array:
    """An output that was fitted, as it travels."""
    if element.datatype != "BF16":
        return array
    bits = np.ascontiguousarray(array).view("<u4")
    # To the nearest, of two to the even one; what is no number stays that.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    whole = np.where(np.isnan(array), (bits >> 16) | 0x40, rounded)
    return whole.astype("<u2").reshape(array.shape)


def given(array: Array, tensor: Tensor) -> Any:
    """What a function is called with for a whole array."""
    if tensor.form is Form.ARRAY:
        return array
    if tensor.form is Form.LIST:
        return array.tolist()
    return each(array, tensor)[0]


def each(array: Array, tensor: Tensor) -> list[Any]:
    """What a function is called with for each row of an array."""
    if tensor.form is Form.ARRAY or issubclass(tensor.single, np.generic):
        return list(array)
    rows: list[Any] = array.tolist()
    return rows


def fitted(value: object, tensor: Tensor, where: str) -> Array:
    """What a function has given, as an array of the type that it declares.

    Raises `ResultError`; the shape is not looked at.
    """
    if tensor.element.datatype == "BYTES":
        return _strings(value, tensor, where)
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ResultError(
            f"{_declared(where, tensor)}, got {_given(value, tensor)}: {error}"
        ) from None
    wanted = dtype_of(tensor.element)
    if array.dtype == wanted:
        return array
    if not array.size and not isinstance(value, np.ndarray):
        return array.astype(wanted)  # an empty list has no type
    if (problem := _loss(array, wanted)) is not None:
        raise ResultError(f"{_declared(where, tensor)}, got {_given(value, tensor)}{problem}")
    with np.errstate(over="ignore"):
        cast: Array = array.astype(wanted)
    if wanted.kind == "f" and np.isinf(cast).sum() > np.isinf(array).sum():
        raise ResultError(f"{_declared(where, tensor)}, got numbers that are too large for it")
    return cast


def check_shape(
    shape: Sequence[int], dims: Sequence[Dim], sizes: dict[str, int], where: str
) -> None:
    """Hold a shape against dimensions, and those of a name against `sizes`, which it fills in.

    Raises `ValueError`.
    """
    if len(shape) != len(dims):
        text = f"[{', '.join(map(str, dims))}]"
        raise ValueError(f"{where} has {len(dims)} dimensions, {text}, got shape {list(shape)}")
    for size, dim in zip(shape, dims, strict=True):
        expected = dim.size if dim.size >= 0 else sizes.setdefault(dim.name, size)
        if size != expected and (dim.name or dim.size >= 0):
            what = f"dimension {dim.name}" if dim.name else "a dimension"
            raise ValueError(f"{where}: {what} is {expected}, got {size} in shape {list(shape)}")


def describe(value: object) -> str:
    """A value in an error's words."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(one).__name__ for one in value})
        return f"a {type(value).__name__} of {' and '.join(kinds) or 'nothing'}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def _given(value: object, tensor: Tensor) -> str:
    """A value in an error's words; of single values, which came row by row, their types."""
    if tensor.form is Form.SINGLE and isinstance(value, list):
        return " and ".join(sorted({type(one).__name__ for one in value}))
    return describe(value)


def _declared(where: str, tensor: Tensor) -> str:
    return f"{where} is declared as {tensor}"


def _loss(array: Array, wanted: np.dtype[Any]) -> str | None:
    """Why these elements cannot become that type, "" if it is plain; None if they can."""
    kind = array.dtype.kind
    allowed: Mapping[str, str] = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}
    if kind not in allowed[wanted.kind]:
        return ""
    if wanted.kind in "iu" and array.size and kind != "b":
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            wrong = low if low < limits.min else high
            return f", of which {wrong} is not between {limits.min} and {limits.max}"
    return None


def _strings(value: object, tensor: Tensor, where: str) -> Array:
    """An array of `str` or `bytes` objects."""
    wanted = str if tensor.element.text else bytes
    if isinstance(value, np.ndarray):
        array: Array = value.astype(object) if value.dtype.kind in "UST" else value
    else:
        # Not as numpy would have it, which cuts zeros off the end of what has a fixed width.
        try:
            array = np.array(value, object)
        except ValueError:
            raise ResultError(f"{_declared(where, tensor)}, got {describe(value)}") from None
    kinds = set(map(type, array.ravel().tolist())) if array.dtype == object else {array.dtype.type}
    wrong = sorted(kind.__name__ for kind in kinds if not issubclass(kind, wanted))
    if wrong:
        raise ResultError(
            f"{_declared(where, tensor)}, which has elements of {wanted.__name__},"
            f" got {', '.join(wrong)}"
        )
    return array
