"""Composition of tracing: where traces go, by the settings."""

import logging
from pathlib import Path

from headrace.core.errors import LoadFailed
from headrace.engine.trace_files import TraceFiles
from headrace.engine.trace_thread import TraceThread
from headrace.engine.tracing import Tracing
from headrace.observability.trace_settings import Mode, TraceConfig

log = logging.getLogger(__name__)


def make_tracing(config: TraceConfig) -> Tracing:
    """Tracing as configured; raises `LoadFailed` if what it needs is not installed."""
    if config.mode is Mode.OPENTELEMETRY:
        try:
            from headrace.engine.span_writer import SpanWriter
        except ImportError as error:
            raise LoadFailed(
                f"--trace-config mode=opentelemetry needs OpenTelemetry's SDK ({error.name} is not"
                " installed): pip install 'headrace[otel]'"
            ) from None
        return Tracing(config, TraceThread(SpanWriter(config)))
    if not config.file:
        if not config.settings.off:
            log.warning("nothing is traced: --trace-config triton,file=PATH says where to")
        return Tracing(config)
    return Tracing(config, TraceThread(TraceFiles(Path(config.file))))
