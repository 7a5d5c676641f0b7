"""The log: text lines or one JSON object per line, and the thread that writes them.

Names, paths and request ids in lines are text from clients. Unprintable characters, above all line
breaks and terminal escape sequences, are escaped, so that no client can forge or overwrite lines.

Logging never blocks the caller. A pipe or terminal blocks while its reader does not read, and so
does a file on an unreachable network. So a thread writes: lines wait in a queue of bounded size;
further ones are dropped and counted. Lines lost to an error, such as a full disk, are counted
likewise. When lines can be written again, one of them states how many are missing.
"""

import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from json import dumps
from time import monotonic
from typing import Any

import orjson

from headrace.core.errors import InvalidRequest, Unsupported

_MOST_BYTES = 4 << 20  # of queued lines
_EACH = 64  # queue overhead in bytes per line
_FLUSH_SECS = 2.0  # timeout of a flush
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe writes atomically


class LogWriter:
    """Writes lines on a thread; `put` and `flush` are thread-safe."""

    def __init__(
        self,
        send: Callable[[bytes], object],
        note: Callable[[int], bytes],
        failed: Callable[[OSError], object],
    ) -> None:
        """`send` writes whole lines, and may block or raise `OSError`; `note` makes the line about
        missing lines. Both are called on the thread, and so is `failed`, for the first of several
        consecutive errors.
        """
        self.dropped = 0  # lines, since the start
        self._send = send
        self._note = note
        self._failed = failed
        self._changed = threading.Condition()  # protects the queue
        self._queue: list[bytes | int] = []  # lines, and numbers of missing lines
        self._waiting = 0  # bytes of lines queued or being written
        self._thread: threading.Thread | None = None
        # For the writing thread:
        self._missing = 0  # missing lines not reported by a note yet
        self._failing = False

    def put(self, line: bytes) -> None:
        """Queue a line, including its line break, or drop it."""
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
        """Wait until all lines are written, for a bounded time."""
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
        """Write lines, preceded by the note on missing ones."""
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


def write_all(descriptor: int, data: bytes) -> None:
    """Write to an open file, and wait for its reader if there is one; raises `OSError`."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # made non-blocking by another process that shares the file
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def _portions(queue: list[bytes | int]) -> Iterator[list[bytes] | int]:
    """Groups of lines for one write each, with the numbers of missing ones in between."""
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


FORMATS = ("default", "ISO8601", "json")
# Keys accepted in `extra`; each becomes a member of a JSON line.
EXTRA = (
    "request_id",
    "model",
    "version",
    "worker",
    "client",
    "method",
    "path",
    "status",
    "duration_ms",
)
_LONGEST_ID = 200
_LONGEST_KEPT = 2_000  # characters of a record in the tail, with its traceback
OUTPUT, _ERROR = 1, 2  # standard descriptors


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of the log: levels, `file` ("" means standard error), and format.

    The last `tail` lines are kept in memory.
    """

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: str = "default"
    file: str = ""
    tail: int = 0


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its line break."""
        entry: dict[str, object] = {
            "time": _moment(record, "microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        if "request_id" in entry:
            entry["request_id"] = shortened(entry["request_id"])
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        elif hasattr(record, "trace"):
            entry["traceback"] = record.trace
        return json_line(entry)


def json_line(entry: Mapping[str, object]) -> str:
    """A JSON object without line breaks or other unprintable characters."""
    try:
        line = orjson.dumps(entry, default=str).decode()
    except TypeError:  # for example a file name that is not UTF-8
        line = ""
    if line and line.isprintable():
        return line
    # The slower encoder escapes all non-ASCII characters, unlike the faster one.
    return dumps(entry, default=str).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Formats time, level, logger and message; the time is short, or ISO 8601 in UTC.

    A record's `trace` is the traceback of another process, as text.
    """

    def __init__(self, iso: bool) -> None:
        super().__init__()
        self._iso = iso

    def format(self, record: logging.LogRecord) -> str:
        """The line, followed by the traceback if there is one."""
        moment = (
            _moment(record, "milliseconds")
            if self._iso
            else f"{datetime.fromtimestamp(record.created):%H:%M:%S.%f}"[:-3]
        )
        request = ""
        if request_id := getattr(record, "request_id", ""):
            request = f" [request id: {shortened(request_id)}]"
        message = _printable(f"{request} {record.getMessage()}")
        line = f"{moment} {record.levelname:<7} {record.name}:{message}"
        trace = str(getattr(record, "trace", ""))
        if record.exc_info:
            trace = self.formatException(record.exc_info)
        return "\n".join([line, *map(_printable, trace.split("\n"))]) if trace else line


