"""The capture of payloads, put together."""

from headrace.core.errors import LoadFailed
from headrace.observability.capture import Capture, CaptureOptions
from headrace.observability.writing import WritingThread
from headrace.plugins.capture.files import JsonLines, ParquetParts, RecordWriter
from headrace.plugins.capture.records import CapturedCall
from headrace.plugins.capture.stage import PayloadCapture

PARQUET = ".parquet"
_MOST_BYTES = 64 << 20  # of queued calls


def open_capture(options: CaptureOptions) -> Capture:
    """The capture with these options; raises `OSError` if its file cannot be opened, and
    `LoadFailed` if a dependency is missing.
    """
    writer: RecordWriter
    if options.file.endswith(PARQUET):
        try:
            import pyarrow.parquet as _  # noqa: F401, 100 ms, and 40 MB
        except ImportError:
            raise LoadFailed(
                "--capture to Parquet needs pyarrow: pip install 'headrace[tables]'"
            ) from None
        writer = ParquetParts(options.file, options.max_bytes, options.files)
    else:
        writer = JsonLines(options.file, options.max_bytes, options.files)
    thread = WritingThread(writer, "captured payloads", CapturedCall.size, most_bytes=_MOST_BYTES)
    return PayloadCapture(options, thread, writer)
