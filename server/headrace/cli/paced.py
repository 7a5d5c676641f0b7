"""Calls at their moments by a bounded number of callers: the load of replays and of tuning."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def paced(
    calls: Iterable[tuple[float, T]], call: Callable[[T], Awaitable[None]], at_once: int
) -> None:
    """Await `call` for each item, none before its moment, and at most `at_once` together.

    Moments are seconds from now, in ascending order: with 0 for all of them, each caller makes its
    next call after the answer to the last one. The first exception cancels the other calls, and is
    passed on.
    """
    loop = asyncio.get_running_loop()
    begun, left = loop.time(), iter(calls)

    async def make() -> None:
        for moment, item in left:
            if (early := begun + moment - loop.time()) > 0:
                await asyncio.sleep(early)
            await call(item)

    callers = [asyncio.ensure_future(make()) for _ in range(at_once)]
    try:
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
