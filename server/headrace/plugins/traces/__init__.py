"""Destinations of traces: `files` is Triton's trace file, `spans` are spans of OpenTelemetry."""

from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import TraceWriter
from headrace.observability.trace_settings import TraceConfig


def trace_files(config: TraceConfig) -> TraceWriter | None:
    """The writer of a trace file, None without a path."""
    from headrace.plugins.traces.files import TraceFiles

    return TraceFiles(Path(config.file)) if config.file else None


def span_writer(config: TraceConfig) -> TraceWriter:
    """The writer of spans; raises `LoadFailed` if a dependency is missing."""
    try:
        from headrace.plugins.traces.spans import SpanWriter
    except ImportError as error:
        raise LoadFailed(
            f"--trace-config mode=opentelemetry needs OpenTelemetry's SDK ({error.name} is not"
            " installed): pip install 'headrace[otel]'"
        ) from None
    return SpanWriter(config)
