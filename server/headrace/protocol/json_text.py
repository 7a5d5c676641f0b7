"""Parsing of JSON as the protocol's clients write it: with NaN and infinities, and very long.

orjson parses a text. In one with bare words, which are not JSON, it sees random numbers in their
places, so that everything else there has to be JSON, too.

A single call for a long text would hold the interpreter lock for its whole run. So long arrays that
are members of objects, which is where tensors' data is, are cut out: numpy, which releases the
lock, finds them by the brackets outside of strings. The remaining text is parsed at once. An array
is parsed in pieces, cut at commas; brackets open at a cut are closed before it and reopened after
it, so that orjson sees each byte once and refuses in a piece what it would refuse in the whole.
"""

import gc
import re
from collections.abc import Iterator
from math import inf, nan
from secrets import randbits, token_hex
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np
import orjson

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.limits import Charge, uncharged
from headrace.core.tensors import Array, Buffer

WHOLE = 1 << 20  # bytes of a text parsed at once: some milliseconds
# In the remaining text of a longer one, each a few tens of milliseconds: values and containers, and
# names of members, which are hashed and kept each. All tensors of a request have fewer.
MAX_VALUES = 1_000_000
MAX_MEMBERS = 1 << 17
MAX_DEPTH = 1024  # of containers in each other; orjson has the same limit
_VALUE_BYTES, _MEMBER_BYTES = 64, 128  # memory of one as an object, beside its text
_SPACE = b" \t\r\n"
_OPEN, _CLOSE, _COLON = ord("["), ord("]"), ord(":")


class ScanSizes(NamedTuple):
    """Sizes in bytes: of an array worth cutting out, of a scanned block, and of a parsed piece.

    Scanning takes up to a hundred times a block's size, if it has nothing but brackets.
    """

    lifted: int = 1024
    block: int = 256 << 10
    piece: int = 256 << 10


SIZES = ScanSizes()


class LongArray:
    """An array within a text that is not parsed yet; it contains no objects."""

    __slots__ = ("_sizes", "_start", "_stop", "_text", "quoted")

    def __init__(self, text: Buffer, start: int, stop: int, sizes: ScanSizes = SIZES) -> None:
        """Refer to the array from its opening bracket at `start` to behind its closing one."""
        self._text = memoryview(text)
        self._start = start
        self._stop = stop
        self._sizes = sizes
        self.quoted = any(
            bool((codes == ord('"')).any())
            for codes, _ in _blocks(self._text, start, stop, sizes.block)
        )

    def __len__(self) -> int:
        """The bytes of the array's text, an upper bound of its number of elements."""
        return self._stop - self._start

    def elements(self) -> int:
        """The number of elements, counted by commas, including those of nested arrays."""
        commas = _commas(self._text, self._start, self._stop, self._sizes)
        if commas:
            return commas + 1
        return 1 if bytes(self._text[self._start + 1 : self._stop - 1]).strip(_SPACE) else 0

    def pieces(self) -> Iterator[list[Any]]:
        """Parse the elements piece by piece, with their nesting; raises `InvalidRequest`."""
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
            if after < 1:  # the cut-out text is balanced
                raise InvalidRequest("failed to parse the request JSON buffer: unbalanced brackets")
            yield parse_piece(b"[" * depth + piece + b"]" * after)
            start, depth = cut + 1, after

    def _cut(self, start: int, end: int) -> int:
        """The last comma outside of strings at which a piece from `start` can end; else `end`."""
        size = self._sizes.piece
        while start + size < end:
            stop = start + size
            if not self.quoted:
                cut = start + bytes(self._text[start:stop]).rfind(b",")
            else:
                cut = start + _last_comma(self._text, start, stop, self._sizes)
            if cut > start:
                return cut
            size *= 2
        return end


