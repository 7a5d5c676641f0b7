"""Executor of a model whose `execute` is a coroutine: accepts batches as they arrive.

A separate module, since asyncio is a large import for models without coroutines.
"""

import asyncio
import inspect
import logging
from time import monotonic_ns

from headrace.ipc.frame_socket import Received
from headrace.ipc.frames import FrameKind
from headrace.workers.execute import READY_SECS, Executor, error_texts

log = logging.getLogger("model")


class CoroutineExecutor(Executor):
    """Runs batches concurrently, on an event loop."""

    is_async = True
    _ending = False  # true when tasks are cancelled because the worker ends

    def _serve(self) -> None:
        asyncio.run(self._serve_async())

    async def _serve_async(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        session = self.session
        loop = asyncio.get_running_loop()
        come = asyncio.Event()
        session.run_on(loop, come.set)
        loop.add_reader(session.fileno(), session.poll)
        while not session.stopped or session.batches:
            if not session.batches:
                await come.wait()
            come.clear()
            while session.batches:
                task = asyncio.create_task(self._task(session.batches.popleft()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        loop.remove_reader(session.fileno())
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _task(self, received: Received) -> None:
        """Run a batch, or answer a readiness request."""
        header, meta, data = received
        if header.kind is not FrameKind.EXECUTE:
            self._tell_ready(await self._ready_async())
            return
        slot = header.number
        self.session.slot.set(slot)
        try:
            if header.flags:  # the data may be in a file
                data = self._link.data_of(header, data)
            layout, requests = self._batches.requests(header, meta, data, self.session)
            del received, data
            began = monotonic_ns()
            try:
                returned = await self._model.execute(requests)
            except asyncio.CancelledError as error:
                if self._ending:
                    raise
                sent = self._raised(slot, requests, error, began)  # raised by the model itself
            except Exception as error:
                sent = self._raised(slot, requests, error, began)
            else:
                times = began, monotonic_ns()
                sent = self._batches.result(
                    slot, layout, requests, returned, times
                ) or self._returned(slot, requests, returned, times)
                del returned
            if self.session.cancelled or self.session.held:
                self.session.forget_answered(requests)
            del requests
        except Exception as error:
            sent = self._broken(slot, *error_texts(error))
        kind, told, parcel = sent
        self._link.send_parcel(kind, slot, told, parcel)

    async def _ready_async(self) -> object:
        try:
            found = self._model.is_ready()
            if inspect.isawaitable(found):
                found = await asyncio.wait_for(found, READY_SECS)
            return found
        except Exception:
            log.exception("is_ready")
            return False
