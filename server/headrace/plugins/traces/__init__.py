"""Destinations of traces: `files` is Triton's trace file, `spans` are spans of OpenTelemetry."""

from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import TraceWriter
from headrace.observability.trace_settings import Mode, TraceConfig


def trace_writer(config: TraceConfig) -> TraceWriter | None:
    """The writer of the mode: a file's, None without a path, or that of spans.

    Raises `LoadFailed` if a dependency of spans is missing.
    """
    if config.mode is Mode.TRITON:
        from headrace.plugins.traces.files import TraceFiles

        return TraceFiles(Path(config.file)) if config.file else None
    try:
        from headrace.plugins.traces.spans import SpanWriter
    except ImportError as error:
        raise LoadFailed(
            f"--trace-config mode=opentelemetry needs OpenTelemetry's SDK ({error.name} is not"
            " installed): pip install 'headrace[otel]'"
        ) from None
    return SpanWriter(config)
