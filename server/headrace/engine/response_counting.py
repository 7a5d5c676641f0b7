"""Counting the responses of a version that answers a request any number of times.

It stands between the doors and the scheduler, and only for such versions: others are not asked
whether they are one. A response takes from the one before it, or from the begin of its request's
execution, to when it has been passed on. Owned by the event-loop thread.
"""

from collections.abc import Callable, Sequence
from time import monotonic_ns

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.core.errors import ExecutionFailed, ServerError
from headrace.observability.statistics import FIRST_RESPONSE_BOUNDS, Histogram, Responses


def count_responses(
    responses: Responses,
    submit: Submit,
    bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS,
    now: Callable[[], int] = monotonic_ns,
) -> Submit:
    """The stage that counts responses, before the queue.

    `bounds` are those of the time to the first response, in milliseconds. `now` is the clock of
    the scheduler, in nanoseconds.
    """
    bounds_ns = [ms * 1e6 for ms in bounds]
    if responses.first is None or responses.first.bounds != bounds_ns:
        responses.first = Histogram(bounds_ns)
    return lambda call: call.enter(_Counted(responses, now), submit)


class _Counted(Stage):
    """What is counted of one call."""

    __slots__ = ("_came", "_ended", "_now", "_ordinal", "_responses")

    def __init__(self, responses: Responses, now: Callable[[], int]) -> None:
        self._responses = responses
        self._now = now
        self._ordinal = 0  # of the next response
        self._came = 0  # when the one that is being passed on did
        self._ended = 0  # when the last one had been passed on

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        self._came = self._now()

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        came, ended = self._came, self._now()
        began = self._ended
        if not self._ordinal:
            began = call.arrived + response.timing.queue_ns
            if self._responses.first is not None:
                self._responses.first.observe(ended - call.arrived)
        counters = self._responses.of(self._ordinal)
        counters.compute_infer.add(max(came - began, 0))
        counters.compute_output.add(ended - came)
        counters.success.add(max(ended - began, 0))
        self._ordinal += 1
        self._ended = ended

    def ended(self, call: Call, error: ServerError | None) -> None:
        if error is None:
            self._responses.of(self._ordinal).empty_response.add(self._elapsed(call))
        elif call.started and (call.execution is not None or isinstance(error, ExecutionFailed)):
            # What no instance has begun has no response, and only a run itself fails where there
            # is no execution that can be told about single requests.
            self._responses.of(self._ordinal).fail.add(self._elapsed(call))

    def cancelled(self, call: Call) -> None:
        if call.started:
            self._responses.of(self._ordinal).cancel.add(self._elapsed(call))

    def _elapsed(self, call: Call) -> int:
        return self._now() - (self._ended or call.began)
