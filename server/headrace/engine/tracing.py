"""Tracing: the choice of traced requests, and their settings.

Versions of a traced model have a stage for it (`Tracing.traced`); others have none, so that tracing
costs them nothing. When settings change, or a count is reached, the chains are recomposed. Names
and order of a trace's timestamps are Triton's: the exchange with the client (HTTP_RECV,
GRPC_WAITREAD, ..._SEND) around the request, its queue, and the computation of its batch.

Owned by the event-loop thread. Invariant: `_live` has the unfinished traces, which calls between
models may join. Finished ones go to a `TraceSink`, made by a plugin (`headrace.plugins.traces`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns, time_ns
from typing import Protocol

from headrace.core.call import Call, Done, InferResponse, Stage, Submit
from headrace.core.errors import Cancelled, InvalidRequest, ServerError
from headrace.engine.entrance import CONTEXT_HEADERS, Target
from headrace.observability.statistics import VersionStatistics
from headrace.observability.trace_settings import (
    Sampler,
    SettingsTable,
    TraceConfig,
    TraceMode,
    read_changes,
)
from headrace.observability.traces import (
    BACKEND_OUTPUT,
    QUEUE_INPUT,
    CallSpan,
    SpanIds,
    Trace,
    TraceContext,
    TraceLink,
    child_span,
    new_context,
    read_link,
    read_traceparent,
    write_link,
)
from headrace.scheduling.batcher import Batcher

Item = Trace | Sampler  # a sampler marks that it is finished
_RECEIVE = {"GRPC": "GRPC_WAITREAD"}  # other doors: NAME_RECV, as Triton's HTTP


class TraceSink(Protocol):
    """The destination of traces."""

    def put(self, item: Item) -> None:
        """Take a finished trace, or a sampler after the last of its traces; does not block."""

    def close(self, seconds: float) -> None:
        """Write everything taken, within `seconds`; blocks."""


MakeTraceSink = Callable[[TraceConfig], TraceSink]  # raises `LoadFailed`


def trace_stage(
    tracing: "Tracing",
    sampler: Sampler,
    version: str,
    statistics: VersionStatistics,
    submit: Submit,
) -> Submit:
    """The stage that traces some of the clients' calls, before `submit` of a version."""
    contexts, tail = tracing.takes_contexts, tracing.tail

    def stage(call: Call) -> None:
        if not call.door:  # an internal call
            submit(call)
            return
        context = _context(call) if contexts else None
        picked = sampler.pick() if context is None else context.sampled  # the client has decided
        if not picked and tail.choices and tail.chooses(call.id, call.parameters, call.header):
            picked = sampler.take()
        if not (picked or (tail.records and sampler.remaining)):
            if context is not None:  # models may still forward it
                call.context = call.context._replace(trace=write_link(TraceLink(0, context)))
            submit(call)
            return
        trace = tracing.begin(sampler, call, call.door, context, picked)
        Traced(tracing, trace, version, statistics).submit(call, submit)

    return stage


class TracedCall:
    """The span of a call to an upstream; a `CallTrace` of `placement.upstream.connection`.

    Without `record` only the client traces the request, and its context is forwarded.
    """

    def __init__(
        self, context: TraceContext, record: Callable[[CallSpan], object] | None = None
    ) -> None:
        self.context = context
        self._record = record
        self._begun = monotonic_ns()
        self._endpoint = ""

    def sent(self, endpoint: str) -> None:
        """Note the upstream of the call."""
        self._endpoint = endpoint

    def ended(self, error: str) -> None:
        """Record the call as a span."""
        if self._record is not None:
            now = monotonic_ns()
            self._record(CallSpan(self.context, self._endpoint, self._begun, now, error))


