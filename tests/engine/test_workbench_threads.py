"""Thread pools: bounded, in order, and without lost waiters."""

import asyncio
import sys
import threading
from functools import partial
from types import FrameType

import pytest

from headrace.core.daemon_thread import NoResources
from headrace.engine.workbench import Stopped, Threads, TookTooLong
from tests.engine.worlds import until
from tests.placement.threads import no_threads


async def test_results_and_exceptions() -> None:
    threads = Threads(2, "t")
    assert await threads.run(lambda: threading.current_thread().name) == "t"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    assert threads.under_way == 0


async def test_bounded_concurrency_in_order() -> None:
    threads = Threads(1, "t")
    go, begun = threading.Event(), list[int]()

    def work(number: int) -> int:
        begun.append(number)
        go.wait(30)
        return number

    tasks = [asyncio.ensure_future(threads.run(partial(work, n))) for n in range(5)]
    await asyncio.sleep(0)
    assert threads.under_way == 1
    tasks[2].cancel()
    await asyncio.sleep(0)
    go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [f for f in found if isinstance(f, int)] == begun == [0, 1, 3, 4]


async def test_waiting_work_makes_room_for_other_work() -> None:
    threads = Threads(1, "t")
    go, done = threading.Event(), list[str]()

    def waits() -> None:
        go.wait(30)
        done.append("waits")

    first = asyncio.ensure_future(threads.run(waits))
    second = asyncio.ensure_future(threads.run(partial(done.append, "second")))
    await asyncio.sleep(0)
    assert threads.under_way == 1
    threads.wait(True)
    await second
    threads.wait(False)
    third = asyncio.ensure_future(threads.run(partial(done.append, "third")))
    await asyncio.sleep(0)
    assert threads.under_way == 1
    go.set()
    await asyncio.gather(first, third)
    assert done == ["second", "waits", "third"]


async def test_work_that_takes_too_long_is_abandoned() -> None:
    threads = Threads(1, "t")
    go, late = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> str:
        go.wait(30)
        return "late"

    def too_late(result: str) -> None:
        assert result == "late"
        loop.call_soon_threadsafe(late.set)

    with pytest.raises(TookTooLong):
        await threads.run(work, 0.01, too_late)
    assert threads.under_way == 1
    assert await threads.run(lambda: 5, 30) == 5
    go.set()
    await late.wait()
    assert threads.under_way == 0


async def test_no_work_begins_once_stopped() -> None:
    threads = Threads(1, "t")
    go = threading.Event()
    first = asyncio.ensure_future(threads.run(lambda: go.wait(30)))
    second = asyncio.ensure_future(threads.run(lambda: True))
    await asyncio.sleep(0)
    threads.stop()
    with pytest.raises(Stopped):
        await second
    with pytest.raises(Stopped):
        await threads.run(lambda: True)
    go.set()
    assert await first


def test_the_event_loop_does_not_wait_for_threads_to_begin() -> None:
    """Python blocks the starter of a thread until that thread has the interpreter."""
    starts = 0

    def on_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal starts
        starts += event == "call" and frame.f_code is threading.Thread.start.__code__

    async def test() -> None:
        threads = Threads(4, "t")
        go = threading.Event()
        held = asyncio.ensure_future(threads.run(lambda: go.wait(30)))
        work = [asyncio.ensure_future(threads.run(partial(int, n))) for n in range(50)]
        assert await asyncio.gather(*work) == [*range(50)]
        go.set()
        assert await held
        assert threads.under_way == 0

    sys.setprofile(on_call)  # of this thread alone
    try:
        asyncio.run(test())
    finally:
        sys.setprofile(None)
    assert starts == 1  # of the thread that starts the others


async def test_threads_take_further_work_and_end() -> None:
    threads, before = Threads(2, "t"), set(threading.enumerate())
    go = threading.Event()
    held = asyncio.ensure_future(threads.run(lambda: go.wait(30)))
    used = {await threads.run(threading.current_thread) for _ in range(100)}
    assert len(used) < 100
    go.set()
    assert await held
    await until(lambda: set(threading.enumerate()) <= before)


async def test_without_a_thread_it_fails_and_later_work_is_done() -> None:
    threads = Threads(1, "read")
    with no_threads(), pytest.raises(NoResources, match=r"^cannot read: can't start new thread$"):
        await threads.run(pytest.fail)
    assert threads.under_way == 0
    assert await threads.run(lambda: 5) == 5


async def test_threads_that_are_done_take_what_waits() -> None:
    threads = Threads(2, "t")
    seen = set[threading.Thread]()
    # Each piece is done before the event loop looks again.
    await asyncio.gather(
        *[threads.run(lambda: seen.add(threading.current_thread())) for _ in range(200)]
    )
    assert len(seen) <= 2
