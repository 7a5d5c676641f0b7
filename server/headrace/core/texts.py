"""Error texts of bounded length, and values in the texts of a configuration's parameters."""

from collections.abc import Mapping
from reprlib import Repr

from headrace.core.errors import InvalidOption

# Maximum bytes of an error text. Over gRPC it travels in trailers, where each byte may take three,
# and clients accept 8 KiB of headers; the limit over HTTP is the same, so that clients read the
# same text.
MAX_ERROR = 2_000
_CUT = "…"


def encodable(text: object) -> str:
    """A text as Unicode: half surrogate pairs, which UTF-8 cannot encode, become `?`."""
    return str(text).encode(errors="replace").decode()


def bounded(text: str) -> str:
    """An error text as it is sent: valid Unicode, cut to `MAX_ERROR` bytes of UTF-8."""
    raw = text[: MAX_ERROR + 1].encode(errors="replace")  # a long text is not encoded whole
    if len(raw) <= MAX_ERROR:
        return raw.decode()
    return raw[:MAX_ERROR].decode(errors="ignore") + _CUT


def _shortener() -> Repr:
    short = Repr()
    short.maxstring = short.maxother = 80
    short.maxlevel = 3
    return short


_SHORT = _shortener()


def shown(value: object) -> str:
    """The `repr` of a value, with only the first of many elements and characters."""
    return _SHORT.repr(value)


_LONGEST = 20  # digits; Python refuses to convert more than some thousands


def whole_number(text: str, least: int, most: int) -> int | None:
    """Parse a decimal number; None for any other text, and if it is out of bounds."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST):
        return None
    number = int(text)
    return number if least <= number <= most else None


_MOST_WHOLE = 10**15 - 1
_MOST_SECS = 1e6


def invalid(name: str, text: str) -> InvalidOption:
    """The error of a parameter."""
    return InvalidOption(f"parameters['{name}']", text)


def unexpected(parameters: Mapping[str, str], name: str, expected: str) -> InvalidOption:
    """The error of a parameter whose value is not as `expected`."""
    return invalid(name, f"expected {expected}, got {parameters[name]!r}")


def flag(parameters: Mapping[str, str], name: str) -> bool:
    """A parameter that is true or false, by default false; raises `InvalidOption`."""
    text = parameters.get(name, "false")
    if text not in ("true", "false"):
        raise unexpected(parameters, name, "true or false")
    return text == "true"


def whole(
    parameters: Mapping[str, str],
    name: str,
    default: int = 0,
    least: int = 0,
    most: int = _MOST_WHOLE,
    expected: str = "a whole number, 0 for no limit",
) -> int:
    """A parameter that is a whole number; raises `InvalidOption`."""
    text = parameters.get(name)
    number = default if text is None else whole_number(text, least, most)
    if number is None:
        raise unexpected(parameters, name, expected)
    return number


def seconds(
    parameters: Mapping[str, str],
    name: str,
    default: float,
    most: float = _MOST_SECS,
    expected: str = "a number of seconds, 0 for no limit",
) -> float:
    """A parameter that is a number of seconds; raises `InvalidOption`."""
    text = parameters.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise unexpected(parameters, name, expected)
    return value