class Traced(Stage):
    """A traced call; the trace ends once the responses have been passed on."""

    __slots__ = ("_begun", "_ended", "_queued", "_statistics", "_trace", "_tracing")

    def __init__(
        self,
        tracing: "Tracing",
        trace: Trace,
        version: str = "",
        statistics: VersionStatistics | None = None,
    ) -> None:
        """`version` is the serving version, if known; `statistics` get it as an exemplar."""
        self._statistics = statistics
        trace.version = _number(version)
        self._tracing = tracing
        self._trace = trace
        self._begun = 0  # time when the current response began to be passed on
        self._queued = False  # queued by a scheduler that reports times
        self._ended = False

    def submit(self, call: Call, submit: Submit) -> None:
        """Submit the call within the trace; raises `ServerError`."""
        trace = self._trace
        now = monotonic_ns()
        if trace.door:
            receive = _RECEIVE.get(trace.door, f"{trace.door}_RECV")
            begun = call.begun_ns or now
            trace.time(f"{receive}_START", min(begun, now))
            trace.time(f"{receive}_END", now)
        trace.time("REQUEST_START", now)
        if trace.sampler.settings.tensors:
            trace.keep(QUEUE_INPUT, list(call.inputs.values()))
        model = None if trace.spans is None else trace.spans.model
        call.context = call.context._replace(trace=write_link(TraceLink(trace.number, model)))
        call.enter(self, submit)
        self._queued = isinstance(call.owner, Batcher)
        if self._queued:
            trace.time("QUEUE_START", call.arrived)

    # --- events of the call

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Record a response."""
        trace, timing = self._trace, response.timing
        trace.version = _number(response.model_version)
        if trace.sampler.settings.tensors:
            trace.keep(BACKEND_OUTPUT, response.outputs)
        self._begun = now = monotonic_ns()
        if final:
            started = call.arrived + timing.queue_ns if self._queued else 0
            gathered, computed = started + timing.gather_ns, started + timing.compute_ns
            self._computed(started, gathered, computed, now)
        trace.time("INFER_RESPONSE_COMPLETE", now)

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        """Record that a response has been sent."""
        trace, begun = self._trace, self._begun
        ended = monotonic_ns()
        if trace.door:
            trace.time(f"{trace.door}_SEND_START", begun)
            trace.time(f"{trace.door}_SEND_END", ended)
        if final:
            self._end(begun)
            spans = trace.spans if trace.kept and call.started else None
            if self._statistics is not None and spans is not None:
                self._statistics.request_traced(f"{spans.trace_id:032x}", begun - call.arrived)

    def ended(self, call: Call, error: ServerError | None) -> None:
        """Record the end of the call."""
        now = monotonic_ns()
        if error is not None:
            self._trace.error = str(error)
        elif call.started:
            self._computed(call.began, call.began, now, now)
        self._end(now)

    def cancelled(self, call: Call) -> None:
        """Record that the call's client has disconnected."""
        self._trace.error = str(Cancelled("the client went away"))
        self._end(monotonic_ns())

    def answered_by(self, backend: str) -> None:
        """Note the backend that answers."""
        self._trace.backend = backend

    def routed(self, target: Target) -> None:
        """Note the target that serves the call."""
        self._trace.version = _number(target.name)

    # --- end of the trace

    def _computed(self, started: int, gathered: int, computed: int, ended: int) -> None:
        """Record the times of the execution, if a scheduler had the call."""
        if self._queued:
            trace = self._trace
            trace.time("COMPUTE_START", started)
            trace.time("COMPUTE_INPUT_END", gathered)
            trace.time("COMPUTE_OUTPUT_START", computed)
            trace.time("COMPUTE_END", ended)

    def _end(self, now: int) -> None:
        if not self._ended:
            self._ended = True
            self._trace.time("REQUEST_END", now)
            self._tracing.end(self._trace)


def _context(call: Call) -> TraceContext | None:
    """The trace context sent by the client; None if there is none."""
    parent, state = CONTEXT_HEADERS
    found = call.header(parent)
    return read_traceparent(found, call.header(state)) if found else None


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else -1


