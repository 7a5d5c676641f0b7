"""Requests with more rows than a batch may have: divided, and their answers put together again.

The parts are requests to the model like any other, but a few at a time: the next one is queued when
one has its answer, so that a large request neither fills the queue nor keeps the event loop busy. A
part that the queue refuses waits for those before it; without any before it the request fails. So
it does with the first part that fails, and the others are cancelled.

Owned by the event-loop thread. Invariant: parts that are queued or run are in `_parts`; after
`cancel`, or the end, the call is not answered.
"""

import logging
from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.call import Call, InferResponse, Submit, Timing
from headrace.core.errors import ExecutionFailed, Overloaded, QueueFull, ServerError
from headrace.core.tensors import Tensor, brackets, concatenated
from headrace.engine.shared_calls import Queue
from headrace.engine.workbench import Job, Workbench
from headrace.wire.elements import uncharged
from headrace.wire.status import INTERNAL_TEXT

log = logging.getLogger(__name__)

_AT_ONCE = 8  # parts that are queued or run
_JOINED_HERE = 1 << 20  # bytes that are put together on the event loop


def divide(most: int, submit: Submit, queue: Queue, bench: Workbench) -> Submit:
    """The stage that divides calls with more than the `most` rows of a batch."""

    def stage(call: Call) -> None:
        if call.rows <= most:
            submit(call)
        else:
            DividedCall(call, most, submit, queue, bench).begin()

    return stage


class DividedCall:
    """The parts of one such call, and its owner."""

    def __init__(
        self, call: Call, part_rows: int, submit: Submit, queue: Queue, bench: Workbench
    ) -> None:
        """`submit` queues a part of at most `part_rows` of the call's rows."""
        self.whole = call
        rows = self._rows = call.rows
        self._bounds = [
            (start, min(start + part_rows, rows)) for start in range(0, rows, part_rows)
        ]
        self._submit = submit
        self._queue = queue
        self._bench = bench
        self._begun = monotonic_ns()
        self._next = 0
        self._parts: dict[int, Call] = {}
        self._answers: list[InferResponse | None] = [None] * len(self._bounds)
        self._job: Job[InferResponse] | None = None
        self._over = False

    def begin(self) -> None:
        """Queue the first parts; raises `ServerError`."""
        self._queue.expect(1)
        try:
            self._go_on()
        except BaseException:
            self._end()
            raise
        self.whole.owner = self

    def cancel(self, call: Call) -> None:
        """`Owner.cancel`."""
        if not self._over:
            self._end()

    def hold(self, call: Call, held: bool) -> None:
        """`Owner.hold`: there is one response only."""

    # --- for parts

    def answered(self, number: int, response: InferResponse) -> None:
        """Take the answer to a part."""
        if self._parts.pop(number, None) is None:
            return
        self._answers[number] = response
        try:
            self._go_on()
        except ServerError as error:
            self._fail(error)
            return
        if not self._parts:
            self._join()

    def failed(self, number: int, error: ServerError) -> None:
        """A part has no answer, so the request has none."""
        if self._parts.pop(number, None) is not None:
            self._fail(error)

    # --- from part to part

    def _go_on(self) -> None:
        """Queue parts, as many as may be; raises `ServerError` if that is none at all."""
        while self._next < len(self._bounds) and len(self._parts) < _AT_ONCE:
            number = self._next
            start, stop = self._bounds[number]
            part = self._part(number, start, stop)
            try:
                self._submit(part)
            except (QueueFull, Overloaded):
                if not self._parts:
                    raise
                return
            self._parts[number] = part
            self._next += 1

    def _part(self, number: int, start: int, stop: int) -> "_Part":
        whole = self.whole
        timeout = whole.timeout
        if timeout:
            timeout = max(timeout - (monotonic_ns() - self._begun) // 1_000, 1)
        inputs = {
            name: Tensor(name, tensor.datatype, tensor.array[start:stop])
            for name, tensor in whole.inputs.items()
        }
        part = _Part(
            whole.model_name, whole.model_version, whole.id, inputs, whole.outputs,
            dict(whole.parameters), whole.priority, timeout, whole.sequence_id,
            whole.sequence_start and not start, whole.sequence_end and stop == self._rows,
            nbytes=whole.nbytes * (stop - start) // self._rows,
        )  # fmt: skip
        part.divided, part.place, part.rows = self, number, stop - start
        return part

    def _join(self) -> None:
        answers = [answer for answer in self._answers if answer is not None]
        self._answers.clear()
        size = sum(tensor.array.nbytes for answer in answers for tensor in answer.outputs)
        if size > _JOINED_HERE:
            self._job = self._bench.do(
                size, lambda charge: joined(answers), self._joined, uncharged
            )
            return
        try:
            whole = joined(answers)
        except ServerError as error:
            self._fail(error)
        else:
            self._joined(whole, None)

    def _joined(self, whole: InferResponse | None, problem: Exception | None) -> None:
        self._job = None
        if whole is not None:
            self._end()
            self.whole.pass_response(whole, True)
        elif isinstance(problem, ServerError):
            self._fail(problem)
        else:
            log.error("bug while putting answers together", exc_info=problem)
            self._fail(ExecutionFailed(INTERNAL_TEXT))

    def _fail(self, error: ServerError) -> None:
        self._end()
        self.whole.pass_end(error)

    def _end(self) -> None:
        self._over = True
        if self._job is not None:
            self._job.cancel()
        parts, self._parts = self._parts, {}
        for part in parts.values():
            part.cancel()
        self._queue.expect(-1)


class _Part(Call):
    """A part, in its `place`. What is known of the client is known of the whole."""

    __slots__ = ("divided", "place")

    divided: DividedCall
    place: int

    def header(self, name: str) -> str:
        return self.divided.whole.header(name)

    def remaining(self) -> float:
        return self.divided.whole.remaining()

    def answered_by(self, backend: str) -> None:
        self.divided.whole.pass_backend(backend)

    def respond(self, response: InferResponse, final: bool) -> None:
        self.divided.answered(self.place, response)

    def finish(self) -> None:
        self.fail(ExecutionFailed("the model has ended the request without a response"))

    def fail(self, error: ServerError) -> None:
        self.divided.failed(self.place, error)


def joined(answers: Sequence[InferResponse]) -> InferResponse:
    """The answers to the parts of a request, in order, as one.

    It waited as long as its first part; its time of execution is that of all together. Raises
    `ExecutionFailed` if the outputs do not go together.
    """
    first = answers[0]
    names = [tensor.name for tensor in first.outputs]
    if any([tensor.name for tensor in answer.outputs] != names for answer in answers):
        raise ExecutionFailed(
            f"model '{first.model_name}' gave different outputs for the batches of one request"
        )
    outputs = [_whole(first.model_name, [a.outputs[i] for a in answers]) for i in range(len(names))]
    timing = Timing(
        first.timing.queue_ns,
        sum(answer.timing.compute_ns for answer in answers),
        max(answer.timing.batch_rows for answer in answers),
    )
    parameters = {name: value for answer in answers for name, value in answer.parameters.items()}
    return InferResponse(
        first.model_name, first.model_version, first.id, outputs, timing, parameters
    )


def _whole(model: str, parts: Sequence[Tensor]) -> Tensor:
    """The rows of tensors of one name behind one another."""
    first = parts[0]
    shapes = {part.array.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ExecutionFailed(
            f"model '{model}' gave output '{first.name}' in rows of different shapes for the"
            f" batches of one request: {' and '.join(sorted(map(brackets, shapes)))}"
        )
    return Tensor(first.name, first.datatype, concatenated([part.array for part in parts]))
