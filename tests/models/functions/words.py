"""A generator: each word is a response."""

from collections.abc import Iterator
from pathlib import Path

from headrace import InvalidInput, model


def tell(log: str) -> None:
    Path(log).write_text("closed")


@model
def words(text: str, log: str = "") -> Iterator[tuple[str, int]]:
    if not text:
        raise InvalidInput("text is empty")
    try:
        for number, word in enumerate(text.split()):
            if word == "boom":
                raise RuntimeError("boom")
            yield word, number
        while log:  # for ever
            yield "again", -1
    finally:
        if log:
            tell(log)
