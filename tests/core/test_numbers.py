"""Whole numbers as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.texts import whole_number


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
