"""An asynchronous generator: each word is a response."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from headrace import InvalidInput, model


def tell(log: str) -> None:
    Path(log).write_text("closed")


@model
async def words(text: str, log: str = "") -> AsyncIterator[tuple[str, int]]:
    if not text:
        raise InvalidInput("text is empty")
    try:
        for number, word in enumerate(text.split()):
            if word == "boom":
                raise RuntimeError("boom")
            await asyncio.sleep(0)
            yield word, number
        while log:  # for ever
            yield "again", -1
    finally:
        if log:
            tell(log)
