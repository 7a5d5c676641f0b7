"""Destinations of traces: `files` is Triton's trace file, `spans` are spans of OpenTelemetry.

Both are written by a `thread`.
"""

from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import TraceSink
from headrace.observability.trace_settings import TraceConfig, TraceMode
from headrace.plugins.traces.thread import TraceThread


def trace_sink(config: TraceConfig) -> TraceSink:
    """A thread with the writer of the mode: that of a file, or of spans.

    Raises `LoadFailed` if a dependency of spans is missing.
    """
    if config.mode is TraceMode.TRITON:
        from headrace.plugins.traces.files import TraceFiles

        return TraceThread(TraceFiles(Path(config.file)))
    try:
        from headrace.plugins.traces.spans import SpanWriter
    except ImportError as error:
        raise LoadFailed(
            f"--trace-config mode=opentelemetry needs OpenTelemetry's SDK ({error.name} is not"
            " installed): pip install 'headrace[otel]'"
        ) from None
    return TraceThread(SpanWriter(config))
