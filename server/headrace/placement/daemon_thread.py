"""Work that blocks, beside the event loop: on a thread of its own, for which no exit waits.

Not on a pool's thread: what takes for ever must neither keep other work waiting nor the server from
ending.
"""

import asyncio
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from headrace.core.errors import LoadFailed

T = TypeVar("T")


class NoResources(LoadFailed):
    """The system has no process, thread or descriptor left, which says nothing of a model."""


def run_in_daemon_thread(
    work: Callable[[], T], name: str, unwanted: Callable[[T], object] = lambda result: None
) -> asyncio.Future[T]:
    """The result of `work`, or what it raises; `NoResources` without a thread for it.

    To cancel the future does not end the work. A result that nobody can take any more, because of
    that or since the loop is closed, is given to `unwanted`. On the event loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: list[T], problem: BaseException | None) -> None:
        if not future.cancelled():
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(result[0])
        elif result:
            unwanted(result[0])

    def run() -> None:
        result: list[T] = []
        problem: BaseException | None = None
        try:
            result.append(work())
        except BaseException as error:
            problem = error
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:  # the loop is closed: the server has ended
            if result:
                unwanted(result[0])

    try:
        Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        future.set_exception(NoResources(f"cannot {name}: {error}"))
    return future
