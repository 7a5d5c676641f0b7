"""Long JSON texts: parsing in pieces gives the same result as parsing at once."""

import json
import re
import subprocess
import sys
import tracemalloc
from functools import partial
from itertools import chain, cycle, islice
from math import nan
from sys import maxsize
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.protocol.json_text import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_VALUES,
    LongArray,
    ScanSizes,
    parse_json,
    parse_long,
)
from tests.protocol.strategies import PROPERTY, memory_within, mutations, outcome

SMALL = ScanSizes(lifted=4, block=16, piece=8)
elements = (
    st.integers(-9, 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"\\[]{},: \n', max_size=6)
    | st.booleans()
    | st.none()
)
arrays = st.recursive(st.lists(elements, max_size=8), lambda inner: st.lists(inner, max_size=4))
members = st.dictionaries(
    st.text('ab"\\[],', max_size=3),
    elements | arrays,
    max_size=4,
)
documents = st.dictionaries(
    st.sampled_from("abc"), members | st.lists(members, max_size=3) | arrays | elements, max_size=3
)


def parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(str(error)) from None


def flat(value: list[Any]) -> list[Any]:
    return list(chain.from_iterable(flat(v) if isinstance(v, list) else [v] for v in value))


def whole(value: Any) -> Any:
    """The document with long arrays read and all arrays flattened."""
    if isinstance(value, LongArray):
        return flat(list(value.pieces()))
    if isinstance(value, dict):
        return {name: whole(member) for name, member in value.items()}
    if isinstance(value, list):
        if any(isinstance(item, dict) for item in value):
            return [whole(item) for item in value]
        return flat(value)
    return value


def in_pieces(text: bytes) -> Any:
    return whole(parse_long(text, SMALL))


@PROPERTY
@given(documents, st.sampled_from([(",", ":"), (" , ", " : "), (",\n", ":\t")]), st.booleans())
def test_parsing_in_pieces_equals_parsing_at_once(
    document: Any, separators: tuple[str, str], ascii: bool
) -> None:
    text = json.dumps(document, separators=separators, ensure_ascii=ascii).encode()
    assert in_pieces(text) == whole(orjson.loads(text))


@PROPERTY
@given(st.data(), documents)
def test_invalid_texts_are_refused_in_pieces_too(data: st.DataObject, document: Any) -> None:
    text = data.draw(mutations(json.dumps(document).encode()))
    expected = outcome(parse, text)
    if isinstance(expected, InvalidRequest):
        assert isinstance(outcome(in_pieces, text), InvalidRequest)


@pytest.mark.parametrize(
    "array",
    [
        "1,2,3,4,5,,6,7,8,9", ",1,2,3,4,5,6,7,8", "1,2,3,4,5,6,7,8,", "[1,2],[,3,4],[5,6]",
        "[1,2],[3,4,],[5,6]", "1,2,3 4,5,6,7", "01,2,3,4,5,6,7", "[1,2],[3,4]],[[5,6]",
        '"a","b,,","c",,"d","e"', "1,2,3,4,\\\\,5,6,7", "1,2,3,nul,4,5,6", '1,2,"3,4,5,6,7,8',
        "1;2;3;4;5;6;7;8", "1.,2,3,4,5,6,7", "+1,2,3,4,5,6,7", "[1,2,3,4],[5,6,7,8",
    ],
)  # fmt: skip
def test_wrong_arrays(array: str) -> None:
    text = b'{"inputs":[{"name":"x","data":[%b]}]}' % array.encode()
    assert isinstance(outcome(parse, text), InvalidRequest)
    assert isinstance(outcome(in_pieces, text), InvalidRequest)


def test_text_beside_long_arrays_is_bounded() -> None:
    before, behind = b'{"id":"%b","x":' % (b"i" * 90), b"}"
    text = before + b"[%b1]" % (b"1," * 100) + behind
    beside = len(before + behind)
    assert parse_long(text, SMALL, beside)["id"] == "i" * 90
    with pytest.raises(InvalidRequest, match=f"holds {beside} bytes beside long arrays, at most"):
        parse_long(text, SMALL, beside - 1)


@pytest.mark.parametrize(
    "values",
    [
        ["1"], ["1.25"], ['"ab"'], ["[]"], ["[1.5]"], ["[[[]]]"], ["{}"], ['{"a":1.5}'],
        [f'{{"{number:x}":[]}}' for number in range(1000)],
    ],
)  # fmt: skip
def test_text_beside_long_arrays_is_charged_with_what_it_takes(values: list[str]) -> None:
    count = 100_000 // (values[0].count(":") + 1)
    text = b'{"x":[{},%b]}' % ",".join(islice(cycle(values), count)).encode()
    charged = list[int]()
    tracemalloc.start()
    try:
        found = parse_long(text, charge=charged.append)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found["x"]) == count + 1
    assert len(charged) == 1
    assert len(text) < taken < 1.5 * charged[0]