class _Objects:
    """Numbers of values and of members in a text, which become objects."""

    def __init__(self) -> None:
        self.values = self.members = 0
        self.complete = True

    def count(self, codes: Array, outside: Array) -> None:
        """Count those in a block, with its mask outside of strings."""
        if outside.any():
            self.values += count_values(codes, outside)
            self.members += int(np.count_nonzero((codes == _COLON) & outside))

    def nbytes(self) -> int:
        """Bytes that they may take beside their texts; raises `InvalidRequest` for too many."""
        if self.values > MAX_VALUES:
            raise _too_many()
        if self.members > MAX_MEMBERS:
            raise InvalidRequest(
                f"the request JSON holds {self.members} members of objects beside long arrays, at"
                f" most {MAX_MEMBERS} are allowed"
            )
        return self.values * _VALUE_BYTES + self.members * _MEMBER_BYTES


def parse_long(
    given: Buffer,
    sizes: ScanSizes = SIZES,
    most: int = maxsize,
    charge: Charge = uncharged,
) -> Any:
    """Parse `given`, with a `LongArray` for every long array that is a member of an object.

    Only looked for where requests have tensors: no deeper than in objects of a list of the
    outermost object. `charge` is called with the bytes that the remaining text may take as objects,
    and may raise. Raises `InvalidRequest`, also for more than `MAX_VALUES`, `MAX_MEMBERS` or `most`
    bytes in the remaining text.
    """
    # Copying the text in one piece would hold the interpreter lock while its pages are allocated.
    text = memoryview(given)
    objects = _Objects()
    spans = list(_long_arrays(text, sizes, objects))
    beside = len(text) - sum(stop - start for start, stop in spans)
    if beside > most:
        raise InvalidRequest(
            f"the request JSON holds {beside} bytes beside long arrays, at most {most} are allowed"
        )
    mark = token_hex(8)
    rest = text
    if spans:
        pieces: list[bytes] = []
        position = 0
        for number, (start, stop) in enumerate(spans):
            pieces += (bytes(text[position:start]), b'{"%b":%d}' % (mark.encode(), number))
            position = stop
        pieces.append(bytes(text[position:]))
        rest = memoryview(b"".join(pieces))
    if spans or not objects.complete:
        objects = _Objects()
        for codes, outside, _ in unquoted(rest, 0, len(rest), sizes):
            objects.count(codes, outside)
    charge(beside + objects.nbytes())
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


def _long_arrays(
    text: memoryview, sizes: ScanSizes, objects: _Objects
) -> Iterator[tuple[int, int]]:
    """Find long arrays without objects in them that are members of objects: (start, stop).

    `objects` are counted on the way, with those in these arrays, but not within the longest ones.
    All brackets of a block are matched at once, whatever they are: a text may have nothing else.
    """
    opened = -1  # start of an array that began in an earlier block
    depth = nesting = brackets = 0  # depth in this array, and in the text; brackets beside arrays
    solid = 0  # the last character that is no space
    for codes, outside, start in unquoted(text, 0, len(text), sizes):
        lower = codes | 32  # maps [ and ] to { and }
        places = np.flatnonzero(((lower == ord("{")) | (lower == ord("}"))) & outside)
        before, solid = solid, _last_solid(codes, solid)
        if not len(places) and opened >= 0:
            objects.complete = False
            continue
        objects.count(codes, outside)
        if not len(places):
            continue
        kinds = codes[places]
        opens = (kinds == _OPEN) | (kinds == ord("{"))
        heights = np.cumsum(np.where(opens, 1, -1), dtype=np.int32)
        _check_depth(nesting + int(heights.min()), nesting + int(heights.max()))
        nesting += int(heights[-1])
        index = 0
        if opened >= 0:
            stop = _first(heights, -depth)
            first = np.flatnonzero(kinds[: stop + 1] == ord("{"))
            if len(first):  # objects may contain long arrays themselves
                index = int(first[0])
                opened = -1
            else:
                depth += int(heights[stop])
                index = stop + 1
                if depth == 0:
                    end = start + int(places[stop]) + 1
                    if text[end - 1] == _CLOSE and end - opened > sizes.lifted:
                        yield opened, end
                    opened = -1
        if opened >= 0 or index == len(places):
            continue
        places, kinds, opens, heights = (
            places[index:],
            kinds[index:],
            opens[index:],
            heights[index:],
        )
        brackets += len(places)
        members = _members(codes, places, kinds, before)
        if len(members):
            partners = _partners(opens, heights, members)
            with_objects = np.cumsum(kinds == ord("{"))
            flat = with_objects[partners] == with_objects[members]
            ended = heights[partners] < heights[members]
            long = places[partners] - places[members] >= sizes.lifted
            chosen = flat & ended & long & (kinds[partners] == _CLOSE)
            behind = -1
            for one, other in zip(members[chosen].tolist(), partners[chosen].tolist(), strict=True):
                if one > behind:  # else within another: not JSON
                    behind = other
                    brackets -= other + 1 - one
                    yield start + int(places[one]), start + int(places[other]) + 1
            last = int(members[-1])
            if flat[-1] and not ended[-1] and last > behind:
                opened = start + int(places[last])
                depth = int(heights[-1] - heights[last]) + 1
                brackets -= len(places) - last
        if brackets > 2 * MAX_VALUES:
            raise _too_many()


