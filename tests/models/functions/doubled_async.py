"""A coroutine."""

import asyncio

from headrace import model


@model
async def doubled(x: float) -> float:
    await asyncio.sleep(0)
    return x * 2
