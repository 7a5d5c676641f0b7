"""Calls to other servers as parts of traces; see `headrace.execution.remote.connection.CallTrace`.

Owned by the event-loop thread.
"""

from collections.abc import Callable
from time import monotonic_ns

from headrace.core.trace_context import TraceContext
from headrace.engine.span_ids import child_span
from headrace.observability.traces import CallSpan, SpanIds, Trace


class TracedCall:
    """A call that has a span of its own in a trace."""

    def __init__(self, trace: Trace, ids: SpanIds, live: Callable[[Trace], bool]) -> None:
        """`live` is whether a trace has not been handed on yet."""
        self.context = child_span(ids.model)
        self._trace = trace
        self._live = live
        self._begun = monotonic_ns()
        self._endpoint = ""

    def sent(self, endpoint: str) -> None:
        """Know where it goes."""
        self._endpoint = endpoint

    def ended(self, error: str) -> None:
        """Have the trace know of it, unless the request has ended before the call."""
        if self._live(self._trace):
            now = monotonic_ns()
            span = CallSpan(self.context, self._endpoint, self._begun, now, error)
            self._trace.calls.append(span)


class PassedCall:
    """A call of a request that is not traced here, but by its client."""

    def __init__(self, context: TraceContext) -> None:
        self.context = context

    def sent(self, endpoint: str) -> None:
        """Of no interest."""

    def ended(self, error: str) -> None:
        """Of no interest."""
