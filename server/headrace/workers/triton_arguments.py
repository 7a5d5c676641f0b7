"""Types of arguments of Triton's Python API, checked as Triton's bindings check them.

Triton's classes are made with pybind11, which raises `TypeError` for an argument of a wrong type;
`TritonModelException` is for values that are of the right type, and wrong.
"""

from operator import index
from typing import Any

INT64 = -(1 << 63), (1 << 63) - 1
UINT32 = 0, (1 << 32) - 1
UINT64 = 0, (1 << 64) - 1


def text(what: str, value: Any) -> str:
    """A `str`, or `bytes` of UTF-8; raises `TypeError`."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise wrong(what, "a str", value)


def whole(what: str, value: Any, limits: tuple[int, int]) -> int:
    """An integer within `limits`; raises `TypeError`."""
    least, most = limits
    try:
        number = index(value)
    except TypeError:
        raise wrong(what, "an integer", value) from None
    if not least <= number <= most:
        raise TypeError(f"{what} must be from {least} to {most}, got {number}")
    return number


def real(what: str, value: Any) -> float:
    """A number; raises `TypeError`."""
    if isinstance(value, (str, bytes)):
        raise wrong(what, "a number", value)
    try:
        return float(value)
    except TypeError:
        raise wrong(what, "a number", value) from None


def flag(what: str, value: Any) -> bool:
    """A `bool`, numpy's too, or an integer; raises `TypeError`."""
    if value is None or isinstance(value, (str, bytes)):
        raise wrong(what, "a bool", value)
    return bool(value)


def elements(what: str, value: Any, of: str) -> list[Any]:
    """What a list, or another iterable that is no text, has in it; raises `TypeError`."""
    if not isinstance(value, (str, bytes)):
        try:
            return list(value)
        except TypeError:
            pass
    raise wrong(what, f"a list of {of}", value)


def wrong(what: str, expected: str, value: Any) -> TypeError:
    """The error for an argument of another type than it takes."""
    return TypeError(f"{what} must be {expected}, got {type(value).__name__}")
