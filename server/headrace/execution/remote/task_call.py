"""Calls of libraries that have to be awaited, for those who are told by being called."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from headrace.execution.remote.connection import Receiver
from headrace.wire.remote_infer import RemoteAnswer


class TaskCall:
    """`headrace.execution.remote.connection.Call`: a task of the event loop that is running."""

    def __init__(self, work: Coroutine[Any, Any, RemoteAnswer], receiver: Receiver) -> None:
        """`work` gives the answer, or raises `CallFailed`."""
        self._receiver: Receiver | None = receiver
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the task."""
        self._receiver = None
        self._task.cancel()

    def _done(self, task: "asyncio.Task[RemoteAnswer]") -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        try:
            answer = task.result()
        except asyncio.CancelledError:  # not by us: the loop is ending
            return
        except Exception as error:
            receiver.failed(error)
        else:
            receiver.answered(answer)
