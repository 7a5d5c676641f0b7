"""Traces as OpenTelemetry spans, for a collector. Importing this requires the extra `otel`.

As with Triton, a request is three spans: `Call`, the exchange with the client; the model's, named
like it; and `compute`. A model's own call is the latter two, within that model's. Spans are made
from finished traces, on the traces' thread, and exported by the SDK on its own.
"""

import os
from collections.abc import Mapping, Sequence
from operator import itemgetter

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from headrace import __version__
from headrace.core.texts import encodable
from headrace.engine.tracing import Item
from headrace.observability.trace_settings import TraceConfig
from headrace.observability.traces import CallSpan, SpanIds, Trace, TraceContext, child_span

_SERVICE = "service.name"
_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_LEAST_DELAY_MS = 10  # between two exports
_Time = tuple[str, int]  # name, nanoseconds since the epoch


class SpanWriter:
    """An `ItemWriter` that exports spans over OTLP/HTTP."""

    def __init__(self, config: TraceConfig) -> None:
        self._resource = Resource.create(_attributes(config))
        self._scope = InstrumentationScope("headrace", __version__)
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=config.url),
            max_queue_size=config.max_queue_size,
            schedule_delay_millis=max(config.schedule_delay_ms, _LEAST_DELAY_MS),
            max_export_batch_size=config.max_export_batch_size,
        )

    def write(self, items: Sequence[Item]) -> None:
        """Implements `ItemWriter.write`."""
        for item in items:
            if isinstance(item, Trace):
                for span in self._spans(item):
                    self._processor.on_end(span)

    def close(self) -> None:
        """Implements `ItemWriter.close`."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, trace: Trace) -> list[ReadableSpan]:
        """The spans of a trace, innermost first."""
        ids = trace.spans
        if ids is None:
            return []
        times = sorted(((name, ns + trace.offset) for name, ns in trace.times), key=itemgetter(1))
        compute = [time for time in times if time[0] in _COMPUTE]
        model = [time for time in times if time[0] in _MODEL]
        exchange = [time for time in times if time[0] not in (*_COMPUTE, *_MODEL)]
        spans: list[ReadableSpan] = []
        if compute:
            spans.append(self._span("compute", child_span(ids.model), ids.model, compute))
        spans += [self._call_span(call, ids.model, trace.offset) for call in trace.calls]
        if not ids.root:
            spans.append(self._model_span(trace, ids, ids.parent, [*model, *exchange]))
            return spans
        root = TraceContext(ids.trace_id, ids.root, ids.model.flags, ids.model.state)
        spans.append(self._model_span(trace, ids, root, model))
        span = self._span("InferRequest", root, ids.parent, exchange, trace.error, times)
        return [*spans, span]

    def _call_span(self, call: CallSpan, parent: TraceContext, offset: int) -> ReadableSpan:
        return ReadableSpan(
            "call",
            _span_context(call.context, False),
            _span_context(parent, False),
            self._resource,
            {"headrace.endpoint": call.endpoint},
            kind=SpanKind.CLIENT,
            status=_status(call.error),
            start_time=call.begun + offset,
            end_time=call.ended + offset,
            instrumentation_scope=self._scope,
        )

    def _model_span(
        self, trace: Trace, ids: SpanIds, parent: TraceContext | None, events: Sequence[_Time]
    ) -> ReadableSpan:
        attributes: dict[str, str | int] = {
            "triton.model_name": trace.model,
            "triton.model_version": trace.version,
            "triton.trace_id": trace.number,
            "triton.trace_parent_id": trace.parent,
        }
        if trace.request_id:
            attributes["triton.request_id"] = encodable(trace.request_id)
        if trace.backend:
            attributes["headrace.backend"] = trace.backend
        return self._span(
            trace.model, ids.model, parent, events, trace.error, attributes=attributes
        )

    def _span(
        self,
        name: str,
        own: TraceContext,
        parent: TraceContext | None,
        events: Sequence[_Time],
        error: str = "",
        within: Sequence[_Time] = (),
        attributes: Mapping[str, str | int] | None = None,
    ) -> ReadableSpan:
        """A span from the first of its events to the last, or with the times of `within`."""
        moments = [ns for _, ns in within or events]
        return ReadableSpan(
            name,
            _span_context(own, False),
            None if parent is None else _span_context(parent, bool(within)),
            self._resource,
            attributes,
            [Event(event, timestamp=ns) for event, ns in events],
            kind=SpanKind.SERVER if within else SpanKind.INTERNAL,
            status=_status(error),
            start_time=min(moments),
            end_time=max(moments),
            instrumentation_scope=self._scope,
        )


def _status(error: str) -> Status:
    return Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET)


def _span_context(context: TraceContext, remote: bool) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(
        # What is exported was sampled, if only at its end.
        context.trace_id,
        context.span_id,
        remote,
        TraceFlags(TraceFlags.SAMPLED),
        state,
    )


def _attributes(config: TraceConfig) -> dict[str, str]:
    """The server's attributes in spans; OpenTelemetry's variables may add more."""
    given = dict(config.resource or {})
    named = os.environ.get("OTEL_SERVICE_NAME") or f"{_SERVICE}=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return given if named or _SERVICE in given else {_SERVICE: "headrace", **given}
