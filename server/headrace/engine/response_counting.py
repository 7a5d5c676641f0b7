"""Counting the responses of a version that answers a request any number of times.

It stands between the doors and the scheduler, and only for such versions: others are not asked
whether they are one. A response takes from the one before it, or from the begin of its request's
execution, to when it has been passed on. Owned by the event-loop thread.
"""

from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.core.errors import ExecutionFailed, ServerError
from headrace.core.requests import Call, InferResponse, Sink, StageSink, Ticket
from headrace.engine.doors import Enqueue
from headrace.observability.responses import FIRST_RESPONSE_BOUNDS, FirstResponses, Responses


def count_responses(
    responses: Responses,
    enqueue: Callable[[Call, Sink, int], Call],
    bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS,
    now: Callable[[], int] = monotonic_ns,
) -> Enqueue:
    """The stage that counts responses, before the queue.

    `bounds` are those of the time to the first response, in milliseconds. `now` is the clock of
    the scheduler, in nanoseconds.
    """
    if responses.first is None or responses.first.bounds != tuple(bounds):
        responses.first = FirstResponses(bounds)

    def stage(request: Call, sink: Sink, rows: int) -> Ticket:
        counted = _Counted(sink, responses, now)
        counted.call = enqueue(request, counted, rows)
        return counted

    return stage


class _Counted(StageSink):
    """A request's sink and ticket, for the scheduler and for its door."""

    __slots__ = ("_ended", "_now", "_ordinal", "_responses", "call")

    call: Call

    def __init__(self, sink: Sink, responses: Responses, now: Callable[[], int]) -> None:
        super().__init__(sink)
        self._responses = responses
        self._now = now
        self._ordinal = 0  # of the next response
        self._ended = 0  # when the last one had been passed on

    def respond(self, response: InferResponse, final: bool) -> None:
        came = self._now()
        self._sink.respond(response, final)
        ended = self._now()
        began = self._ended
        if not self._ordinal:
            began = self.call.arrived + response.timing.queue_ns
            if self._responses.first is not None:
                self._responses.first.observe(ended - self.call.arrived)
        counters = self._responses.of(self._ordinal)
        counters.compute_infer.add(max(came - began, 0))
        counters.compute_output.add(ended - came)
        counters.success.add(max(ended - began, 0))
        self._ordinal += 1
        self._ended = ended

    def finish(self) -> None:
        self._responses.of(self._ordinal).empty_response.add(self._elapsed())
        self._sink.finish()

    def fail(self, error: ServerError) -> None:
        # What no instance has begun has no response, and only a run itself fails where there is no
        # execution that can be told about single requests.
        if self.call.execution is not None or isinstance(error, ExecutionFailed):
            self._responses.of(self._ordinal).fail.add(self._elapsed())
        self._sink.fail(error)

    def cancel(self) -> None:
        if self.call.started and not self.call.ended:
            self._responses.of(self._ordinal).cancel.add(self._elapsed())
        self.call.cancel()

    def hold(self, held: bool) -> None:
        self.call.hold(held)

    def _elapsed(self) -> int:
        return self._now() - (self._ended or self.call.began)
