"""The log: lines for people, or one JSON object a line, and the thread that writes them.

Names, paths and request ids in them are the clients' own text. Whatever would not print, above all
line breaks and the escape sequences of terminals, is written as an escape, so that no client can
forge lines or paint over them.

Whoever logs is not held up. A pipe or terminal takes nothing while its reader stands still, nor
does a file of a network that is gone. So a thread of its own writes: lines wait in a queue of
bounded size, beyond which they are dropped and counted. What an error keeps from being written, as
on a full disk, is dropped and counted likewise. When lines can be written again, one says how many
are missing.
"""

import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from json import dumps
from time import monotonic
from typing import Any

import orjson

from headrace.core.errors import InvalidRequest, Unsupported

_MOST_BYTES = 4 << 20  # of lines that wait
_EACH = 64  # bytes that a line takes in the queue beside its own
_FLUSH_SECS = 2.0  # that a flush waits for a reader
_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes in one piece, other writers or not


class LogWriter:
    """Writer of lines to one open file; `put` and `flush` may be called from any thread."""

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


FORMATS = ("default", "ISO8601", "json")
# What a call may pass in `extra`; each becomes a member of a JSON line.
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
_STANDARD_ERROR = 2


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of the log: levels, `file` (none means standard error), and format."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: str = "default"
    file: str = ""


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        entry: dict[str, object] = {
            "time": _moment(record, "microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        if "request_id" in entry:
            entry["request_id"] = _short(entry["request_id"])
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        elif hasattr(record, "trace"):
            entry["traceback"] = record.trace
        try:
            line = orjson.dumps(entry, default=str).decode()
        except TypeError:  # a file name that is not UTF-8, say
            line = ""
        if line and line.isprintable():
            return line
        # The slower encoder escapes all that is not ASCII, and so what the faster one leaves in.
        return dumps(entry, default=str).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; the time either short or as ISO 8601 in UTC.

    A record's `trace` is the traceback of another process, as text.
    """

    def __init__(self, iso: bool) -> None:
        super().__init__()
        self._iso = iso

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback below it if there is one."""
        moment = (
            _moment(record, "milliseconds")
            if self._iso
            else f"{datetime.fromtimestamp(record.created):%H:%M:%S.%f}"[:-3]
        )
        request = ""
        if request_id := getattr(record, "request_id", ""):
            request = f" [request id: {_short(request_id)}]"
        message = _printable(f"{request} {record.getMessage()}")
        line = f"{moment} {record.levelname:<7} {record.name}:{message}"
        trace = str(getattr(record, "trace", ""))
        if record.exc_info:
            trace = self.formatException(record.exc_info)
        return "\n".join([line, *map(_printable, trace.split("\n"))]) if trace else line


class _Handler(logging.Handler):
    """Hands lines to a writer, and so does not wait for whoever reads them."""

    def __init__(self, file: str) -> None:
        """Without a `file`, to standard error. Raises `OSError`."""
        super().__init__()
        self._file = file
        # Standard error is where a file's failure is told, but of its own nobody can be.
        self._errors = LogWriter(_standard_error(), self._note, lambda _: None)
        self.writer = self._errors
        if file:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self.writer = LogWriter(os.open(file, flags, 0o666), self._note, self._tell)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that cannot be formatted by its text alone."""
        try:
            line = self.format(record)
        except Exception as error:
            text = (
                f"bug in a log line of {record.filename}:{record.lineno}: {record.msg!r}: {error}"
            )
            line = self._line(logging.ERROR, text)
        self.writer.put(_encoded(line))

    def flush(self) -> None:
        """Wait until all is written, for a reader that stands still not long."""
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
    """The log of this process. Its settings, but for the file, may change at any time."""

    def __init__(self, settings: LogSettings) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self._handler = _Handler(settings.file)
        self.apply(settings)
        logging.getLogger().handlers[:] = [self._handler]
        for noisy in ("uvicorn", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

    @property
    def dropped(self) -> int:
        """Lines that could not be written since the start."""
        return self._handler.writer.dropped

    def apply(self, settings: LogSettings) -> None:
        """Write in this form, and these levels, from now on."""
        json = settings.format == "json"
        formatter = JsonFormatter() if json else TextFormatter(settings.format == "ISO8601")
        self._handler.setFormatter(formatter)
        self._handler.filters[:] = [partial(_wanted, settings)]
        # Libraries speak from INFO on; only our own lines become more with --log-verbose.
        logging.getLogger().setLevel(logging.INFO)
        logging.getLogger("headrace").setLevel(logging.DEBUG if settings.verbose else logging.INFO)


def _wanted(settings: LogSettings, record: logging.LogRecord) -> bool:
    """True if a record's level is written, as Triton's three switches ask."""
    if record.levelno >= logging.ERROR:
        return settings.error
    if record.levelno >= logging.WARNING:
        return settings.warning
    return settings.info if record.levelno >= logging.INFO else settings.verbose > 0


def _standard_error() -> int:
    """Descriptor of standard error; of nowhere if it was closed when the process was started."""
    if sys.stderr is not None:
        return _STANDARD_ERROR
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _short(request_id: object) -> str:
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
# What clients call the settings, with the type of each and what it is called.
_TYPES: Mapping[str, tuple[type, str]] = {
    "log_info": (bool, "boolean"),
    "log_warning": (bool, "boolean"),
    "log_error": (bool, "boolean"),
    "log_verbose_level": (int, "int32"),
    "log_format": (str, "string"),
}
_FIELDS = {"log_verbose_level": "verbose"}


class LogControl:
    """The settings in force. Owned by the event-loop thread."""

    def __init__(
        self, settings: LogSettings, apply: Callable[[LogSettings], object] | None = None
    ) -> None:
        """`apply` brings changed settings into force, as do other `listeners`."""
        self.settings = settings
        self.listeners = [] if apply is None else [apply]
        self.drops: list[Callable[[], int]] = []  # each counts lines that could not be written

    @property
    def dropped(self) -> int:
        """Lines of all processes of the server that could not be written since the start."""
        return sum(count() for count in self.drops)

    def document(self) -> dict[str, Any]:
        """The settings by the names that clients know."""
        settings = asdict(self.settings)
        return {
            "log_file": settings["file"], **{n: settings[_field(n)] for n in _TYPES}
        }  # fmt: skip

    def change(self, changes: Mapping[str, object]) -> None:
        """Bring settings into force, all or none; None leaves one as it is.

        Raises `InvalidRequest`, and `Unsupported` for the file, which cannot change.
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