class _Handler(logging.Handler):
    """Passes lines to a writer, without waiting for it."""

    def __init__(self, file: str, tail: int) -> None:
        """Without a `file`, write to standard error; keep `tail` lines. Raises `OSError`."""
        super().__init__()
        self._file = file
        self.tail = deque[str](maxlen=tail)
        # A file's failure is reported on standard error; its own failure cannot be.
        self._errors = LogWriter(partial(write_all, standard(_ERROR)), self._note, lambda _: None)
        self.writer = self._errors
        if file:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            send = partial(write_all, os.open(file, flags, 0o666))
            self.writer = LogWriter(send, self._note, self._tell)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that cannot be formatted is written as its plain text."""
        try:
            line = self.format(record)
        except Exception as error:
            text = (
                f"bug in a log line of {record.filename}:{record.lineno}: {record.msg!r}: {error}"
            )
            line = self._line(logging.ERROR, text)
        if self.tail.maxlen:
            self.tail.append(line if len(line) <= _LONGEST_KEPT else f"{line[:_LONGEST_KEPT]}...")
        self.writer.put(_encoded(line))

    def flush(self) -> None:
        """Wait until everything is written, for a bounded time."""
        self.writer.flush()
        self._errors.flush()

    def _note(self, count: int) -> bytes:
        what = "line" if count == 1 else "lines"
        text = f"{count} {what} of the log could not be written and were left out here"
        return _encoded(self._line(logging.WARNING, text))

    def _tell(self, error: OSError) -> None:
        text = (
            f"cannot write the log {self._file}: {error.strerror}; lines are left out until it can"
            " be written"
        )
        self._errors.put(_encoded(self._line(logging.ERROR, text)))

    def _line(self, level: int, text: str) -> str:
        return self.format(logging.LogRecord(__name__, level, "", 0, "%s", (text,), None))


class Logs:
    """The log of this process. All settings but the file may change at any time."""

    def __init__(self, settings: LogSettings) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self._handler = _Handler(settings.file, settings.tail)
        self.apply(settings)
        logging.getLogger().handlers[:] = [self._handler]
        logging.getLogger("asyncio").setLevel(logging.WARNING)

    @property
    def dropped(self) -> int:
        """Lines that could not be written since the start."""
        return self._handler.writer.dropped

    def tail(self) -> list[str]:
        """The last records of the log, each as its text; those of this process alone."""
        return list(self._handler.tail)

    def apply(self, settings: LogSettings) -> None:
        """Apply other levels and another format."""
        json = settings.format == "json"
        formatter = JsonFormatter() if json else TextFormatter(settings.format == "ISO8601")
        self._handler.setFormatter(formatter)
        self._handler.filters[:] = [partial(_wanted, settings)]
        # Libraries log from INFO on; --log-verbose only adds the server's own lines.
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("headrace").setLevel(logging.DEBUG if settings.verbose else logging.INFO)


def _wanted(settings: LogSettings, record: logging.LogRecord) -> bool:
    """True if a record's level is written, as Triton's three switches ask."""
    if record.levelno >= logging.ERROR:
        return settings.error
    if record.levelno >= logging.WARNING:
        return settings.warning
    return settings.info if record.levelno >= logging.INFO else settings.verbose > 0


def standard(descriptor: int) -> int:
    """The descriptor of standard output or error; of the null device if it is closed."""
    if (sys.stdout if descriptor == OUTPUT else sys.stderr) is not None:
        return descriptor
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def shortened(request_id: object) -> str:
    """A request id, or another text of a client, cut to what a line has of it."""
    text = str(request_id)
    return text if len(text) <= _LONGEST_ID else f"{text[:_LONGEST_ID]}..."


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _moment(record: logging.LogRecord, precision: str) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


LOG_FILE_FIXED = "log file location can not be updated through network protocol"
_MOST_VERBOSE = 2**32 - 1
# The protocol's names of the settings, with their types and descriptions.
_TYPES: Mapping[str, tuple[type, str]] = {
    "log_info": (bool, "boolean"),
    "log_warning": (bool, "boolean"),
    "log_error": (bool, "boolean"),
    "log_verbose_level": (int, "int32"),
    "log_format": (str, "string"),
}
_FIELDS = {"log_verbose_level": "verbose"}


class LogControl:
    """The current log settings. Owned by the event-loop thread."""

    def __init__(
        self, settings: LogSettings, apply: Callable[[LogSettings], object] | None = None
    ) -> None:
        """`apply` puts changed settings into effect, as do further `listeners`."""
        self.settings = settings
        self.listeners = [] if apply is None else [apply]
        self.drops: list[Callable[[], int]] = []  # counters of lines that could not be written
        self.tail: Callable[[], list[str]] = list  # the last records, if they are kept

    @property
    def dropped(self) -> int:
        """Lines that no process of the server could write since the start."""
        return sum(count() for count in self.drops)

    def document(self) -> dict[str, Any]:
        """The settings under the protocol's names."""
        settings = asdict(self.settings)
        return {
            "log_file": settings["file"], **{n: settings[_field(n)] for n in _TYPES}
        }  # fmt: skip

    def change(self, changes: Mapping[str, object]) -> None:
        """Change settings, all or none; None leaves one unchanged.

        Raises `InvalidRequest`, and `Unsupported` for the file, which is fixed.
        """
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            if name == "log_file" and value is not None:
                raise Unsupported(LOG_FILE_FIXED)
            if value is not None:
                fields[_field(name)] = _checked(name, value)
        if fields:
            self.settings = replace(self.settings, **fields)
            for listener in self.listeners:
                listener(self.settings)


def _field(name: str) -> str:
    return _FIELDS.get(name, name.removeprefix("log_"))


def _checked(name: str, value: object) -> object:
    if name not in _TYPES:
        expected = ", ".join(_TYPES)
        raise InvalidRequest(f"unknown log setting '{name[:80]}', expected one of {expected}")
    kind, called = _TYPES[name]
    if type(value) is not kind:
        raise InvalidRequest(f"expect {called} for '{name}'")
    if isinstance(value, int) and not 0 <= value <= _MOST_VERBOSE:
        raise InvalidRequest(f"'{name}' must be from 0 to {_MOST_VERBOSE}, got {value}")
    if name == "log_format" and value not in FORMATS:
        raise InvalidRequest(
            f"invalid argument for log_format, got: {str(value)[:80]} (expected one of"
            f" {', '.join(FORMATS)})"
        )
    return value
