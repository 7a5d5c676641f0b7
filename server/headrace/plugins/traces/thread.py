"""The thread that writes traces, so that requests never wait for a file or a collector.

Queued traces are bounded by number and by the bytes of their tensors; further ones are dropped, and
the log says how many. A writer receives everything queued at once and then rests for a moment, so
that many small traces cost few thread switches.
"""

import logging
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from headrace.engine.tracing import Item
from headrace.observability.traces import Trace

log = logging.getLogger(__name__)

_MOST = 20_000  # queued traces
_MOST_BYTES = 256 << 20  # bytes of their tensors
_REST_SECS = 0.1
_SAY_SECS = 30.0


class TraceWriter(Protocol):
    """A destination of traces. All methods are called on the one thread."""

    def write(self, items: Sequence[Item]) -> None:
        """Write traces; must not raise."""

    def close(self) -> None:
        """Write everything buffered, at the end; must not raise."""


class TraceThread:
    """A `TraceSink` that passes traces to a writer on a thread."""

    def __init__(self, writer: TraceWriter, most: int = _MOST) -> None:
        self._writer = writer
        self._most = most
        self._change = threading.Condition()
        self._closed = threading.Event()
        self._items: list[Item] = []
        self._nbytes = 0
        self._dropped = 0
        self._said = -_SAY_SECS
        self._thread: threading.Thread | None = None

    def put(self, item: Item) -> None:
        """Queue an item."""
        nbytes = item.nbytes if isinstance(item, Trace) else 0
        with self._change:
            full = len(self._items) >= self._most or self._nbytes + nbytes > _MOST_BYTES
            if full and isinstance(item, Trace):
                self._dropped += 1
                return
            self._items.append(item)
            self._nbytes += nbytes
            self._change.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Write everything queued, within `seconds`."""
        self._closed.set()
        with self._change:
            self._change.notify()
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                log.warning("the last traces could not be written within %g s", seconds)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._items or self._closed.is_set())
                items, self._items = self._items, []
                dropped, self._nbytes = self._dropped, 0
            if items:
                self._write(items)
            elif self._closed.is_set():
                self._writer.close()
                return
            if dropped and monotonic() - self._said > _SAY_SECS:
                self._said = monotonic()
                log.warning("%d traces so far were dropped: more came than could be written",
                            dropped)  # fmt: skip
            self._closed.wait(_REST_SECS)

    def _write(self, items: Sequence[Item]) -> None:
        try:
            self._writer.write(items)
        except Exception:  # the thread must survive
            log.exception("bug while writing traces")
