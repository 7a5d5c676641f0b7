"""Paced calls: their moments, their number at once, and errors."""

import asyncio
from collections.abc import Iterator

import pytest

from headrace.cli.paced import paced


async def test_callers_share_the_calls() -> None:
    made, running, most = list[int](), 0, 0

    async def call(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        made.append(number)

    await paced(((0.0, number) for number in range(50)), call, 4)
    assert (sorted(made), most, running) == ([*range(50)], 4, 0)


async def test_no_call_is_made_before_its_moment() -> None:
    loop = asyncio.get_running_loop()
    begun, made = loop.time(), list[tuple[float, float]]()

    async def call(moment: float) -> None:
        made.append((moment, loop.time() - begun))

    await paced(((moment, moment) for moment in (0.0, 0.02, 0.02, 0.05)), call, 2)
    assert [moment for moment, _ in made] == [0.0, 0.02, 0.02, 0.05]
    assert all(at >= moment for moment, at in made)


async def test_an_error_ends_all_calls() -> None:
    ended, drawn = list[int](), list[int]()

    async def call(number: int) -> None:
        try:
            if number == 1:
                raise ValueError("1 is refused")
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    def calls() -> Iterator[tuple[float, int]]:
        for number in range(10):
            drawn.append(number)
            yield 0.0, number

    with pytest.raises(ValueError, match="1 is refused"):
        await paced(calls(), call, 2)
    await asyncio.sleep(0)
    assert (sorted(ended), drawn) == ([0, 1], [0, 1])
