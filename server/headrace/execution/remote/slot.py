"""One call that may be under way to a model's servers; an instance, as the scheduler sees it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Protocol

from headrace.core.errors import (
    Cancelled,
    ExecutionFailed,
    InvalidRequest,
    ServerError,
)
from headrace.core.signature import Signature, reshaped
from headrace.core.tensors import Array
from headrace.scheduling.batch import (
    Answer,
    Batch,
    Deferral,
    Instance,
    NotStarted,
    Outcome,
    Part,
    Pending,
)
from headrace.wire.remote_infer import RemoteAnswer, RemoteInput, RemoteMessages, read_answer
from headrace.wire.remote_status import Failure, Fate

log = logging.getLogger(__name__)

Done = Callable[[Instance, Batch, Outcome], None]


class Lost(Exception):
    """A call has failed, and is not to be sent to another server."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class Pool(Protocol):
    """What a slot belongs to."""

    async def ask(self, message: bytes) -> bytes:
        """Have a server run a request; raises `Lost` or `NotStarted`."""

    def rest(self, slot: "Slot") -> None:
        """The slot is idle."""

    def close(self) -> None:
        """End all connections."""


class Slot:
    """Sends one batch at a time. Owned by the event-loop thread."""

    load = 0

    def __init__(self, pool: Pool, signature: Signature, messages: RemoteMessages) -> None:
        self._pool = pool
        self._signature = signature
        self._messages = messages
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None

    def execute(self, batch: Batch, done: Done) -> None:
        """Send `batch`; see `headrace.scheduling.batch.Instance`."""
        self._batch = batch
        self._task = asyncio.get_running_loop().create_task(self._work(batch, done))

    def close(self) -> None:
        """End the pool, with whichever of its slots is closed first."""
        self._pool.close()

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for a request any more; the call ends with the last of its batch."""
        batch = self._batch
        if batch is None or self._task is None or pending not in batch.pendings:
            return
        if all(other.ended for other in batch.pendings):
            self._task.cancel()

    def hold(self, pending: Pending, held: bool) -> None:
        """There is only one response to a request."""

    async def _work(self, batch: Batch, done: Done) -> None:
        for pending in batch.pendings:
            pending.execution = self
        together = _together(batch)
        started = gathered = monotonic_ns()
        answer: RemoteAnswer | None = None
        error: Exception | None = None
        try:
            message = self._write(batch, together)
            gathered = monotonic_ns()
            answer = self._read(await self._pool.ask(message))
        except asyncio.CancelledError:  # all of its requests have ended
            error = Cancelled("nobody waits for the answer")
        except Exception as raised:  # whatever it is, it belongs to this batch alone
            error = raised
        for pending in batch.pendings:
            pending.execution = None
        self._batch = self._task = None
        outcome = Outcome((), None, started, gathered, monotonic_ns())
        if answer is not None:
            try:
                self._take(batch, together, answer, outcome)
            except ExecutionFailed as broken:
                error = broken
        if error is not None:
            _fail(batch, together, error, outcome)
        done(self, batch, outcome)
        self._pool.rest(self)

    def _write(self, batch: Batch, together: Sequence[Pending]) -> bytes:
        """The request for those of a batch that are sent together."""
        signature, first = self._signature, together[0].request
        rows = sum(pending.rows for pending in together)
        inputs = []
        for spec in signature.inputs:
            if spec.name not in first.inputs:
                continue  # optional and absent; the batch key makes that so for all
            parts = [pending.request.inputs[spec.name].array for pending in together]
            shape = reshaped(parts[0], spec, signature.batches, to_model=True).shape
            if signature.batches:
                shape = (rows, *shape[1:])
            inputs.append(RemoteInput(spec.name, spec.datatype, shape, parts))
        id = first.id if len(together) == 1 else ""
        names = [spec.name for spec in batch.outputs]
        return self._messages.request(inputs, names, first.parameters, id)

    def _read(self, data: bytes) -> RemoteAnswer:
        try:
            return read_answer(data)
        except InvalidRequest as error:
            log.error("model %s: a server's answer makes no sense: %s", self._signature.model,
                      error, extra={"model": self._signature.model})  # fmt: skip
            raise ExecutionFailed(
                f"the server of model '{self._signature.model}' has given an answer that makes no"
                " sense"
            ) from None

    def _take(
        self, batch: Batch, together: Sequence[Pending], answer: RemoteAnswer, outcome: Outcome
    ) -> None:
        """Put what has come into the outcome; raises `ExecutionFailed`."""
        model = self._signature.model
        for spec in batch.outputs:
            if spec.name not in answer.outputs:
                raise ExecutionFailed(
                    f"the server of model '{model}' has not given the output '{spec.name}'"
                )
        arrays: list[Array] = [answer.outputs[spec.name] for spec in batch.outputs]
        if not answer.parameters and len(together) == len(batch.pendings):
            outcome.arrays = arrays
            return
        rows = sum(pending.rows for pending in together)
        if len(together) > 1 and any(array.shape[:1] != (rows,) for array in arrays):
            raise ExecutionFailed(f"the server of model '{model}' has not given {rows} rows")
        answers: dict[Pending, Answer] = {}
        start = 0
        for pending in together:
            wanted = pending.request.outputs
            answers[pending] = Part(
                {
                    spec.name: array[start : start + pending.rows] if len(together) > 1 else array
                    for spec, array in zip(batch.outputs, arrays, strict=True)
                    if not wanted or spec.name in wanted
                },
                dict(answer.parameters),
            )
            start += pending.rows
        outcome.parts = [answers.get(pending, Deferral.AGAIN) for pending in batch.pendings]


def _together(batch: Batch) -> list[Pending]:
    """The requests of a batch that can be one call: a call has parameters only once."""
    pendings = batch.pendings
    first = pendings[0].request.parameters
    return [pending for pending in pendings if pending.request.parameters == first]


def _fail(batch: Batch, together: Sequence[Pending], error: Exception, outcome: Outcome) -> None:
    """Put an error into the outcome, with what is to become of each request.

    1. Nothing has begun: all of the batch is given back.
    2. Another attempt, or one with fewer rows, is no good: the requests have the error.
    3. A request is to blame: the batch is run again in halves or, where a part of it was sent, one
       by one.
    """
    again = isinstance(error, NotStarted)
    final = isinstance(error, Cancelled)
    if isinstance(error, Lost):
        final = error.failure.fate is not Fate.ANSWERED
        error = error.failure.error
    whole = len(together) == len(batch.pendings)
    if again or (whole and not final):
        outcome.error = error
        return
    answer: Answer = Deferral.AGAIN
    if (final or len(together) == 1) and isinstance(error, ServerError):
        answer = error
    outcome.parts = [
        answer if pending in together else Deferral.AGAIN for pending in batch.pendings
    ]
