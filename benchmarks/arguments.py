"""Readers of command-line values; what they raise is a message for the user."""

import argparse
from collections.abc import Sequence


class names_of:
    """Reads a list of known names, with commas between them."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in self._known:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(self._known)}")
        return names


def numbers(text: str) -> list[int]:
    """A list of positive whole numbers."""
    return list(dict.fromkeys(count(part) for part in text.split(",")))


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive whole number")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number, 0 included."""
    return 0 if text == "0" else count(text)


def positive(text: str) -> float:
    """A number of seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return value
