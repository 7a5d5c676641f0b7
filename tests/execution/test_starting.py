"""Starting workers where the system has nothing left for them."""

import asyncio

from headrace.execution.starting import start_aside
from headrace.execution.worker_process import NoResources, WorkerProcess
from tests.execution.threads import no_threads


def test_without_a_thread_there_is_no_worker_for_now() -> None:
    def start() -> WorkerProcess:
        raise AssertionError("there is no thread to start it on")

    async def work() -> Exception | None:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Exception | None] = loop.create_future()
        with no_threads():
            start_aside(start, loop, "m_0", lambda process, problem: told.set_result(problem))
        return await asyncio.wait_for(told, 10)

    problem = asyncio.run(work())
    assert isinstance(problem, NoResources)
    assert str(problem) == "cannot start m_0: can't start new thread"