def _check_depth(least: int, most: int) -> None:
    """Raise `InvalidRequest` for a text that closes more than it opens, or is nested too deep."""
    if least < 0:
        raise InvalidRequest("failed to parse the request JSON buffer: unbalanced brackets")
    if most > MAX_DEPTH:
        raise InvalidRequest(
            f"failed to parse the request JSON buffer: nested deeper than {MAX_DEPTH}"
        )


def _first(heights: Array, height: int) -> int:
    """The first position with this nesting depth; the last one if there is none."""
    found = heights == height
    place = int(np.argmax(found))
    return place if found[place] else len(heights) - 1


def _partners(opens: Array, heights: Array, members: Array) -> Array:
    """The closing brackets that belong to some opening ones; the last bracket for those without."""
    # Brackets of one level take turns in opening and closing. No level is above `MAX_DEPTH`, so
    # that sorting takes one pass for each byte.
    levels = (heights + ~opens).astype(np.int16)
    order = np.argsort(levels, kind="stable")
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    following = np.minimum(ranks[members] + 1, len(order) - 1)
    partners = order[following]
    matched = (levels[partners] == levels[members]) & ~opens[partners]
    return np.where(matched, partners, len(order) - 1)


def _members(codes: Array, places: Array, kinds: Array, solid: int) -> Array:
    """The indices of brackets that open an array that is a member of an object.

    `solid` is the last character before the block that is no space.
    """
    arrays = np.flatnonzero(kinds == _OPEN)
    starts = places[arrays]
    before = codes[starts - 1]
    if len(starts) and starts[0] == 0:
        before[0] = solid
    spaced = np.flatnonzero(_spaces(before))
    if len(spaced) and starts[spaced[0]] > 1:  # one space is usual
        before[spaced] = codes[starts[spaced] - 2]
        spaced = spaced[_spaces(before[spaced])]
    if len(spaced):
        solids = np.flatnonzero(~_spaces(codes))
        at = np.searchsorted(solids, starts[spaced]) - 1
        before[spaced] = np.where(at >= 0, codes[solids[at]], solid)
    found: Array = arrays[before == _COLON]
    return found


def _spaces(codes: Array) -> Array:
    found: Array = (codes == 32) | (codes == 10) | (codes == 13) | (codes == 9)
    return found


def _last_solid(codes: Array, before: int) -> int:
    """The last character of a block that is no space, or the one before it."""
    if codes[-1] > 32:
        return int(codes[-1])
    solids = np.flatnonzero(~_spaces(codes))
    return int(codes[solids[-1]]) if len(solids) else before


def _blocks(text: memoryview, start: int, end: int, size: int) -> Iterator[tuple[Array, int]]:
    """Blocks of character codes, and their positions."""
    for begin in range(start, end, size):
        yield np.frombuffer(text, np.uint8, min(size, end - begin), begin), begin


