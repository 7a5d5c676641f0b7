"""JSON as the protocol's clients write it: with NaN and infinities, and as long as tensors are.

A text is parsed by orjson; one with bare words, which are no JSON, by the standard library.

One call for a long text would hold the interpreter for its whole run. So the long arrays that are
members of objects, which is where tensors' data are, are cut out of it: a look at the brackets
outside of strings finds them, by numpy, which lets other threads run. What remains is parsed at
once. An array is parsed in pieces, cut at commas; the brackets open at a cut are closed before it
and opened again behind it, so that orjson sees each byte once, and refuses in a piece what it would
refuse in the whole.
"""

import gc
import json
import re
from collections.abc import Iterator
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import orjson

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.tensors import Array, Buffer

WHOLE = 1 << 20  # bytes of a text up to which it is parsed at once: some milliseconds
MAX_VALUES = 1_000_000  # in what is parsed at once of a longer one: a few tens of milliseconds
_SPACE = b" \t\r\n"
_OPEN, _CLOSE = ord("["), ord("]")


class Sizes(NamedTuple):
    """In bytes: of an array worth cutting out, of what is looked at together, and of a piece."""

    lifted: int = 1024
    block: int = 1 << 20
    piece: int = 256 << 10


_SIZES = Sizes()


class LongArray:
    """An array of a text that is not parsed yet; it holds no objects."""

    __slots__ = ("_sizes", "_start", "_stop", "_text", "quoted")

    def __init__(self, text: Buffer, start: int, stop: int, sizes: Sizes = _SIZES) -> None:
        """The array reaches from its bracket, at `start`, to behind the other."""
        self._text = memoryview(text)
        self._start = start
        self._stop = stop
        self._sizes = sizes
        self.quoted = any(
            bool((codes == ord('"')).any())
            for codes, _ in _blocks(self._text, start, stop, sizes.block)
        )

    def __len__(self) -> int:
        """Bytes of its text: it has fewer elements."""
        return self._stop - self._start

    def elements(self) -> int:
        """The number of elements by the commas, also in arrays within the array."""
        commas = _commas(self._text, self._start, self._stop, self._sizes)
        if commas:
            return commas + 1
        return 1 if bytes(self._text[self._start + 1 : self._stop - 1]).strip(_SPACE) else 0

    def pieces(self) -> Iterator[list[Any]]:
        """Elements of the text in lists as deep as they lie in it; raises `InvalidRequest`."""
        text, end = self._text, self._stop - 1
        start, depth = self._start + 1, 1
        while start <= end:
            cut = end if end - start <= self._sizes.piece else self._cut(start, end)
            piece = bytes(text[start:cut])
            if self.quoted:
                after = depth + _depth_change(text, start, cut, self._sizes)
            else:
                after = depth + piece.count(b"[") - piece.count(b"]")
            if cut < end:
                _check_cut(text, start, cut)
            if after < 1:  # what is cut out has as many of both
                raise InvalidRequest("failed to parse the request JSON buffer: unbalanced brackets")
            yield parse_piece(b"[" * depth + piece + b"]" * after)
            start, depth = cut + 1, after

    def _cut(self, start: int, end: int) -> int:
        """Where a comma outside of strings ends the piece that begins at `start`; or `end`."""
        size = self._sizes.piece
        while start + size < end:
            stop = _beside_backslash(self._text, start + size, end)
            if not self.quoted:
                cut = start + bytes(self._text[start:stop]).rfind(b",")
            else:
                cut = start + _last_comma(self._text, start, stop, self._sizes)
            if cut > start:
                return cut
            size *= 2
        return end


def parse_long(given: Buffer, sizes: Sizes = _SIZES) -> Any:
    """The document in `given`, with a `LongArray` for every long array that is a member.

    That is looked for where requests have tensors: not deeper than in objects of a list of the
    outermost object. Raises `InvalidRequest`, also for more than `MAX_VALUES` in what remains.
    """
    # A copy of it in one piece would hold the interpreter for as long as its pages take to come.
    text = memoryview(given)
    spans = list(_long_arrays(text, sizes))
    mark = token_hex(8)
    pieces: list[bytes] = []
    position = 0
    for number, (start, stop) in enumerate(spans):
        pieces += (bytes(text[position:start]), b'{"%b":%d}' % (mark.encode(), number))
        position = stop
    pieces.append(bytes(text[position:]))
    rest = b"".join(pieces)
    if (
        rest.count(b",") > MAX_VALUES
        and _commas(memoryview(rest), 0, len(rest), sizes) > MAX_VALUES
    ):
        raise _too_many()
    document = parse_piece(rest)
    if spans and type(document) is dict:
        arrays = [LongArray(text, start, stop, sizes) for start, stop in spans]
        _put_back(document, mark, arrays)
        for value in document.values():
            if type(value) is dict:
                _put_back(value, mark, arrays)
            elif type(value) is list:
                for item in value:
                    if type(item) is dict:
                        _put_back(item, mark, arrays)
    return document


def _put_back(members: dict[str, Any], mark: str, arrays: list[LongArray]) -> None:
    for name, value in members.items():
        if type(value) is dict and mark in value:
            members[name] = arrays[value[mark]]


