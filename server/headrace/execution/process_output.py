"""What a process prints and logs, on its way to the server's log: in small portions, bounded."""

import logging
import os
from collections.abc import Mapping
from time import monotonic

_printed = logging.getLogger("headrace.model")
_LINE = 16 << 10  # bytes of output after which a line is cut
_TEXT = 96 << 10  # characters of lines that belong together
_OUTPUT = 16 << 10  # bytes of output that are read at once
# Of one process, in so much time. A line takes its bytes in this server's log, too.
_MOST_LINES, _MOST_BYTES, _WINDOW_SECS = 2000, 1 << 20, 1.0


class ProcessOutput:
    """The reading end of a process's standard output and error."""

    def __init__(self, descriptor: int, name: str, fields: Mapping[str, object]) -> None:
        """`descriptor` must not block; it is for its owner to close.

        Lines in the log begin with `name` and have the `fields`.
        """
        self.descriptor = descriptor
        self.ended = False  # nothing more will come
        self.fields = dict(fields)
        self._name = name
        self._text = b""
        self._lines = self._bytes = self._dropped = 0  # within `_WINDOW_SECS`
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
                self.line(self._text)
                self._text = b""
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self.line(line)
        if len(self._text) > _LINE:
            self.line(self._text)
            self._text = b""
        return True

    def line(self, line: bytes) -> None:
        """Put a line that the process has printed into the log."""
        self.note(logging.INFO, line.decode(errors="replace").rstrip())

    def note(self, level: int, text: str, fields: dict[str, object] | None = None) -> None:
        """A line in the log, and others below it, unless there are too many."""
        now = monotonic()
        if now - self._window >= _WINDOW_SECS:
            if self._dropped:
                _printed.warning("%d lines were left out", self._dropped, extra=self.fields)
            self._window = now
            self._lines = self._bytes = self._dropped = 0
        if self._lines == _MOST_LINES or self._bytes >= _MOST_BYTES:
            self._dropped += 1
        else:
            self._lines += 1
            self._bytes += min(len(text), _TEXT)
            head, _, rest = text[:_TEXT].partition("\n")
            trace = {"trace": rest} if rest else {}
            _printed.log(
                level, "%s: %s", self._name, head[:_LINE],
                extra=self.fields | trace | (fields or {}),
            )  # fmt: skip
