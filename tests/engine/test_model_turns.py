"""Turns of requests that change the same model."""

import asyncio
from random import Random

import pytest

from headrace.engine.model_turns import ModelTurn


async def test_turns_come_in_order_and_to_those_that_still_wait() -> None:
    turn, begun = ModelTurn(), list[int]()

    async def ask(number: int) -> None:
        await turn.take()
        begun.append(number)

    await turn.take()
    asked = [asyncio.ensure_future(ask(number)) for number in range(6)]
    await asyncio.sleep(0)
    asked[0].cancel()
    asked[3].cancel()
    await asyncio.sleep(0)
    for _ in range(5):
        turn.end()
        await asyncio.sleep(0)
    assert begun == [1, 2, 4, 5]
    await turn.take()  # it is free again


async def test_a_turn_that_comes_to_one_that_is_cancelled_goes_on() -> None:
    turn = ModelTurn()
    await turn.take()
    first, second = (asyncio.ensure_future(turn.take()) for _ in range(2))
    await asyncio.sleep(0)
    turn.end()
    first.cancel()  # in the same turn of the event loop
    await asyncio.wait_for(second, 60)
    assert first.cancelled()


@pytest.mark.parametrize("seed", range(20))
async def test_one_at_a_time_whoever_is_cancelled(seed: int) -> None:
    random, turn, inside, done = Random(seed), ModelTurn(), 0, list[int]()

    async def ask(number: int) -> None:
        nonlocal inside
        await turn.take()
        try:
            inside += 1
            assert inside == 1
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            done.append(number)
        finally:
            inside -= 1
            turn.end()

    asked = [asyncio.ensure_future(ask(number)) for number in range(60)]
    for _ in range(40):
        await asyncio.sleep(0)
        random.choice(asked).cancel()
    await asyncio.wait(asked)
    assert done == sorted(done)
    assert all(task.cancelled() or task.exception() is None for task in asked)
    await asyncio.wait_for(turn.take(), 60)
