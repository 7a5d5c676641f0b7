"""The outcome of a task for many that wait."""

import asyncio
from collections import Counter

import pytest

from headrace.engine.shared_outcome import SharedOutcome


async def _after(event: asyncio.Event) -> str:
    await event.wait()
    return "done"


async def test_an_outcome_for_each_that_waits_before_and_after() -> None:
    event = asyncio.Event()
    outcome = SharedOutcome(asyncio.create_task(_after(event)))
    early, given_up = outcome.wait(), outcome.wait()
    given_up.cancel()
    event.set()
    assert await early == await outcome.wait() == "done"
    assert given_up.cancelled()


async def test_an_outcome_is_told_to_many_in_turns() -> None:
    event, turn, told = asyncio.Event(), 0, Counter[int]()

    def tell(_: object) -> None:
        told[turn] += 1

    outcome = SharedOutcome(asyncio.create_task(_after(event)))
    for _ in range(1_000):
        outcome.wait().add_done_callback(tell)
    event.set()
    while told.total() < 1_000:
        turn += 1
        await asyncio.sleep(0)
    assert max(told.values()) < 100


async def test_an_outcome_that_is_an_exception_or_a_cancellation() -> None:
    async def fail() -> str:
        raise ValueError("no")

    failed = SharedOutcome(asyncio.create_task(fail()))
    with pytest.raises(ValueError, match="no"):
        await failed.wait()
    with pytest.raises(ValueError, match="no"):
        await failed.wait()
    task = asyncio.create_task(_after(asyncio.Event()))
    outcome = SharedOutcome(task)
    waiting = outcome.wait()
    task.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert outcome.wait().cancelled()
