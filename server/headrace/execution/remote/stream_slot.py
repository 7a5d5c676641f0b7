"""One stream that may be under way to a model's servers; an instance, as the scheduler sees it.

For decoupled models, of which a request is answered any number of times: each request is a batch of
its own, and under way until its last response. What comes for it goes on as it comes; what it ends
with is its batch's outcome.
"""

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from headrace.core.call import Call
from headrace.core.errors import Cancelled, ServerError
from headrace.core.signature import Signature
from headrace.execution.remote.errand import Lost
from headrace.execution.remote.forwarded import Forwarding
from headrace.execution.remote.slot import Done, Pool, Slot
from headrace.execution.remote.stream_errand import StreamErrandMaker, StreamSent
from headrace.scheduling.batch import Answer, Batch, Deferral, NotStarted, Outcome, Part
from headrace.wire.remote_infer import RemoteAnswer

_TELL_END = "triton_enable_empty_final_response"

Give = Callable[[Call, Answer | None, bool], None]


class StreamSlot(Slot):
    """Sends one request at a time. Owned by the event-loop thread."""

    def __init__(
        self,
        pool: Pool,
        signature: Signature,
        forwarding: Forwarding,
        loop: asyncio.AbstractEventLoop,
        errands: StreamErrandMaker,
        give: Give,
    ) -> None:
        """`give` takes what comes for a request; `errands` makes what has a server answer it."""
        super().__init__(pool, signature, forwarding, loop)
        self._make = errands
        self._give = give
        self._stream: StreamSent | None = None

    def execute(self, batch: Batch, done: Done) -> None:
        """Send the request of `batch`; see `headrace.scheduling.batch.Instance`."""
        [call] = batch.calls
        self._batch, self._done = batch, done
        self._started = self._gathered = call.began = monotonic_ns()
        call.execution = self
        try:
            request = self._request(batch)
            parameters = {**request.parameters, _TELL_END: True}
            stream = self._make(self._pool, request._replace(parameters=parameters), self)
            self._gathered = monotonic_ns()
            begun = stream.begin()
        except Exception as error:  # whatever it is, it belongs to this request alone
            self._loop.call_soon(self.failed, error)
            return
        if not begun:
            self._loop.call_soon(self.failed, NotStarted())
            return
        self._stream = stream
        if call.held:
            stream.hold(True)

    def cancel(self, call: Call) -> None:
        """Nobody waits for the request any more."""
        stream = self._stream_of(call)
        if stream is not None:
            self._stream = None
            stream.cancel()
            # Not at once: whoever has cancelled is not done with it yet.
            self._loop.call_soon(self.failed, Cancelled("nobody waits for the answer"))

    def hold(self, call: Call, held: bool) -> None:
        """Have the server pause, or go on."""
        stream = self._stream_of(call)
        if stream is not None:
            stream.hold(held)

    def received(self, answer: RemoteAnswer) -> None:
        """`headrace.execution.remote.stream_errand.StreamSender.received`."""
        assert self._batch is not None
        self._give(self._batch.calls[0], _part(answer), False)

    def finished(self, answer: RemoteAnswer | None) -> None:
        """`headrace.execution.remote.stream_errand.StreamSender.finished`."""
        assert self._batch is not None
        # The request first: it ends the batch for nobody else.
        self._give(self._batch.calls[0], None if answer is None else _part(answer), True)
        self._end_stream(None)

    def failed(self, error: Exception) -> None:
        """`headrace.execution.remote.stream_errand.StreamSender.failed`."""
        self._end_stream(error)

    def _stream_of(self, call: Call) -> StreamSent | None:
        """What is under way for a request, if that is this slot's."""
        batch = self._batch
        return self._stream if batch is not None and batch.calls[0] is call else None

    def _end_stream(self, error: Exception | None) -> None:
        batch, done = self._batch, self._done
        assert batch is not None
        assert done is not None
        self._batch = self._done = self._stream = None
        outcome = Outcome((), None, self._started, self._gathered, monotonic_ns())
        if (trace := self._trace) is not None:
            self._trace = None
            trace.ended("" if error is None else str(error))
        if isinstance(error, NotStarted):
            batch.calls[0].execution = None
        if isinstance(error, Lost):
            error = error.failure.error
        if error is None or isinstance(error, ServerError):
            outcome.parts = [error or Deferral.LATER]  # which is for nobody: the request has ended
        else:
            outcome.error = error
        done(self, batch, outcome)
        self._pool.rest(self)


def _part(answer: RemoteAnswer) -> Part:
    return Part(answer.outputs, answer.parameters)
