"""Writes log lines without holding up whoever logs them.

A pipe or terminal takes nothing while its reader stands still, nor does a file of a network that is
gone. So a thread of its own writes: lines wait in a queue of bounded size, beyond which they are
dropped and counted. What an error keeps from being written, as on a full disk, is dropped and
counted likewise. When lines can be written again, one says how many are missing.

`put` and `flush` may be called from any thread.
"""

import os
import select
import threading
from collections.abc import Callable, Iterator
from time import monotonic

_MOST_BYTES = 4 << 20  # of lines that wait
_EACH = 64  # bytes that a line takes in the queue beside its own
_FLUSH_SECS = 2.0  # that a flush waits for a reader
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes in one piece, other writers or not


class LogWriter:
    """What is written to one open file."""

    def __init__(
        self, descriptor: int, note: Callable[[int], bytes], failed: Callable[[OSError], object]
    ) -> None:
        """`note` makes the line that says how many are missing; `failed` is called for the first
        of the errors in a row.
        """
        self.dropped = 0  # lines, since the start
        self._descriptor = descriptor
        self._note = note
        self._failed = failed
        self._changed = threading.Condition()  # the queue belongs to whoever holds it
        self._queue: list[bytes | int] = []  # lines, and where some are missing, how many
        self._waiting = 0  # bytes, of lines in the queue and of those that are being written
        self._thread: threading.Thread | None = None
        # Of whoever writes:
        self._missing = 0  # lines that no note has told of
        self._failing = False

    def put(self, line: bytes) -> None:
        """Write a line, with its end, soon, or drop it."""
        with self._changed:
            size = len(line) + _EACH
            if self._waiting and self._waiting + size > _MOST_BYTES:
                self.dropped += 1
                if self._queue and isinstance(self._queue[-1], int):
                    self._queue[-1] += 1
                else:
                    self._queue.append(1)
                return
            self._waiting += size
            self._queue.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but for a reader not long."""
        deadline = monotonic() + _FLUSH_SECS
        with self._changed:
            while (self._waiting or self._queue) and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                queue, self._queue = self._queue, []
            for portion in _portions(queue):
                if isinstance(portion, int):
                    self._missing += portion
                    self._write([])
                else:
                    self._write(portion)
            with self._changed:
                self._waiting -= sum(len(e) + _EACH for e in queue if isinstance(e, bytes))
                self._changed.notify_all()

    def _write(self, lines: list[bytes]) -> None:
        """Write some lines, and before them the note on those that are missing."""
        try:
            if self._missing:
                self._send(self._note(self._missing))
                self._missing = 0
            self._send(b"".join(lines))
        except OSError as error:
            self._missing += len(lines)
            with self._changed:
                self.dropped += len(lines)
            if not self._failing:
                self._failing = True
                self._failed(error)
        else:
            self._failing = False

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody who has it open as well has made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


def _portions(queue: list[bytes | int]) -> Iterator[list[bytes] | int]:
    """Lines that fit into one write together, and in between the numbers of missing ones."""
    lines: list[bytes] = []
    size = 0
    for entry in queue:
        if lines and (isinstance(entry, int) or size + len(entry) > _AT_ONCE):
            yield lines
            lines, size = [], 0
        if isinstance(entry, int):
            yield entry
        else:
            lines.append(entry)
            size += len(entry)
    if lines:
        yield lines
