"""What goes out with a call beside the tensors of its requests: parameters, headers, a deadline.

A call has each of them only once, so requests run together only if these are alike. Deadlines need
not be: a call lasts for as long as anybody waits for it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.core.call import DEADLINE_PARAMETER, FORWARD_PARAMETER, Call, Parameter
from headrace.execution.remote.connection import CallTrace, CallTraces
from headrace.execution.remote.options import RemoteOptions
from headrace.observability.traces import TRACE_PARAMETER

_PREFIX = len(FORWARD_PARAMETER)
_LONGEST = (1 << 63) - 1  # it travels with a sign
_NOT_ALIKE = frozenset({DEADLINE_PARAMETER, TRACE_PARAMETER})


class Forwarded(NamedTuple):
    """What a call has; see `headrace.execution.remote.connection.RemoteRequest`."""

    parameters: Mapping[str, Parameter]
    headers: Sequence[tuple[str, str]]
    deadline: int
    trace: CallTrace | None = None


_NOTHING = Forwarded({}, (), 0)


class Forwarding:
    """Tells what of a model's requests is forwarded."""

    def __init__(self, options: RemoteOptions) -> None:
        self.traces: CallTraces | None = None
        self._priority = options.forward_priority

    def alike(self, request: Call) -> object:
        """What requests of one call have in common, beside what all of a batch have."""
        priority = request.priority if self._priority else 0
        timed = bool(request.timeout)
        if not request.parameters:
            return (priority, timed) if priority or timed else None
        items = sorted(
            (name, type(value).__name__, value)
            for name, value in request.parameters.items()
            if name not in _NOT_ALIKE
        )
        return (priority, timed, *items) if priority or timed or items else None

    def of(self, calls: Sequence[Call], now: int) -> Forwarded:
        """What a call for these has, which are alike; `now` is of the monotonic clock, in ns."""
        first = calls[0]
        if not (first.timeout or self._priority or any(p.parameters for p in calls)):
            return _NOTHING
        parameters: dict[str, Parameter] = {}
        headers: list[tuple[str, str]] = []
        for name, value in first.parameters.items():
            if name.startswith(FORWARD_PARAMETER):
                headers.append((name[_PREFIX:], str(value)))
            elif name not in _NOT_ALIKE:
                parameters[name] = value
        if self._priority and first.priority:
            parameters["priority"] = first.priority
        if first.timeout:
            # Of the time in queues, which all of those on the way share.
            left = max(p.timeout - (now - p.arrived) // 1000 for p in calls)
            parameters["timeout"] = min(max(left, 1), _LONGEST)
        trace = self._trace(calls)
        if trace is not None:
            headers = [item for item in headers if item[0] not in ("traceparent", "tracestate")]
            headers.append(("traceparent", trace.context.traceparent))
            if trace.context.state:
                headers.append(("tracestate", trace.context.state))
        return Forwarded(parameters, headers, _deadline(calls), trace)

    def _trace(self, calls: Sequence[Call]) -> CallTrace | None:
        """What the call is part of: the trace of the first request that is traced."""
        if self.traces is None:
            return None
        passed: CallTrace | None = None
        for call in calls:
            link = call.parameters.get(TRACE_PARAMETER)
            found = None if link is None else self.traces.begin_call(str(link))
            if found is not None:
                if found.context.sampled:
                    return found
                passed = passed or found
        return passed


def _deadline(calls: Sequence[Call]) -> int:
    """When the last one stops to wait; 0 if any of them waits for ever."""
    latest = 0
    for call in calls:
        deadline = call.parameters.get(DEADLINE_PARAMETER)
        if not isinstance(deadline, int):
            return 0
        latest = max(latest, deadline)
    return latest
