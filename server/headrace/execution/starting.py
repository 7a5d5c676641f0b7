"""Starting a worker beside the event loop: it may take minutes, and nothing waits for it."""

import asyncio
from collections.abc import Callable
from threading import Thread

from headrace.execution.worker_process import NoResources, WorkerProcess

Started = Callable[[WorkerProcess | None, Exception | None], None]


def start_aside(
    start: Callable[[], WorkerProcess], loop: asyncio.AbstractEventLoop, name: str, done: Started
) -> None:
    """Call `start` on a thread, and on the loop `done` with the process or with what was raised.

    A process that is of no use any more by then is for `done` to kill.
    """

    def run() -> None:
        process: WorkerProcess | None = None
        problem: Exception | None = None
        try:
            process = start()
        except Exception as error:  # RepositoryError, or a bug
            problem = error
        try:
            loop.call_soon_threadsafe(done, process, problem)
        except RuntimeError:  # the loop is closed: the server has ended
            if process is not None:
                process.kill()

    # A thread of its own, and a daemon: a model that takes for ever to start must neither keep
    # others from being started nor the server from ending.
    try:
        Thread(target=run, name=f"start {name}", daemon=True).start()
    except RuntimeError as error:
        loop.call_soon(done, None, NoResources(f"cannot start {name}: {error}"))
