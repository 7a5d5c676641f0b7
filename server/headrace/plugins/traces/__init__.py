"""Destinations of traces: `files` is Triton's trace file, `spans` are spans of OpenTelemetry.

Both are written by a `thread`; `tail` drops what was recorded in vain.
"""

from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import TraceSink
from headrace.observability.trace_settings import TraceConfig, TraceMode
from headrace.plugins.traces.tail import TailSink
from headrace.plugins.traces.thread import TraceThread, TraceWriter


def trace_sink(config: TraceConfig) -> TraceSink:
    """A thread with the writer of the mode: that of a file, or of spans.

    Raises `LoadFailed` if a dependency of spans is missing.
    """
    sink = TraceThread(_writer(config))
    return TailSink(sink) if config.tail.records else sink


def _writer(config: TraceConfig) -> TraceWriter:
    if config.mode is TraceMode.TRITON:
        from headrace.plugins.traces.files import TraceFiles

        return TraceFiles(Path(config.file))
    try:
        from headrace.plugins.traces.spans import SpanWriter
    except ImportError as error:
        raise LoadFailed(
            f"--trace-config mode=opentelemetry needs OpenTelemetry's SDK ({error.name} is not"
            " installed): pip install 'headrace[otel]'"
        ) from None
    return SpanWriter(config)
