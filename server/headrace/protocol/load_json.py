"""The JSON of load requests, which may hold files of many megabytes as base64.

One call of a parser for the whole text would hold the interpreter lock for its whole run. So long
strings are cut out, found by numpy, which releases the lock; the remaining text is parsed at once,
and the strings are decoded piece by piece.
"""

from binascii import a2b_base64
from collections.abc import Iterator, Mapping
from secrets import token_hex
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.core.errors import InvalidRequest
from headrace.core.model_spec import LoadParameters
from headrace.core.tensors import Array, Buffer
from headrace.protocol.json_text import (
    count_values,
    parse_object,
    parse_piece,
    too_many_values,
    unquoted,
)
from headrace.protocol.parameters import (
    CONFIG,
    FILE,
    PARAMETERS_MEMBER,
    check_members,
    parameters_of,
    unknown_load,
)

_LONG = 256  # bytes of a string worth cutting out
_MOST_WHOLE = 8 << 20  # bytes parsed at once: twenty milliseconds
_MOST_REST = 2 << 20  # bytes besides long strings: what is parsed at once holds the interpreter
_PIECE = 1 << 18  # bytes of base64 decoded at a time, in under a millisecond; a multiple of 4
_ESCAPE = ord("\\")
_LONGEST_ESCAPE = 6  # bytes: of a character in hexadecimal


class _LongText:
    """A string within a text that is not parsed yet; `view` is without its quotes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        codes = np.frombuffer(view, np.uint8)
        self._escapes = any(
            bool((codes[start : start + _PIECE] == _ESCAPE).any())
            for start in range(0, len(codes), _PIECE)
        )

    def text(self, name: str) -> str:
        """The string; raises `InvalidRequest`, also for a very long one."""
        if len(self._view) > _MOST_WHOLE:
            raise InvalidRequest(
                f"'{name}' of a load request may have {_MOST_WHOLE} bytes, got {len(self._view)}"
            )
        return str(parse_piece(b'"%b"' % bytes(self._view)))

    def base64(self) -> Buffer:
        """The bytes that the string spells; raises `ValueError`."""
        decoded = bytearray()
        left = ""
        ended = False
        for piece in self._pieces():
            if ended:
                raise ValueError("Excess data after padding")
            whole = left + piece
            cut = len(whole) & ~3
            left = whole[cut:]
            decoded += a2b_base64(whole[:cut], strict_mode=True)
            ended = whole[:cut].endswith("=")
        if left:
            raise ValueError("Excess data after padding" if ended else "Incorrect padding")
        return memoryview(decoded)

    def _pieces(self) -> Iterator[str]:
        view = self._view
        while len(view):
            piece = bytes(view[:_PIECE])
            if self._escapes and len(piece) < len(view):
                piece = piece[: _before_escape(piece)]
            view = view[len(piece) :]
            yield parse_piece(b'"%b"' % piece) if self._escapes else str(piece, "ascii")


def _before_escape(piece: bytes) -> int:
    """The bytes of a piece of a string that end with no part of an escape sequence."""
    places = np.flatnonzero(np.frombuffer(piece, np.uint8) == _ESCAPE)
    if not len(places):
        return len(piece)
    last = int(places[-1])
    breaks = np.flatnonzero(np.diff(places) != 1)
    first = int(places[breaks[-1] + 1]) if len(breaks) else int(places[0])
    last -= (last - first) % 2  # of a run of backslashes, every other one is itself escaped
    return len(piece) if last + _LONGEST_ESCAPE <= len(piece) else last


def read_load(body: bytes | bytearray, most: int) -> LoadParameters:
    """Decode the body of a load request with at most `most` elements; raises `InvalidRequest`."""
    document, texts = _parse(body, most)
    check_members(document, (PARAMETERS_MEMBER,))
    return load_parameters(parameters_of(document), texts)


def load_parameters(
    given: Mapping[str, Any], texts: Mapping[str, _LongText] = MappingProxyType({})
) -> LoadParameters:
    """Decode the parameters of a load request; values in `texts` stand for others.

    Raises `InvalidRequest`.
    """
    config: str | None = None
    files: dict[str, Buffer] = {}
    for name, value in given.items():
        if name != CONFIG and not name.startswith(FILE):
            raise unknown_load(name)
        if type(value) is not str:
            raise InvalidRequest(
                f"invalid value for load parameter '{name[:80]}', expected a string"
            )
        long = texts.get(value)
        if name == CONFIG:
            config = value if long is None else long.text(name)
            continue
        try:
            content = a2b_base64(value, strict_mode=True) if long is None else long.base64()
        except (ValueError, InvalidRequest) as error:
            raise InvalidRequest(
                f"invalid value for load parameter '{name[:80]}', expected base64: {error}"
            ) from None
        files[name.removeprefix(FILE)] = content
    return LoadParameters(config, files)


def _parse(body: bytes | bytearray, most: int) -> tuple[dict[str, Any], Mapping[str, _LongText]]:
    """The document, with a mark for each long string, and these by their marks."""
    if len(body) <= _LONG:
        return parse_object(body, most), {}
    text = memoryview(body)
    mark = token_hex(8)
    texts: dict[str, _LongText] = {}
    pieces: list[bytes] = []
    position = 0
    for start, stop in _long_strings(text, most):
        name = f"{mark}{len(texts)}"
        texts[name] = _LongText(text[start:stop])
        pieces += (bytes(text[position:start]), name.encode())
        position = stop
    pieces.append(bytes(text[position:]))
    rest = b"".join(pieces)
    if len(rest) > _MOST_REST:
        raise InvalidRequest(
            f"a load request may have {_MOST_REST} bytes besides its files, got {len(rest)}"
        )
    return parse_object(rest, most), texts


def _long_strings(text: memoryview, most: int) -> Iterator[tuple[int, int]]:
    """Start and end of the contents of each long string; raises `InvalidRequest`."""
    opened, count = -1, 0  # start of the string that is not closed yet
    for codes, outside, start in unquoted(text, 0, len(text)):
        count += count_values(codes, outside)
        if count > most:
            raise too_many_values(count, most)
        for place in _changes(outside, opened >= 0).tolist():
            # The mask changes at the opening quote, and at the closing one.
            if opened < 0:
                opened = start + place + 1
                continue
            if start + place - opened > _LONG:
                yield opened, start + place
            opened = -1


def _changes(outside: Array, inside: bool) -> Array:
    """The positions at which a mask changes; it begins within a string if `inside`."""
    return np.flatnonzero(np.diff(outside, prepend=not inside))
