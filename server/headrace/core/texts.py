"""Texts of errors, bounded whatever a client has sent; numbers as configurations spell them; and
names of parameters that this server's processes add to requests.
"""

from reprlib import Repr

# Bytes of an error's text. Over gRPC it travels in trailers, where each may take three, and clients
# accept 8 KiB of headers; over HTTP it is as long, so that a client reads the same.
MAX_ERROR = 2_000
_CUT = "…"

# A front end has the headers, and the engine's process what needs one: its value travels as a
# parameter with this in front of its name.
HEADER_PARAMETER = "headrace_header:"
# The same for a header that goes on to another server, which requests bring along to where their
# calls are made; and until when their client waits, in nanoseconds of the monotonic clock.
FORWARD_PARAMETER = "headrace_forward:"
DEADLINE_PARAMETER = "headrace_deadline"


def bounded(text: str) -> str:
    """A text as an error has it: Unicode, and cut to `MAX_ERROR` bytes of UTF-8."""
    raw = text[: MAX_ERROR + 1].encode(errors="replace")  # one that is long is not encoded whole
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
    """A value as Python writes it, with only the first of many elements and characters."""
    return _SHORT.repr(value)


_LONGEST = 20  # digits, of which Python converts any number only up to some thousands


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that digits spell; None for any other text, and for what is out of the bounds."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST):
        return None
    number = int(text)
    return number if least <= number <= most else None
