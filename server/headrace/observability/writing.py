"""A thread that writes items, so that the event loop does not.

Requests never wait for a file or a collector. Queued items are bounded by number and by bytes;
further ones are dropped, and the log says how many. A writer receives everything queued at once and
then rests for a moment, so that many small items cost few thread switches.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

_MOST = 20_000  # queued items
_MOST_BYTES = 256 << 20
_REST_SECS = 0.1
_IDLE_SECS = 1.0
_SAY_SECS = 30.0

T = TypeVar("T")
W = TypeVar("W", contravariant=True)


class ItemWriter(Protocol[W]):
    """A destination of items. All methods are called on the one thread."""

    def write(self, items: Sequence[W]) -> None:
        """Write items, or what is kept for later if there are none; must not raise."""

    def close(self) -> None:
        """Write everything buffered, at the end; must not raise."""


class WritingThread(Generic[T]):
    """Passes items to a writer on a thread, which starts with the first; `put` never blocks."""

    def __init__(
        self,
        writer: ItemWriter[T],
        nouns: str,
        size: Callable[[T], int | None],
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """`nouns` name the items in the log. `size` is an item's bytes, None: it is not dropped."""
        self.dropped = 0
        self._writer = writer
        self._nouns = nouns
        self._size = size
        self._most, self._most_bytes = most, most_bytes
        self._change = threading.Condition()
        self._closed = threading.Event()
        self._items: list[T] = []
        self._nbytes = 0
        self._said = -_SAY_SECS
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> None:
        """Queue an item, or drop it."""
        size = self._size(item)
        with self._change:
            full = len(self._items) >= self._most or self._nbytes + (size or 0) > self._most_bytes
            if full and size is not None:
                self.dropped += 1
                return
            self._items.append(item)
            self._nbytes += size or 0
            self._change.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._nouns, daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Write everything queued, within `seconds`; blocks."""
        self._closed.set()
        with self._change:
            self._change.notify()
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                log.warning("the last %s could not be written within %g s", self._nouns, seconds)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._items or self._closed.is_set(), _IDLE_SECS)
                items, self._items = self._items, []
                dropped, self._nbytes = self.dropped, 0
            if items or not self._closed.is_set():
                self._write(items)
            else:
                self._writer.close()
                return
            if dropped and monotonic() - self._said > _SAY_SECS:
                self._said = monotonic()
                log.warning("%d %s so far were dropped: more came than could be written",
                            dropped, self._nouns)  # fmt: skip
            if items:
                self._closed.wait(_REST_SECS)

    def _write(self, items: Sequence[T]) -> None:
        try:
            self._writer.write(items)
        except Exception:  # the thread must survive
            log.exception("bug while writing %s", self._nouns)
