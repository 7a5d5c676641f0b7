"""The stage that traces calls, and the sink and ticket of a traced one.

Names and order of the times are Triton's: the exchange with the client (HTTP_RECV, GRPC_WAITREAD,
..._SEND) around the request, its queue, and the computation of its batch.
"""

from time import monotonic_ns
from typing import TYPE_CHECKING

from headrace.core.errors import Cancelled, ServerError
from headrace.core.parameter_names import HEADER_PARAMETER
from headrace.core.requests import Call, InferResponse, Sink, StageSink, Ticket
from headrace.core.trace_context import (
    TRACE_PARAMETER,
    TraceContext,
    TraceLink,
    read_traceparent,
    write_link,
)
from headrace.engine.doors import CONTEXT_HEADERS, Submit, Target
from headrace.observability.trace_settings import Sampler
from headrace.observability.traces import BACKEND_OUTPUT, QUEUE_INPUT, Trace
from headrace.scheduling.batcher import Batcher

if TYPE_CHECKING:
    from headrace.engine.tracing import Tracing

_RECEIVE = {"HTTP": "HTTP_RECV", "GRPC": "GRPC_WAITREAD"}


def trace_stage(tracing: "Tracing", sampler: Sampler, version: str, submit: Submit) -> Submit:
    """The stage that traces some of the calls that clients make, before `submit` of a version."""
    contexts = tracing.takes_contexts

    def stage(request: Call, sink: Sink) -> Ticket:
        if not sink.door:  # a copy, or a part of what a model does
            return submit(request, sink)
        context = _context(request, sink) if contexts else None
        if context is None:
            if not sampler.pick():
                return submit(request, sink)
        elif not context.sampled:  # its client has decided; models may still tell others
            request.parameters[TRACE_PARAMETER] = write_link(TraceLink(0, context))
            return submit(request, sink)
        begun = tracing.begin(sampler, request, sink.door, context)
        return TracedRequest(tracing, begun, sink, version).submit(submit, request)

    return stage


class TracedRequest(StageSink):
    """A request while it is traced: its sink and its ticket.

    It ends once the responses have, and when it was computed is known, which a batch tells just
    after its responses.
    """

    __slots__ = (
        "_batcher",
        "_call",
        "_computed",
        "_ended",
        "_sink",
        "_ticket",
        "_trace",
        "_tracing",
    )

    def __init__(self, tracing: "Tracing", trace: Trace, sink: Sink, version: str = "") -> None:
        """`version` is what runs it, as far as that is known."""
        super().__init__(sink)
        trace.version = _number(version)
        self._tracing = tracing
        self._trace = trace
        self._ticket: Ticket | None = None
        self._call: Call | None = None
        self._batcher: Batcher | None = None
        self._computed = False
        self._ended = False

    def submit(self, submit: Submit, request: Call) -> Ticket:
        """`submit` the request; raises `ServerError`."""
        trace, sink = self._trace, self._sink
        now = monotonic_ns()
        if trace.door:
            receive = _RECEIVE[trace.door]
            begun = sink.begun_ns or now
            trace.time(f"{receive}_START", min(begun, now))
            trace.time(f"{receive}_END", now)
        trace.time("REQUEST_START", now)
        if trace.sampler.settings.tensors:
            trace.keep(QUEUE_INPUT, list(request.inputs.values()))
        model = None if trace.spans is None else trace.spans.model
        request.parameters[TRACE_PARAMETER] = write_link(TraceLink(trace.number, model))
        try:
            ticket = submit(request, self)
        except BaseException as error:
            trace.error = str(error) if isinstance(error, ServerError) else "internal error"
            self._end(monotonic_ns())
            raise
        self._ticket = ticket
        call = getattr(ticket, "call", ticket)
        if isinstance(call, Call) and isinstance(call.owner, Batcher):
            self._call = call
            trace.time("QUEUE_START", call.arrived)
            self._batcher = call.owner
            call.owner.watch(call, self._on_computed)
        return self

    # --- the sink

    def respond(self, response: InferResponse, final: bool) -> None:
        """Take a response."""
        trace = self._trace
        trace.version = _number(response.model_version)
        if trace.sampler.settings.tensors:
            trace.keep(BACKEND_OUTPUT, response.outputs)
        begun = monotonic_ns()
        trace.time("INFER_RESPONSE_COMPLETE", begun)
        self._sink.respond(response, final)
        ended = monotonic_ns()
        if trace.door:
            trace.time(f"{trace.door}_SEND_START", begun)
            trace.time(f"{trace.door}_SEND_END", ended)
        if final:
            trace.time("REQUEST_END", begun)
            self._complete()

    def answered_by(self, backend: str) -> None:
        """Take which backend answers."""
        self._trace.backend = backend
        self._sink.answered_by(backend)

    def finish(self) -> None:
        """Take the end without a further response."""
        self._trace.time("REQUEST_END", monotonic_ns())
        self._sink.finish()
        self._complete()

    def fail(self, error: ServerError) -> None:
        """Take the error that ends the request."""
        self._trace.error = str(error)
        now = monotonic_ns()
        self._sink.fail(error)
        self._end(now)

    def refuse(self, error: ServerError) -> None:
        """Take an error that kept the request from being queued."""
        self._trace.error = str(error)
        now = monotonic_ns()
        self._sink.refuse(error)
        self._end(now)

    def routed(self, request: Call, target: Target) -> None:
        """Take what serves the request, now that it is decided."""
        self._trace.version = _number(target.name)
        self._sink.routed(request, target)

    # --- the ticket

    def cancel(self) -> None:
        """Drop the request."""
        if self._ticket is not None:
            self._ticket.cancel()
        if not self._ended:
            self._trace.error = str(Cancelled("the client went away"))
            self._end(monotonic_ns())

    def hold(self, held: bool) -> None:
        """Have the model pause, or go on."""
        if self._ticket is not None:
            self._ticket.hold(held)

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


def _context(request: Call, sink: Sink) -> TraceContext | None:
    """What the request's client says of its own trace."""
    parent, state = CONTEXT_HEADERS
    text = request.parameters.pop(HEADER_PARAMETER + parent, None)
    if text is not None:  # from a front end
        return read_traceparent(
            str(text), str(request.parameters.pop(HEADER_PARAMETER + state, ""))
        )
    found = sink.header(parent)
    return read_traceparent(found, sink.header(state)) if found else None


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else -1
