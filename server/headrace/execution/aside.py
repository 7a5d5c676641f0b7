"""Work that blocks, beside the event loop: on a thread of its own, for which no exit waits."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T], name: str) -> T:
    """What `work` gives or raises. To cancel the wait for it does not end the work.

    A thread of its own, and a daemon: what takes for ever must neither keep other work waiting nor
    the server from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, problem: BaseException | None) -> None:
        if future.cancelled():
            return
        if problem is not None:
            future.set_exception(problem)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # there is one without a problem

    def run() -> None:
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, problem)

    Thread(target=run, name=name, daemon=True).start()
    return await future