def test_long_arrays_are_not_charged_with_the_text_beside_them() -> None:
    before, behind, charged = b'{"id":"%b","x":' % (b"i" * 90), b"}", list[int]()
    parse_long(before + b"[%b1]" % (b"1," * 100) + behind, SMALL, charge=charged.append)
    parse_long(before + b"[%b1]" % (b"1," * 900) + behind, SMALL, charge=charged.append)
    parse_long(before + b"1" + behind, SMALL, charge=charged.append)
    assert charged[0] == charged[1]
    assert len(before + behind) < charged[2] < 1000


def test_a_member_cannot_forge_a_long_array() -> None:
    text = b'{"inputs":[{"data":{"":0}},{"data":{"0":0}},{"data":[1,2,3,4,5,6]}]}'
    first, second, third = parse_long(text, SMALL)["inputs"]
    assert (first["data"], second["data"]) == ({"": 0}, {"0": 0})
    assert whole(third["data"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("array", "count"), [("[]", 0), ("[ ]", 0), ("[1]", 1), ("[1,2,3]", 3), ('["a,b","\\","]', 2)]
)
def test_number_of_elements(array: str, count: int) -> None:
    assert LongArray(array.encode(), 0, len(array)).elements() == count


@pytest.mark.parametrize(
    ("filling", "of_each"), [("1,", 1), ('"a":1,', 1), ("{},", 2), ('"b":[],', 2), ("[[[]]],", 4)]
)
def test_values_beside_long_arrays_are_bounded(filling: str, of_each: int) -> None:
    inner = (filling * (MAX_VALUES // of_each + 1))[:-1]
    text = f'{{"x":{{{inner}}}}}' if ":" in filling else f"[{inner}, {{}}]"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        parse_long(text.encode())


@pytest.mark.parametrize("inner", ['"%x":1', '"x":{"%x":[]}', '"a:\\":":"%x"'])
def test_members_of_objects_are_bounded(inner: str) -> None:
    count = MAX_MEMBERS // inner.count('":') - 1
    members = ",".join(inner % number for number in range(count))
    assert parse_long(b'{"data":{%b}}' % members.encode())
    members += ',"":0' * (MAX_MEMBERS - count)
    with pytest.raises(InvalidRequest, match=f"beside long arrays, at most {MAX_MEMBERS} are"):
        parse_long(b'{"data":{%b}}' % members.encode())


# --- bare words

numbers = (
    st.integers(-9, 10**9)
    | st.floats()
    | st.text('ab"\\[]{},: \nNaInf', max_size=8)
    | st.sampled_from(["NaN", '"NaN', "Infinity", "\\"])
    | st.none()
)
with_words = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('N"a\\', max_size=2), inner, max_size=3)
    ),
)


@PROPERTY
@given(with_words, st.booleans())
def test_bare_words_are_numbers_outside_of_strings(document: Any, short: bool) -> None:
    text = json.dumps(document)
    if short:  # Triton's JSON writes `Inf`
        text = re.sub(r'("(?:[^"\\]|\\.)*")|Infinity', lambda m: m[1] or "Inf", text)
    assert repr(parse_json(text.encode())) == repr(document)


@PROPERTY
@given(st.data(), with_words)
def test_wrong_texts_with_bare_words_are_refused(data: st.DataObject, document: Any) -> None:
    text = data.draw(mutations(json.dumps([nan, document]).encode()))
    found = outcome(parse_json, text)
    # Like JSON, if a number of as many digits stood for each word.
    words = re.sub(rb'("(?:[^"\\]|\\.)*+"?)|\bNaN\b|(?:-|\b)Inf(?:inity)?\b', _number, text)
    assert isinstance(found, InvalidRequest) == isinstance(outcome(parse, words), InvalidRequest)


