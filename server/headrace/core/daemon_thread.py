"""Blocking work on a daemon thread, which no exit waits for.

A pool of a fixed size would not do: work that hangs must delay neither other work nor the server's
exit.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TypeVar

from headrace.core.errors import LoadFailed

T = TypeVar("T")
# Work that returns how to tell its outcome: its thread can say before that it is free.
Run = Callable[[], Callable[[], None]]
# Has a thread run the first and tell its outcome, or calls the second with the reason why none can.
Start = Callable[[Run, Callable[[Exception], None]], None]


class NoResources(LoadFailed):
    """The system is out of processes, threads or descriptors; the model is not to blame."""


def run_in_daemon_thread(
    work: Callable[[], T],
    name: str,
    unwanted: Callable[[T], object] = lambda result: None,
    start: Start | None = None,
) -> asyncio.Future[T]:
    """The result of `work`, or its exception; `NoResources` if no thread can be started.

    Cancelling the future does not stop the work. `unwanted` receives a result that is no longer
    wanted, due to cancellation or a closed loop. Call it on the event loop; `start` may call its
    arguments on another thread. By default, the work has a thread of its own.
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

    def run() -> Callable[[], None]:
        result: list[T] = []
        problem: BaseException | None = None
        try:
            result.append(work())
        except StopIteration as error:  # which no future takes: it would never be done
            problem = RuntimeError("the work raised StopIteration")
            problem.__cause__ = error
        except BaseException as error:
            problem = error
        try:
            return partial(tell, result, problem)
        finally:
            del problem  # it refers to this frame, and both would live for longer

    def tell(result: list[T], problem: BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:  # the loop is closed: the server has ended
            if result:
                unwanted(result[0])

    def give_up(error: Exception) -> None:
        tell([], NoResources(f"cannot {name}: {error}"))

    if start is not None:
        start(run, give_up)
        return future
    try:
        Thread(target=lambda: run()(), name=name, daemon=True).start()
    except RuntimeError as error:
        give_up(error)
    return future
