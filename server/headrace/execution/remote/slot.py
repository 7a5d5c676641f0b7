"""One call that may be under way to a model's servers; an instance, as the scheduler sees it."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from headrace.core.call import Call
from headrace.core.errors import (
    Cancelled,
    ExecutionFailed,
    ServerError,
)
from headrace.core.signature import Signature, reshaped
from headrace.core.tensors import TensorArray
from headrace.execution.remote.connection import (
    CallTrace,
    RemoteRequest,
)
from headrace.execution.remote.errand import Errand, ErrandMaker, Lost, Members, Sent
from headrace.execution.remote.forwarded import Forwarding
from headrace.scheduling.batch import Answer, Batch, Instance, NotStarted, Outcome, Part
from headrace.wire.remote_infer import RemoteAnswer, RemoteInput
from headrace.wire.remote_status import Fate

Done = Callable[[Instance, Batch, Outcome], None]


class Pool(Members, Protocol):
    """What a slot belongs to."""

    def rest(self, slot: "Slot") -> None:
        """The slot is idle."""

    def close(self) -> None:
        """End all connections."""


class Slot:
    """Sends one batch at a time. Owned by the event-loop thread."""

    load = 0

    def __init__(
        self,
        pool: Pool,
        signature: Signature,
        forwarding: Forwarding,
        loop: asyncio.AbstractEventLoop,
        errands: ErrandMaker = Errand,
    ) -> None:
        """`errands` makes what has a server run a request."""
        self._pool = pool
        self._errands = errands
        self._signature = signature
        self._forwarding = forwarding
        self._loop = loop
        self._batch: Batch | None = None
        self._done: Done | None = None
        self._errand: Sent | None = None
        self._trace: CallTrace | None = None
        self._started = 0
        self._gathered = 0

    def execute(self, batch: Batch, done: Done) -> None:
        """Send `batch`; see `headrace.scheduling.batch.Instance`."""
        self._batch, self._done = batch, done
        self._started = self._gathered = monotonic_ns()
        for call in batch.calls:
            call.execution = self
        try:
            errand = self._errands(self._pool, self._request(batch), self)
            self._gathered = monotonic_ns()
            begun = errand.begin()
        except Exception as error:  # whatever it is, it belongs to this batch alone
            self._loop.call_soon(self.failed, error)
            return
        if begun:
            self._errand = errand
        else:
            self._loop.call_soon(self.failed, NotStarted())

    def close(self) -> None:
        """End the pool, with whichever of its slots is closed first."""
        self._pool.close()

    def cancel(self, call: Call) -> None:
        """Nobody waits for a request any more; the call ends with the last of its batch."""
        batch, errand = self._batch, self._errand
        if batch is None or errand is None or call not in batch.calls:
            return
        if all(other.ended for other in batch.calls):
            self._errand = None
            errand.cancel()
            # Not at once: whoever has cancelled is not done with it yet.
            self._loop.call_soon(self.failed, Cancelled("nobody waits for the answer"))

    def hold(self, call: Call, held: bool) -> None:
        """There is only one response to a request."""

    def answered(self, answer: RemoteAnswer) -> None:
        """`headrace.execution.remote.errand.Sender.answered`."""
        self._end(answer, None)

    def failed(self, error: Exception) -> None:
        """`headrace.execution.remote.errand.Sender.failed`."""
        self._end(None, error)

    def _end(self, answer: RemoteAnswer | None, error: Exception | None) -> None:
        batch, done = self._batch, self._done
        assert batch is not None
        assert done is not None
        self._batch = self._done = self._errand = None
        for call in batch.calls:
            call.execution = None
        outcome = Outcome((), None, self._started, self._gathered, monotonic_ns())
        if answer is not None:
            try:
                self._take(batch, answer, outcome)
            except Exception as broken:
                error = broken
        if (trace := self._trace) is not None:
            self._trace = None
            trace.ended("" if error is None else str(error))
        if error is not None:
            _fail(error, outcome, len(batch.calls))
        done(self, batch, outcome)
        self._pool.rest(self)

    def _request(self, batch: Batch) -> RemoteRequest:
        """The request for those of a batch, which are alike."""
        signature, calls, rows = self._signature, batch.calls, batch.rows
        first = calls[0]
        inputs = []
        for spec in signature.inputs:
            if spec.name not in first.inputs:
                continue  # optional and absent; the batch key makes that so for all
            parts = [call.inputs[spec.name].array for call in calls]
            shape = reshaped(parts[0], spec, signature.batches, to_model=True).shape
            if signature.batches:
                shape = (rows, *shape[1:])
            inputs.append(RemoteInput(spec.name, spec.datatype, shape, parts))
        id = first.id if len(calls) == 1 else ""
        names = [spec.name for spec in batch.outputs]
        parameters, headers, deadline, self._trace = self._forwarding.of(calls, self._started)
        return RemoteRequest(inputs, names, parameters, id, headers, deadline, self._trace)

    def _take(self, batch: Batch, answer: RemoteAnswer, outcome: Outcome) -> None:
        """Put what has come into the outcome; raises `ExecutionFailed`."""
        model, calls = self._signature.model, batch.calls
        for spec in batch.outputs:
            if spec.name not in answer.outputs:
                raise ExecutionFailed(
                    f"the server of model '{model}' has not given the output '{spec.name}'"
                )
        arrays: list[TensorArray] = [answer.outputs[spec.name] for spec in batch.outputs]
        if not answer.parameters:
            outcome.arrays = arrays
            return
        alone = len(calls) == 1
        if not alone and any(array.shape[:1] != (batch.rows,) for array in arrays):
            raise ExecutionFailed(f"the server of model '{model}' has not given {batch.rows} rows")
        parts: list[Answer] = []
        start = 0
        for call in calls:
            wanted = call.outputs
            own = {
                spec.name: array if alone else array[start : start + call.rows]
                for spec, array in zip(batch.outputs, arrays, strict=True)
                if not wanted or spec.name in wanted
            }
            parts.append(Part(own, dict(answer.parameters)))
            start += call.rows
        outcome.parts = parts


def _fail(error: Exception, outcome: Outcome, count: int) -> None:
    """Put an error into the outcome, with what is to become of the requests, so many.

    1. Nothing has begun: the batch is given back. Or a request is to blame: it is run again in
       halves.
    2. Another attempt, or one with fewer rows, is no good: the requests have the error.
    """
    final: ServerError | None = error if isinstance(error, Cancelled) else None
    if isinstance(error, Lost):
        failure = error.failure
        error = failure.error
        final = failure.error if failure.fate is not Fate.ANSWERED else None
    if final is None:
        outcome.error = error
    else:
        outcome.parts = [final] * count