def _number(match: re.Match[bytes]) -> bytes:
    return match[1] or b" 0 "


@pytest.mark.parametrize("text", [
    '{"data": [NaN, 1e400]}', '{"id": "NaN", "data": [1e400]}', "[-1e999, Infinity]",
    f"[NaN, {'9' * 400}.0]", f"[NaN, {'9' * 400}]", f"[Inf, {'9' * 300}e99]", "[NaN, 01]",
    "[NaN, .5]", '["NaN", 1e400]', "[-NaN]", "[NaNs]", "[+Infinity]", "[1NaN]", "[NaN 1]",
    "[NaN1]", "{NaN: 1}",
    "[Infinity, 1-Infinity]", "[NaN, 1e]", "[NaN,]", '["\\uD800", NaN]', '["\t", NaN]',
    "\ufeff[NaN]", "[NaN.5]", "[- Infinity]",
])  # fmt: skip
def test_numbers_beside_bare_words_follow_the_rules_of_json(text: str) -> None:
    with pytest.raises(InvalidRequest, match="failed to parse the request JSON buffer"):
        parse_json(text.encode())


@pytest.mark.parametrize("behind", [b"", b",NaN"])
def test_scanning_many_escapes_takes_little_memory(behind: bytes) -> None:
    text = b'{"x":["%b"%b]}' % (b"\\\\" * (2 << 20), behind)
    with memory_within(3 * len(text)):
        found = parse_json(text, lifts=maxsize)["x"]
    assert [len(item) for item in next(found.pieces()) if type(item) is str] == [2 << 20]


def test_scanning_many_brackets_takes_little_memory() -> None:
    arrays = b"[]," * (1 << 19) + b"[]"
    text = b'{"x":[%b]}' % arrays
    with memory_within(40 << 20):
        assert len(parse_long(text)["x"]) == len(arrays) + 2


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize(
    ("deep", "refused"), [(MAX_DEPTH - 1, False), (MAX_DEPTH, True), (10**6, True)]
)
def test_the_depth_of_nesting_is_bounded(
    opening: bytes, closing: bytes, deep: int, refused: bool
) -> None:
    text = b'{"x":%b1%b}' % (opening * deep, closing * deep)
    for parsed in (parse, partial(parse_long, sizes=ScanSizes(lifted=len(text)))):
        assert isinstance(outcome(parsed, text), InvalidRequest) == refused


def test_more_closed_than_opened() -> None:
    with pytest.raises(InvalidRequest, match="unbalanced brackets"):
        parse_long(b'{"x":[1]}' + b"]" * 100)


@pytest.mark.parametrize("spaces", [1, 15, 16, 17, 100])
def test_members_behind_spaces(spaces: int) -> None:
    given = b" " * spaces
    text = b'{"x"%b:%b[1,2,3,4],"y":[%b[1,2,3,4]]}' % (given, given, given)
    assert in_pieces(text) == {"x": [1, 2, 3, 4], "y": [1, 2, 3, 4]}
    assert isinstance(parse_long(text, SMALL)["x"], LongArray)


@pytest.mark.parametrize("sign", [b",", b"[", b"{", b":"])
def test_signs_in_strings_are_not_counted(sign: bytes) -> None:
    text, charged = b'{"text":"%b"}' % (sign * (2 * MAX_VALUES)), list[int]()
    assert len(parse_long(text, charge=charged.append)["text"]) == 2 * MAX_VALUES
    assert charged[0] < len(text) + 1000


_PARSE = """
import resource
from headrace.core.errors import Overloaded
from headrace.protocol.json_text import parse_json, parse_object

text = b'{"a": [' + b"[1.5,2,3]," * 2_000_000 + b"1]}"
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
for parse in (parse_json, lambda text: parse_object(text, len(text))):
    try:
        parse(text)
    except Overloaded as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_out_of_memory_is_not_a_client_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE], capture_output=True, text=True, check=True
    )
    said = "the server has not enough memory to parse the request; try again later"
    assert done.stdout.splitlines() == [said, said]
