"""What a worker prints and logs, on its way to the server's log: in small portions, and bounded."""

import logging
import os
from time import monotonic

from headrace.execution.worker_spec import WorkerSpec

_printed = logging.getLogger("headrace.model")
_LINE = 16 << 10  # bytes of output after which a line is cut
_TEXT = 96 << 10  # characters of lines that belong together
_OUTPUT = 16 << 10  # bytes of output that are read at once
_MOST_LINES, _WINDOW_SECS = 2000, 1.0  # of one worker, in so much time


class WorkerOutput:
    """The reading end of a worker's standard output and error."""

    def __init__(self, descriptor: int, spec: WorkerSpec, pid: int) -> None:
        """`descriptor` must not block; it is for its owner to close."""
        self.descriptor = descriptor
        self.ended = False  # nothing more will come
        self.fields: dict[str, object] = {
            "model": spec.model, "version": spec.version, "worker": pid
        }  # fmt: skip
        self._model = spec.model
        self._pid = pid
        self._text = b""
        self._lines = self._dropped = 0  # within `_WINDOW_SECS`
        self._window = 0.0

    def read(self) -> bool:
        """Put some of what it has printed into the log; whether there may be more."""
        try:
            data = os.read(self.descriptor, _OUTPUT)
        except BlockingIOError:
            return False
        if not data:
            self.ended = True
            if self._text:
                self._print(self._text)
                self._text = b""
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._print(line)
        if len(self._text) > _LINE:
            self._print(self._text)
            self._text = b""
        return True

    def _print(self, line: bytes) -> None:
        self.note(logging.INFO, line.decode(errors="replace").rstrip())

    def note(self, level: int, text: str, fields: dict[str, object] | None = None) -> None:
        """A line in the log, and others below it, unless there are too many."""
        now = monotonic()
        if now - self._window >= _WINDOW_SECS:
            if self._dropped:
                _printed.warning("%d lines were left out", self._dropped, extra=self.fields)
            self._window = now
            self._lines = self._dropped = 0
        self._lines += 1
        if self._lines > _MOST_LINES:
            self._dropped += 1
        else:
            head, _, rest = text[:_TEXT].partition("\n")
            trace = {"trace": rest} if rest else {}
            _printed.log(
                level, "%s worker %d: %s", self._model, self._pid, head[:_LINE],
                extra=self.fields | trace | (fields or {}),
            )  # fmt: skip
