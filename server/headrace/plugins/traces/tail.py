"""Tail sampling: traces of requests that are recorded in case they turn out slow, or fail.

`Tracing` decides about a request when it ends, and marks its trace as kept or not. Calls of its
models end before; their traces wait here for that decision. Owned by the event-loop thread.

Invariant: `_waiting` has traces of calls by the number of their request's trace, which is under
way; `_decided` the last requests that ended, for calls that outlive theirs.
"""

from headrace.engine.tracing import Item, TraceSink
from headrace.observability.traces import Trace

_MOST_WAITING = 10_000  # traces of calls; those of the oldest request are dropped first
_MOST_DECIDED = 4096  # requests


class TailSink:
    """A `TraceSink` that passes on only what is kept."""

    def __init__(self, sink: TraceSink, most: int = _MOST_WAITING) -> None:
        self._sink = sink
        self._most = most
        self._waiting: dict[int, list[Trace]] = {}
        self._number = 0  # of waiting traces
        self._decided: dict[int, bool] = {}

    def put(self, item: Item) -> None:
        """Implements `TraceSink.put`."""
        if not isinstance(item, Trace) or item.picked:
            self._sink.put(item)
        elif item.root:
            self._put_call(item)
        else:
            self._put_request(item)

    def close(self, seconds: float) -> None:
        """Implements `TraceSink.close`."""
        self._sink.close(seconds)

    def _put_call(self, trace: Trace) -> None:
        kept = self._decided.get(trace.root)
        if kept is not None:
            self._pass(trace, kept)
            return
        self._waiting.setdefault(trace.root, []).append(trace)
        self._number += 1
        while self._number > self._most:
            for one in self._taken(next(iter(self._waiting))):
                self._pass(one, False)

    def _put_request(self, trace: Trace) -> None:
        for one in self._taken(trace.number):
            self._pass(one, trace.kept)
        self._pass(trace, trace.kept)
        self._decided[trace.number] = trace.kept
        if len(self._decided) > _MOST_DECIDED:
            del self._decided[next(iter(self._decided))]

    def _taken(self, number: int) -> list[Trace]:
        traces = self._waiting.pop(number, [])
        self._number -= len(traces)
        return traces

    def _pass(self, trace: Trace, kept: bool) -> None:
        if kept:
            self._sink.put(trace)
        elif trace.last:  # the others of its sampler have been written
            self._sink.put(trace.sampler)