def unquoted(
    text: memoryview, start: int, end: int, sizes: ScanSizes = SIZES
) -> Iterator[tuple[Array, Array, int]]:
    """Blocks of a text that begins outside of strings: codes, mask outside of strings, position.

    Quotes themselves may be on either side of the mask.
    """
    inside = odd = False  # `odd`: a backslash before the block escapes its first character
    for codes, begin in _blocks(text, start, end, sizes.block):
        quotes = codes == ord('"')
        backslashes = codes == ord("\\")
        if odd or backslashes.any():
            odd = _clear_escaped(quotes, backslashes, odd)
        if not quotes.any():
            yield codes, np.full(len(codes), not inside), begin
            continue
        parity = np.cumsum(quotes, dtype=np.uint8) & 1  # the overflow at 256 keeps the parity
        yield codes, parity == inside, begin
        inside = bool(parity[-1]) != inside


def _clear_escaped(quotes: Array, backslashes: Array, odd: bool) -> bool:
    """Clear the escaped quotes of a block; True if the first character behind it is escaped.

    `odd` is the result for the block before.
    """
    if not (quotes[1:] & backslashes[:-1]).any():  # none to clear but the first: much faster
        quotes[0] &= not odd
        run = len(backslashes) if backslashes.all() else int(np.argmin(backslashes[::-1]))
        return (run + (odd and run == len(backslashes))) % 2 == 1
    edges = np.flatnonzero(np.diff(backslashes, prepend=False, append=False))
    starts, stops = edges[::2], edges[1::2]
    lengths = stops - starts
    if odd and len(starts) and starts[0] == 0:
        lengths[0] += 1
    elif odd:
        quotes[0] = False
    escaped = stops[lengths % 2 == 1]
    behind = bool(len(escaped)) and int(escaped[-1]) == len(quotes)
    quotes[escaped[: len(escaped) - behind]] = False
    return behind


def containers(given: Buffer) -> int:
    """The number of opening brackets in a text, including those within strings."""
    return sum(
        int(np.count_nonzero((codes == _OPEN) | (codes == ord("{"))))
        for codes, _ in _blocks(memoryview(given), 0, len(given), SIZES.block)
    )


def check_values(given: bytes | bytearray, most: int) -> None:
    """Raise `InvalidRequest` for a text of more than `most` elements: values and containers."""
    if sum(given.count(sign) for sign in (b",", b"[", b"{")) <= most:
        return
    count = 0
    for codes, outside, _ in unquoted(memoryview(given), 0, len(given)):
        count += count_values(codes, outside)
    if count > most:
        raise too_many_values(count, most)


def count_values(codes: Array, outside: Array) -> int:
    """The values of arrays and objects, and these themselves, that begin in a block of a text."""
    lower = codes | 32  # maps [ to {
    return int(np.count_nonzero(((codes == ord(",")) | (lower == ord("{"))) & outside))


def too_many_values(count: int, most: int) -> InvalidRequest:
    """The error of a text with `count` elements."""
    return InvalidRequest(f"the request JSON may have at most {most} elements, got {count}")


def _commas(text: memoryview, start: int, stop: int, sizes: ScanSizes) -> int:
    return sum(
        int(np.count_nonzero((codes == ord(",")) & outside))
        for codes, outside, _ in unquoted(text, start, stop, sizes)
    )


def _last_comma(text: memoryview, start: int, stop: int, sizes: ScanSizes) -> int:
    """The position of the last comma outside of strings, relative to `start`; -1 for none."""
    last = -1
    for codes, outside, begin in unquoted(text, start, stop, sizes):
        found = np.flatnonzero((codes == ord(",")) & outside)
        if len(found):
            last = begin - start + int(found[-1])
    return last


def _depth_change(text: memoryview, start: int, stop: int, sizes: ScanSizes) -> int:
    change = 0
    for codes, outside, _ in unquoted(text, start, stop, sizes):
        change += int(np.count_nonzero((codes == _OPEN) & outside))
        change -= int(np.count_nonzero((codes == _CLOSE) & outside))
    return change


def _check_cut(text: memoryview, start: int, cut: int) -> None:
    """Refuse a comma without a value beside it, which each piece alone would not show."""
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


LONG = 64 << 10  # bytes or elements above which a scan before decoding pays
MAX_CONTAINERS = 4_000_000  # arrays and objects in the JSON of one request
_WORD = re.compile(rb"\b(?:NaN|Inf(?:inity)?)\b")


