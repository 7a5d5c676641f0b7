"""Error texts, and integers as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.tensors import brackets
from headrace.core.texts import MAX_ERROR, bounded, shown, whole_number

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