def _long_arrays(text: memoryview, sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Where the long arrays without objects in them lie that are members of objects."""
    opened = -1  # where the array began that is being passed over
    depth = events = 0
    for codes, outside, start in _unquoted(text, 0, len(text), sizes):
        lower = codes | 32  # which makes [ and ] the same as { and }
        places = np.flatnonzero(((lower == ord("{")) | (lower == ord("}"))) & outside)
        if not len(places):
            continue
        kinds = codes[places]
        steps = np.where((kinds == _OPEN) | (kinds == ord("{")), 1, -1).astype(np.int64)
        heights = np.cumsum(steps)
        listed = places.tolist()
        index = 0
        while index < len(listed):
            if opened < 0:
                place = start + listed[index]
                index += 1
                events += 1
                if events > MAX_VALUES:
                    raise _too_many()
                if text[place] != _OPEN or not _is_member(text, place):
                    continue
                behind = start + listed[index] if index < len(listed) else 0
                if place < behind < place + sizes.lifted and text[behind] == _CLOSE:
                    continue  # short and flat, as nearly all are where there are very many
                opened, depth = place, 1
                continue
            base = int(heights[index - 1]) if index else 0
            stop = _first(heights, index, base - depth)
            first = np.flatnonzero(kinds[index : stop + 1] == ord("{"))
            if len(first):
                # Objects may have long arrays themselves.
                index += int(first[0])
                opened = -1
                continue
            depth += int(heights[stop]) - base
            index = stop + 1
            if depth == 0:
                end = start + int(places[stop]) + 1
                if text[end - 1] == _CLOSE and end - opened > sizes.lifted:
                    yield opened, end
                opened = -1


def _first(heights: Array, index: int, height: int) -> int:
    """The first place from `index` on that has this height; the last of all if none has."""
    width = 8  # most arrays have none within them, and there may be very many
    while True:
        found = np.flatnonzero(heights[index : index + width] == height)
        if len(found):
            return index + int(found[0])
        if index + width >= len(heights):
            return len(heights) - 1
        width *= 8


def _is_member(text: memoryview, place: int) -> bool:
    while place and text[place - 1] in _SPACE:
        place -= 1
    return place > 0 and text[place - 1] == ord(":")


def _blocks(text: memoryview, start: int, end: int, size: int) -> Iterator[tuple[Array, int]]:
    """Codes, and where they begin."""
    while start < end:
        stop = _beside_backslash(text, min(start + size, end), end)
        yield np.frombuffer(text, np.uint8, stop - start, start), start
        start = stop


def _beside_backslash(text: memoryview, stop: int, end: int) -> int:
    """`stop`, or the first place behind it that no backslash has to do with."""
    while stop < end and text[stop - 1] == ord("\\"):
        stop += 1
    return stop


def _unquoted(
    text: memoryview, start: int, end: int, sizes: Sizes
) -> Iterator[tuple[Array, Array, int]]:
    """Blocks of a text that begins outside of strings: codes, whether they are outside, and start.

    Quotes themselves may count as either.
    """
    inside = False
    for codes, begin in _blocks(text, start, end, sizes.block):
        quotes = codes == ord('"')
        if not quotes.any():
            yield codes, np.full(len(codes), not inside), begin
            continue
        backslashes = np.flatnonzero(codes == ord("\\"))
        if len(backslashes):
            lasts = np.flatnonzero(np.diff(backslashes, append=len(codes) + 1) != 1)
            lengths = np.diff(lasts, prepend=-1)
            escaped = backslashes[lasts[lengths % 2 == 1]] + 1
            quotes[escaped[escaped < len(codes)]] = False
        parity = np.cumsum(quotes, dtype=np.uint8) & 1  # 256 is even, too
        yield codes, parity == inside, begin
        inside = bool(parity[-1]) != inside


def containers(given: Buffer) -> int:
    """The number of brackets that open in a text, those in its strings among them."""
    return sum(
        int(np.count_nonzero((codes == _OPEN) | (codes == ord("{"))))
        for codes, _ in _blocks(memoryview(given), 0, len(given), _SIZES.block)
    )


def _commas(text: memoryview, start: int, stop: int, sizes: Sizes) -> int:
    return sum(
        int(np.count_nonzero((codes == ord(",")) & outside))
        for codes, outside, _ in _unquoted(text, start, stop, sizes)
    )


def _last_comma(text: memoryview, start: int, stop: int, sizes: Sizes) -> int:
    """The last comma outside of strings, counted from `start`; -1 for none."""
    last = -1
    for codes, outside, begin in _unquoted(text, start, stop, sizes):
        found = np.flatnonzero((codes == ord(",")) & outside)
        if len(found):
            last = begin - start + int(found[-1])
    return last


def _depth_change(text: memoryview, start: int, stop: int, sizes: Sizes) -> int:
    change = 0
    for codes, outside, _ in _unquoted(text, start, stop, sizes):
        change += int(np.count_nonzero((codes == _OPEN) & outside))
        change -= int(np.count_nonzero((codes == _CLOSE) & outside))
    return change


def _check_cut(text: memoryview, start: int, cut: int) -> None:
    """Refuse a comma with nothing before or behind it: each piece would be right without it."""
    before, behind = cut - 1, cut + 1
    while before >= start and text[before] in _SPACE:
        before -= 1
    while behind < len(text) and text[behind] in _SPACE:
        behind += 1
    if (
        before < start
        or text[before] in b"[,:"
        or bytes(text[behind : behind + 1]) in (b"]", b",", b"")
    ):
        raise InvalidRequest(
            f"failed to parse the request JSON buffer: a comma without a value beside it at byte"
            f" {cut}"
        )


def _too_many() -> InvalidRequest:
    return InvalidRequest(
        f"the request JSON holds more than {MAX_VALUES} values beside long arrays, which is the"
        " limit for large requests: send large tensors as flat arrays or in binary"
    )


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
            return parse_long(text)
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