def parse_json(text: Buffer, lifts: int = 0, charge: Charge = uncharged) -> Any:
    """Parse a JSON text, which may contain NaN and infinities; raises `InvalidRequest`.

    With `lifts`, long arrays in a long text become `LongArray`, and the text beside them may have
    as many bytes, and is charged; see `parse_long`.
    """
    if len(text) <= LONG:
        return parse_piece(text)
    # A list or object of two bytes of text takes 64 bytes of memory or more.
    if (count := containers(text)) > MAX_CONTAINERS:
        raise InvalidRequest(
            f"the request JSON holds {count} arrays and objects, at most {MAX_CONTAINERS} are"
            " allowed: send large tensors as flat arrays or in binary"
        )
    # The garbage collector would traverse all of them repeatedly, and find nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        if lifts and len(text) > WHOLE:
            return parse_long(text, most=lifts, charge=charge)
        return parse_piece(text)
    finally:
        if collecting:
            gc.enable()


def refuse_without_memory(error: orjson.JSONDecodeError) -> None:
    """Raise `Overloaded` if the parser could not allocate memory."""
    if error.msg.startswith("Not enough memory"):
        raise Overloaded("the server has not enough memory to parse the request; try again later")


def parse_object(body: bytes | bytearray, most: int) -> dict[str, Any]:
    """The JSON object of at most `most` elements in a body, an empty one for an empty body.

    Raises `InvalidRequest`.
    """
    if not body or body.isspace():
        return {}
    check_values(body, most)
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if type(found) is not dict:
        raise InvalidRequest("the request must be a JSON object")
    return found


def parse_piece(text: Buffer) -> Any:
    """`parse_json` for a text that is short enough to be parsed at once."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)
        raw = bytes(text)
        if b"NaN" not in raw and b"Inf" not in raw:
            raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    # NaN and infinities are not JSON, but the protocol's clients send them.
    return _parse_with_words(raw)


def _parse_with_words(text: bytes) -> Any:
    """Parse a text with NaN and infinities outside of strings; raises `InvalidRequest`."""
    # Of 19 digits. A word becomes a number with spaces, so that what stands beside it stays wrong.
    marks = {randbits(60) | 1 << 62 | sign << 60: word for sign, word in enumerate(_VALUES)}
    texts = dict(zip(_VALUES, (b" %d " % mark for mark in marks), strict=True))
    pieces: list[bytes] = []
    position = 0
    for start, stop, value in _words(text):
        pieces += (text[position:start], texts[value])
        position = stop
    pieces.append(text[position:])
    try:
        document = orjson.loads(b"".join(pieces))
    except orjson.JSONDecodeError as error:
        refuse_without_memory(error)  # its position is not that of the request's text
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error.msg}") from None
    return _with_values(document, marks)


_VALUES = (nan, inf, -inf)


def _words(text: bytes) -> Iterator[tuple[int, int, float]]:
    """The bare words outside of strings, with their signs: (start, stop, value)."""
    behind = 0
    for codes, outside, begin in unquoted(memoryview(text), 0, len(text)):
        letters = ((codes == ord("N")) | (codes == ord("I"))) & outside
        for place in np.flatnonzero(letters).tolist():
            start = begin + place
            if start < behind or (word := _WORD.match(text, start)) is None:
                continue
            behind = word.end()
            if text[start] == ord("N"):
                yield start, behind, nan
            elif start and text[start - 1] == ord("-"):
                yield start - 1, behind, -inf
            else:
                yield start, behind, inf


def _with_values(document: Any, marks: dict[int, float]) -> Any:
    """`document` with the numbers in `marks` replaced."""
    found = [document]
    pending: list[Any] = [found]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            for name, member in value.items():
                if type(member) is int and member in marks:
                    value[name] = marks[member]
                elif type(member) in (dict, list):
                    pending.append(member)
            continue
        kinds = set(map(type, value))
        if dict in kinds or list in kinds:
            pending += [item for item in value if type(item) in (dict, list)]
        if int in kinds:
            value[:] = [marks.get(v, v) if type(v) is int else v for v in value]
    return found[0]
