"""Destinations of traces: `files` is Triton's trace file, `spans` are spans of OpenTelemetry.

Both are written on a thread; `tail` drops what was recorded in vain.
"""

from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import Item, TraceSink
from headrace.observability.trace_settings import TraceConfig, TraceMode
from headrace.observability.traces import Trace
from headrace.observability.writing import ItemWriter, WritingThread
from headrace.plugins.traces.tail import TailSink


def trace_sink(config: TraceConfig) -> TraceSink:
    """A thread with the writer of the mode: that of a file, or of spans.

    Raises `LoadFailed` if a dependency of spans is missing.
    """
    sink = WritingThread(_writer(config), "traces", _size)
    return TailSink(sink) if config.tail.records else sink


def _size(item: Item) -> int | None:
    """Bytes of a trace's tensors and timestamps, of which a stream has thousands; the end of a
    sampler is never dropped.
    """
    return item.nbytes + 100 * len(item.times) if isinstance(item, Trace) else None


def _writer(config: TraceConfig) -> ItemWriter[Item]:
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
