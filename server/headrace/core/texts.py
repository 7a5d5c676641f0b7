"""Error texts of bounded length, and number syntax of configurations."""

from reprlib import Repr

# Maximum bytes of an error text. Over gRPC it travels in trailers, where each byte may take three,
# and clients accept 8 KiB of headers; the limit over HTTP is the same, so that clients read the
# same text.
MAX_ERROR = 2_000
_CUT = "…"


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
