"""The stage that traces calls, and what watches a traced one.

Names and order of the times are Triton's: the exchange with the client (HTTP_RECV, GRPC_WAITREAD,
..._SEND) around the request, its queue, and the computation of its batch.
"""

from time import monotonic_ns
from typing import TYPE_CHECKING

from headrace.core.call import HEADER_PARAMETER, Call, Done, InferResponse, Stage, Submit
from headrace.core.errors import Cancelled, ServerError
from headrace.core.trace_context import (
    TRACE_PARAMETER,
    TraceContext,
    TraceLink,
    read_traceparent,
    write_link,
)
from headrace.engine.doors import CONTEXT_HEADERS, Target
from headrace.observability.trace_settings import Sampler
from headrace.observability.traces import BACKEND_OUTPUT, QUEUE_INPUT, Trace
from headrace.scheduling.batcher import Batcher

if TYPE_CHECKING:
    from headrace.engine.tracing import Tracing

_RECEIVE = {"HTTP": "HTTP_RECV", "GRPC": "GRPC_WAITREAD"}


def trace_stage(tracing: "Tracing", sampler: Sampler, version: str, submit: Submit) -> Submit:
    """The stage that traces some of the calls that clients make, before `submit` of a version."""
    contexts = tracing.takes_contexts

    def stage(call: Call) -> None:
        if not call.door:  # a copy, or a part of what a model does
            submit(call)
            return
        context = _context(call) if contexts else None
        if context is None:
            if not sampler.pick():
                submit(call)
                return
        elif not context.sampled:  # its client has decided; models may still tell others
            call.parameters[TRACE_PARAMETER] = write_link(TraceLink(0, context))
            submit(call)
            return
        trace = tracing.begin(sampler, call, call.door, context)
        Traced(tracing, trace, version).submit(call, submit)

    return stage


class Traced(Stage):
    """A call while it is traced.

    Its trace ends once the responses have, and when it was computed is known, which a batch tells
    just after its responses.
    """

    __slots__ = ("_batcher", "_begun", "_call", "_computed", "_ended", "_trace", "_tracing")

    def __init__(self, tracing: "Tracing", trace: Trace, version: str = "") -> None:
        """`version` is what runs it, as far as that is known."""
        trace.version = _number(version)
        self._tracing = tracing
        self._trace = trace
        self._call: Call | None = None
        self._batcher: Batcher | None = None
        self._begun = 0  # when the response began to be passed on that is
        self._computed = False
        self._ended = False

    def submit(self, call: Call, submit: Submit) -> None:
        """`submit` the call; raises `ServerError`."""
        trace = self._trace
        now = monotonic_ns()
        if trace.door:
            receive = _RECEIVE[trace.door]
            begun = call.begun_ns or now
            trace.time(f"{receive}_START", min(begun, now))
            trace.time(f"{receive}_END", now)
        trace.time("REQUEST_START", now)
        if trace.sampler.settings.tensors:
            trace.keep(QUEUE_INPUT, list(call.inputs.values()))
        model = None if trace.spans is None else trace.spans.model
        call.parameters[TRACE_PARAMETER] = write_link(TraceLink(trace.number, model))
        call.enter(self, submit)
        if isinstance(call.owner, Batcher):
            self._call = call
            trace.time("QUEUE_START", call.arrived)
            self._batcher = call.owner
            call.owner.watch(call, self._on_computed)

    # --- what comes for it

    def transform(self, call: Call, response: InferResponse, final: bool, done: Done) -> None:
        """Take a response."""
        trace = self._trace
        trace.version = _number(response.model_version)
        if trace.sampler.settings.tensors:
            trace.keep(BACKEND_OUTPUT, response.outputs)
        self._begun = monotonic_ns()
        trace.time("INFER_RESPONSE_COMPLETE", self._begun)

    def passed(self, call: Call, response: InferResponse, final: bool) -> None:
        """A response has been sent."""
        trace, begun = self._trace, self._begun
        ended = monotonic_ns()
        if trace.door:
            trace.time(f"{trace.door}_SEND_START", begun)
            trace.time(f"{trace.door}_SEND_END", ended)
        if final:
            trace.time("REQUEST_END", begun)
            self._complete()

    def ended(self, call: Call, error: ServerError | None) -> None:
        """The call has ended without a further response."""
        if error is None:
            self._trace.time("REQUEST_END", monotonic_ns())
            self._complete()
        else:
            self._trace.error = str(error)
            self._end(monotonic_ns())

    def cancelled(self, call: Call) -> None:
        """Its client has gone."""
        self._trace.error = str(Cancelled("the client went away"))
        self._end(monotonic_ns())

    def answered_by(self, backend: str) -> None:
        """Take which backend answers."""
        self._trace.backend = backend

    def routed(self, target: Target) -> None:
        """Take what serves the call, now that it is decided."""
        self._trace.version = _number(target.name)

    # --- its end

    def _on_computed(self, started: int, gathered: int, computed: int, ended: int) -> None:
        """The scheduler tells when it was computed."""
        if self._computed:
            return
        trace = self._trace
        trace.time("COMPUTE_START", started)
        trace.time("COMPUTE_INPUT_END", gathered)
        trace.time("COMPUTE_OUTPUT_START", computed)
        trace.time("COMPUTE_END", ended)
        self._computed = True
        if self._ended:
            self._hand_on()

    def _complete(self) -> None:
        """All responses have been passed on."""
        self._ended = True
        if self._computed or self._call is None:
            self._hand_on()

    def _end(self, now: int) -> None:
        """It has ended otherwise than with its last response."""
        if not self._ended:
            self._trace.time("REQUEST_END", now)
            self._ended = True
            self._hand_on()

    def _hand_on(self) -> None:
        if self._call is not None and self._batcher is not None:
            self._batcher.unwatch(self._call, self._on_computed)
            self._call = None
        self._tracing.end(self._trace)


def _context(call: Call) -> TraceContext | None:
    """What the call's client says of its own trace."""
    parent, state = CONTEXT_HEADERS
    text = call.parameters.pop(HEADER_PARAMETER + parent, None)
    if text is not None:  # from a front end
        return read_traceparent(str(text), str(call.parameters.pop(HEADER_PARAMETER + state, "")))
    found = call.header(parent)
    return read_traceparent(found, call.header(state)) if found else None


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else -1