class Tracing:
    """The current trace settings, and the unfinished traces."""

    def __init__(self, config: TraceConfig, sink: TraceSink | None = None) -> None:
        """Without a `sink` there are no traces."""
        self._config = config
        self.tail = config.tail
        self._table = SettingsTable(config)
        self._sink = sink
        self._numbers = itertools.count(1)
        self._live: dict[int, Trace] = {}
        self.changed: Callable[[], object] | None = None  # called when other models may be traced
        self.known: Callable[[str], bool] | None = None  # tells if a model exists

    # --- settings

    def document(self, model: str = "") -> dict[str, list[str]]:
        """The settings of a model, or of the server, under the protocol's names.

        Raises `InvalidRequest` for an unknown model.
        """
        self._check(model)
        settings = self._table.sampler(model).now()
        document = {
            "trace_level": settings.levels,
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(settings.count)],
        }
        if self._config.mode is TraceMode.TRITON:
            document["log_frequency"] = [str(settings.log_frequency)]
        document["trace_mode"] = [self._config.mode.value]
        return document | self._config.options

    def change(self, model: str, document: Mapping[str, Sequence[object] | None]) -> None:
        """Change settings of a model, or of the server for ""; an empty list, or None, unsets one.

        Raises `InvalidRequest`, and `Unsupported` for fixed settings.
        """
        self._check(model)
        changes = read_changes(document)
        if not changes:
            return
        for sampler in self._table.change(model, changes):
            self._end_retired(sampler)
        self._tell()

    @property
    def headers(self) -> dict[str, tuple[str, ...]]:
        """The headers, by model, that its requests need to be traced; "" stands for all others."""
        names = (*(CONTEXT_HEADERS if self.takes_contexts else ()), *self.tail.headers)
        if not names:
            return {}
        traced = {model: self._traces(self._table.sampler(model)) for model in self._table.models}
        return {model: names if found else () for model, found in traced.items()}

    def _check(self, model: str) -> None:
        if model and self.known is not None and not self.known(model):
            raise InvalidRequest(f"Request for unknown model : {model}")

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()

    # --- requests

    def traced(
        self, model: str, version: str, statistics: VersionStatistics, submit: Submit
    ) -> Submit:
        """The stage before `submit` of a version; `submit` itself unless the model is traced."""
        sampler = self._table.sampler(model)
        if not self._traces(sampler):
            return submit
        return trace_stage(self, sampler, version, statistics, submit)

    def _traces(self, sampler: Sampler) -> bool:
        settings = sampler.settings
        if self._sink is None or settings.off or self._config.problem(settings):
            return False
        return self._config.mode is TraceMode.OPENTELEMETRY or not sampler.spent

    @property
    def takes_contexts(self) -> bool:
        """True if clients' trace contexts are continued."""
        return self._config.mode is TraceMode.OPENTELEMETRY

    def begin(
        self,
        sampler: Sampler,
        request: Call,
        door: str,
        context: TraceContext | None,
        picked: bool = True,
    ) -> Trace:
        """Start the trace of a request; `context` is its client's.

        One that was not picked is recorded in case it is slow or fails. Other servers are told that
        it is not sampled: they would record all.
        """
        trace = self._trace(sampler, request, door, 0)
        trace.picked = picked
        if self.takes_contexts:
            root = new_context(context, picked)
            trace.spans = SpanIds(root.trace_id, root.span_id, child_span(root), context)
        elif sampler.spent:
            self._tell()
        return trace

    def submit_child(self, submit: Submit, call: Call) -> None:
        """Submit a model's call as part of its request's trace; raises `ServerError`.

        Without an unfinished trace, the call is submitted untraced.
        """
        parent = self._live.get(read_link(call.context.trace).number)
        if parent is None:
            submit(call)
            return
        trace = self._trace(parent.sampler, call, "", parent.number)
        trace.picked, trace.root = parent.picked, parent.root or parent.number
        if parent.spans is not None:
            above = parent.spans.model
            trace.spans = SpanIds(above.trace_id, 0, child_span(above), above)
        Traced(self, trace).submit(call, submit)

    def begin_call(self, link: str) -> TracedCall | None:
        """Start the span of a request's call to an upstream; None without a trace.

        `link` is the trace of its context.
        """
        number, context = read_link(link)
        trace = self._live.get(number)
        if trace is None or trace.spans is None:
            return None if context is None else TracedCall(context)
        calls = trace.calls

        def record(span: CallSpan) -> None:
            if number in self._live:  # otherwise the request has ended before the call
                calls.append(span)

        return TracedCall(child_span(trace.spans.model), record)

    def _trace(self, sampler: Sampler, request: Call, door: str, parent: int) -> Trace:
        sampler.open += 1
        number = next(self._numbers)
        offset = time_ns() - monotonic_ns()
        trace = Trace(number, parent, sampler, door, request.model_name, request.id, offset)
        self._live[number] = trace
        return trace

    def end(self, trace: Trace) -> None:
        """Finish a trace."""
        self._live.pop(trace.number, None)
        sampler = trace.sampler
        sampler.open -= 1
        if not (trace.picked or trace.root):
            moments = [ns for _, ns in trace.times]
            duration = max(moments) - min(moments)
            trace.kept = self.tail.keeps(duration, trace.error) and sampler.take()
            if trace.kept and sampler.spent and not self.takes_contexts:
                self._tell()
        trace.last = sampler.spent and not sampler.open
        if self._sink is not None:
            self._sink.put(trace)
        self._end_retired(sampler)

    def _end_retired(self, sampler: Sampler) -> None:
        """Pass a finished sampler to the writer."""
        if self._sink is not None and sampler.retired and not sampler.open:
            self._sink.put(sampler)

    def close(self, seconds: float) -> None:
        """Write everything, within `seconds`. Blocks; no request may be in flight."""
        if self._sink is not None:
            self._sink.close(seconds)
