"""JSON as the protocol's clients write it: NaN and infinities may stand in it."""

import gc
import json
import re
from typing import Any

import orjson

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.tensors import Buffer
from headrace.wire.long_json import WHOLE, containers, parse_long

LONG = 64 << 10  # bytes or elements above which it pays to look before decoding
MAX_CONTAINERS = 4_000_000  # arrays and objects in the JSON of one request
# A string need not end, and what it has matched it does not give back: so a body is read once,
# whatever it holds.
_STRING_OR_INF = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|Inf\b', re.DOTALL)


def parse_json(text: Buffer, lifts: bool = False) -> Any:
    """A JSON text, in which NaN and infinities may stand; raises `InvalidRequest`.

    With `lifts`, long arrays in a long text are left as they are: see `parse_long`.
    """
    if len(text) <= LONG:
        return parse_piece(text)
    # A list or object of two bytes of text takes 64 bytes of memory and more.
    if (count := containers(text)) > MAX_CONTAINERS:
        raise InvalidRequest(
            f"the request JSON holds {count} arrays and objects, at most {MAX_CONTAINERS} are"
            " allowed: send large tensors as flat arrays or in binary"
        )
    # The collector would go through all of them again and again, and find nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        if lifts and len(text) > WHOLE:
            return parse_long(text, parse_piece)
        return parse_piece(text)
    finally:
        if collecting:
            gc.enable()


def refuse_without_memory(error: orjson.JSONDecodeError) -> None:
    """Raise `Overloaded` where the parser has not got the memory that it asked for."""
    if error.msg.startswith("Not enough memory"):
        raise Overloaded("the server has not enough memory to parse the request; try again later")


def parse_piece(text: Buffer) -> Any:
    """A JSON text that is not too long to be parsed at once, as `parse_json` parses it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)
        raw = bytes(text)
        if b"NaN" not in raw and b"Inf" not in raw:
            raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    # NaN and infinities are no JSON, but the protocol's clients send them. Only such bodies pay for
    # the slower parser. It also takes half surrogates and integers of any length, which nothing
    # behind it expects; orjson does not write these.
    try:
        document = json.loads(_STRING_OR_INF.sub(_long_word, raw))
        orjson.dumps(document)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    return document


def _long_word(match: re.Match[bytes]) -> bytes:
    return b"Infinity" if match[0] == b"Inf" else match[0]
