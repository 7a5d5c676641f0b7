"""Error texts, and values of parameters as text."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidOption
from headrace.core.tensors import brackets
from headrace.core.texts import (
    MAX_ERROR,
    bounded,
    encodable,
    flag,
    seconds,
    shown,
    whole,
    whole_number,
)

LONG = st.builds(
    lambda text, times: text * times,
    st.text(st.characters(exclude_categories=()), max_size=20),
    st.integers(0, 3_000),
)


@given(LONG)
def test_a_text_is_bounded(text: str) -> None:
    found = bounded(text)
    raw = found.encode()  # which fails for other text than Unicode
    assert len(raw) <= MAX_ERROR + len("…".encode())
    assert bounded(found) == found
    if len(text.encode(errors="replace")) <= MAX_ERROR:
        assert found == text.encode(errors="replace").decode()
    else:
        assert found.endswith("…")
        assert text.encode(errors="replace").startswith(raw.removesuffix("…".encode()))


def test_a_text_that_can_be_encoded() -> None:
    assert encodable("é\ud83d\ude00\ud800") == "é???"
    assert encodable(5) == "5"


def test_a_value_is_shown_in_part() -> None:
    assert shown("abc") == "'abc'"
    assert shown([1, 2]) == "[1, 2]"
    assert shown(1.5) == "1.5"
    assert len(shown("x" * 1_000_000)) <= 80
    assert len(shown([["y" * 1_000] * 1_000] * 1_000_000)) < 4_000
    assert len(shown({str(n): n for n in range(1_000)})) < 200


def test_a_shape_is_shown_in_part() -> None:
    assert brackets([]) == "[]"
    assert brackets([-1, 16]) == "[-1,16]"
    assert brackets(range(32)).endswith(",31]")
    assert brackets([1] * 1_000_000) == "[" + "1," * 32 + "…]"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1), ("64", 64), ("007", 7), ("0", None), ("65", None), ("", None), ("-1", None),
        ("+1", None), ("1.0", None), (" 1", None), ("1_0", None), ("\u0661", None), ("\xb2", None),
        ("0" * 5000 + "1", None), ("9" * 5000, None), ("00000000065", None),
    ],
)  # fmt: skip
def test_digits_alone_and_within_bounds(text: str, number: int | None) -> None:
    assert whole_number(text, 1, 64) == number


@given(st.text())
def test_any_text_is_a_number_or_none(text: str) -> None:
    found = whole_number(text, 0, 9)
    assert found is None or found == int(text)


def test_values_of_parameters() -> None:
    texts = {"on": "true", "off": "false", "count": "7", "wait": "1.5"}
    assert [flag(texts, name) for name in ("on", "off", "none")] == [True, False, False]
    assert [whole(texts, "count"), whole(texts, "none"), whole(texts, "none", 3)] == [7, 0, 3]
    assert [seconds(texts, "wait", 2), seconds(texts, "none", 2)] == [1.5, 2]


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (flag, "True", "true or false"), (flag, "", "true or false"),
        (whole, "-1", "a whole number, 0 for no limit"), (whole, "1" + 15 * "0", "a whole number"),
        (partial(whole, least=1, most=8, expected="1 to 8"), "9", "1 to 8"),
        (partial(seconds, default=1), "soon", "a number of seconds, 0 for no limit"),
        (partial(seconds, default=1), "nan", "a number"), (partial(seconds, default=1), "-1", "a"),
        (partial(seconds, default=1, most=60, expected="a minute"), "61", "a minute"),
    ],
)  # fmt: skip
def test_invalid_values_of_parameters(
    parse: Callable[[Mapping[str, str], str], object], text: str, expected: str
) -> None:
    with pytest.raises(InvalidOption) as raised:
        parse({"one": text}, "one")
    assert raised.value.path == "parameters['one']"
    assert raised.value.text.startswith(f"expected {expected}")
    assert raised.value.text.endswith(f", got {text!r}")
