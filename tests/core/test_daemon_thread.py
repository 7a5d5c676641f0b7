"""Daemon threads."""

import asyncio
from threading import Event

import pytest

from headrace.core.daemon_thread import NoResources, run_in_daemon_thread
from tests.placement.threads import no_threads


def test_without_a_thread_there_is_no_result() -> None:
    async def work() -> None:
        with no_threads():
            future = run_in_daemon_thread(pytest.fail, "start m_0")
        with pytest.raises(NoResources, match=r"^cannot start m_0: can't start new thread$"):
            await future

    asyncio.run(work())


def test_an_unawaited_result_is_disposed_of() -> None:
    begun, go_on = Event(), Event()

    def compute() -> int:
        begun.set()
        go_on.wait()
        return 7

    async def work() -> int:
        given: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future = run_in_daemon_thread(compute, "compute", given.set_result)
        await asyncio.to_thread(begun.wait)
        future.cancel()
        go_on.set()
        return await given

    assert asyncio.run(work()) == 7


def test_a_result_for_a_closed_loop_is_disposed_of() -> None:
    go_on, given = Event(), list[int]()
    told = Event()

    def take(result: int) -> None:
        given.append(result)
        told.set()

    async def work() -> None:
        run_in_daemon_thread(lambda: go_on.wait() and 7, "compute", take)

    asyncio.run(work())
    go_on.set()
    assert told.wait(60)
    assert given == [7]


def test_work_that_raises_stop_iteration_fails() -> None:
    async def work() -> None:
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await asyncio.wait_for(run_in_daemon_thread(lambda: next(iter(())), "compute"), 60)
        assert isinstance(caught.value.__cause__, StopIteration)

    asyncio.run(work())
