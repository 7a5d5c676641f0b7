"""Generators as decoupled models: each value that is yielded is a response, its end the last one.

Plain generators run on threads of the model's own, each of which answers one request at a time;
asynchronous ones are tasks on the worker's event loop. Both wait while a client does not read what
it has got. A generator whose client has gone is closed at its next value.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from headrace.workers import triton_api as pb
from headrace.workers.functions.adapter import FunctionModel
from headrace.workers.functions.calls import Plan, Request, refusal
from headrace.workers.functions.values import InvalidInput

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
log = logging.getLogger("model")


class Sender(Protocol):
    """What answers a request; `triton_api` has it."""

    def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        """Send, after waiting for the client to read."""

    async def asend(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        """The same for coroutines."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for more."""


class StreamedRequest(Request, Protocol):
    """What is needed of a request that gets several responses."""

    def get_response_sender(self) -> Sender:
        """What answers it."""


class StreamModel(FunctionModel):
    """A generator, on one thread for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(self.declaration.max_streams, "stream")

    def execute(self, requests: Sequence[StreamedRequest]) -> None:
        """Begin to answer requests; those for which there is no thread wait for one."""
        for request in requests:
            answer = self._threads.submit(self._answer, request, request.get_response_sender())
            answer.add_done_callback(partial(_report, self.declaration.name))

    def finalize(self) -> None:
        """Begin no more, and close."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().finalize()

    def _answer(self, request: Request, sender: Sender) -> None:
        try:
            plan = self.calls.plan([request])
            if plan.calls and not sender.is_cancelled():
                self._stream(plan, sender)
            sender.send(plan.refused[0], FINAL)
        except Exception as error:
            _log(self.declaration.name, error)
            sender.send(refusal(error), FINAL)

    def _stream(self, plan: Plan, sender: Sender) -> None:
        values = self.function(**plan.calls[0])
        try:
            for value in values:
                if sender.is_cancelled():
                    return
                sender.send(self.calls.response(value, plan.sizes[0]))
        finally:
            if hasattr(values, "close"):  # a generator has it, other iterators need not
                values.close()


class AsyncStreamModel(FunctionModel):
    """An asynchronous generator, a task for each request."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()

    async def execute(self, requests: Sequence[StreamedRequest]) -> None:
        """Begin to answer requests."""
        for request in requests:
            task = asyncio.ensure_future(self._answer(request, request.get_response_sender()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(_report, self.declaration.name))

    async def _answer(self, request: Request, sender: Sender) -> None:
        try:
            plan = self.calls.plan([request])
            if plan.calls and not sender.is_cancelled():
                await self._stream(plan, sender)
            await sender.asend(plan.refused[0], FINAL)
        except Exception as error:
            _log(self.declaration.name, error)
            await sender.asend(refusal(error), FINAL)

    async def _stream(self, plan: Plan, sender: Sender) -> None:
        values = self.function(**plan.calls[0])
        try:
            async for value in values:
                if sender.is_cancelled():
                    return
                await sender.asend(self.calls.response(value, plan.sizes[0]))
        finally:
            if hasattr(values, "aclose"):
                await values.aclose()


def _report(name: str, request: "Future[None] | asyncio.Future[None]") -> None:
    """Log what has kept a request from being ended."""
    if not request.cancelled() and (error := request.exception()) is not None:
        log.error("%s could not end a request", name, exc_info=error)


def _log(name: str, error: Exception) -> None:
    if not isinstance(error, InvalidInput):
        log.error("%s has failed to answer a request", name, exc_info=error)
