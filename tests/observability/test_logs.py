"""Log lines: format, levels, changes by clients, and slow readers."""

import json
import logging
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest, ServerError, Unsupported
from headrace.observability.logs import (
    EXTRA,
    JsonFormatter,
    LogControl,
    LogSettings,
    LogWriter,
    TextFormatter,
    write_all,
)
from tests.support.scrape import until

CREATED = 1_700_000_000.123456


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "headrace.engine", logging.WARNING, "file.py", 7, message, args or ("you",), None
    )
    made.created = CREATED
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def failed(text: str = "what went wrong") -> logging.LogRecord:
    made = record()
    try:
        raise ValueError(text)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def parsed(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(made)
    assert "\n" not in line
    entry: dict[str, Any] = json.loads(line)
    return entry


def test_a_json_line() -> None:
    assert parsed(record()) == {
        "time": "2023-11-14T22:13:20.123456Z", "level": "warning", "logger": "headrace.engine",
        "message": "hello you",
    }  # fmt: skip
    extra = {name: f"<{name}>" for name in EXTRA}
    entry = parsed(record(**extra, something_else=1))
    assert {name: entry[name] for name in EXTRA} == extra
    assert "something_else" not in entry
    entry = parsed(failed())
    assert entry["traceback"].startswith("Traceback (most recent call last):\n")
    assert entry["traceback"].endswith("ValueError: what went wrong")


def test_any_record_becomes_a_json_line() -> None:
    for value in ("\udcff", 2**70, Path("/x"), "a\nb", "é\0"):
        entry = parsed(record("%s", value, request_id=value))
        assert entry["message"] == str(value)
        assert str(entry["request_id"]) == str(value)


def test_a_text_line() -> None:
    line = TextFormatter(iso=True).format(record())
    assert line == "2023-11-14T22:13:20.123Z WARNING headrace.engine: hello you"
    short = TextFormatter(iso=False).format(record())
    assert re.fullmatch(r"\d\d:\d\d:20\.123 WARNING headrace\.engine: hello you", short)


def test_a_text_line_with_a_request_id() -> None:
    for id, shown in (
        ("abc-ü", " [request id: abc-ü]"),
        ("", ""),
        ("1]\n12:00 ERROR root: fake", " [request id: 1]\\n12:00 ERROR root: fake]"),
    ):
        line = TextFormatter(iso=True).format(record(request_id=id))
        assert line.endswith(f" headrace.engine:{shown} hello you")
        assert line.splitlines() == [line]  # clients cannot forge a line


@pytest.mark.parametrize(("text", "written"), [
    ("a\nb\r\tc", "a\\nb\\r\\tc"), ("\x1b[2J\x9b1m\x7f", "\\x1b[2J\\x9b1m\\x7f"),
    ("a\u2028b\x85c", "a\\u2028b\\x85c"),
    ("\u202egnp", "\\u202egnp"),  # the rest of the line from right to left
    ("\udcff", "\\udcff"), ("\x00", "\\x00"), ("größer 🙂 'a' \\n", "größer 🙂 'a' \\n"),
])  # fmt: skip
def test_unprintable_characters_are_escaped(text: str, written: str) -> None:
    line = TextFormatter(iso=True).format(record("%s!", text, request_id=text))
    assert line.endswith(f" headrace.engine: [request id: {written}] {written}!")
    line = JsonFormatter().format(record("%s!", text, path=text))
    assert line.isprintable()
    assert (json.loads(line)["message"], json.loads(line)["path"]) == (f"{text}!", text)


@pytest.mark.parametrize(("length", "written"), [(200, "x" * 200), (201, "x" * 200 + "...")])
def test_a_long_request_id_is_cut(length: int, written: str) -> None:
    line = TextFormatter(iso=True).format(record(request_id="x" * length))
    assert line.endswith(f"[request id: {written}] hello you")
    assert parsed(record(request_id="x" * length))["request_id"] == written


def test_a_traceback_follows_the_text_line() -> None:
    first, *rest = TextFormatter(iso=True).format(failed()).splitlines()
    assert first.endswith("hello you")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: what went wrong"
    lines = TextFormatter(iso=True).format(failed("one\ntwo \x1b[1A")).splitlines()
    assert lines[-2:] == ["ValueError: one", "two \\x1b[1A"]  # and can forge nothing else


# Configuring changes the loggers of the whole process, so it is done in one of its own.
PROGRAM = """
import logging, sys
from headrace.observability.logs import LogSettings, Logs
Logs(LogSettings(**eval(sys.argv[1])))
for name in ("headrace.engine", "somebody.else", "asyncio"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s of %s", level, name)
"""
OURS, THEIRS = "headrace.engine", "somebody.else"


def written(**settings: object) -> tuple[str, list[tuple[str, str]]]:
    """Standard error of a process with these settings, as text and as parsed pairs."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(settings)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == ""
    return ran.stderr, re.findall(r"(debug|info|warning|error) of ([\w.]+)", ran.stderr)


def test_default_levels() -> None:
    _, lines = written()
    levels = ("info", "warning", "error")
    ours, theirs = [(level, OURS) for level in levels], [(level, THEIRS) for level in levels]
    assert lines == [*ours, *theirs, ("warning", "asyncio"), ("error", "asyncio")]


def test_levels_are_switched_one_by_one() -> None:
    _, lines = written(verbose=1, info=False, warning=False)
    errors = [("error", name) for name in (OURS, THEIRS, "asyncio")]
    assert lines == [("debug", OURS), *errors]


def test_writing_json_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    text, _ = written(format="json", file=str(file), error=False)
    assert text == ""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["level"] for entry in entries] == ["info", "warning"] * 2 + ["warning"]


# --- changes by clients


def test_the_last_records_are_kept() -> None:
    program = PROGRAM.replace("Logs(", "logs = Logs(") + "print(*logs.tail(), sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", program, repr({"tail": 2, "format": "json"})],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept = [json.loads(line)["message"] for line in ran.stdout.splitlines()]
    assert kept == ["warning of asyncio", "error of asyncio"]


def test_settings_by_name() -> None:
    control = LogControl(LogSettings(2, False, True, False, "ISO8601", "/var/log/x"))
    assert control.document() == {
        "log_file": "/var/log/x", "log_info": False, "log_warning": True, "log_error": False,
        "log_verbose_level": 2, "log_format": "ISO8601",
    }  # fmt: skip


def test_a_change_takes_effect() -> None:
    applied: list[LogSettings] = []
    control = LogControl(LogSettings(file="f"), applied.append)
    control.change({"log_info": None, "log_file": None})  # nulls change nothing
    control.change({})
    assert (applied, control.settings) == ([], LogSettings(file="f"))
    control.change({"log_info": False, "log_verbose_level": 3, "log_format": "json"})
    assert applied == [LogSettings(3, False, True, True, "json", "f")]
    assert control.settings == applied[0]


@pytest.mark.parametrize(("name", "value", "error", "text"), [
    ("log_file", "x", Unsupported, "log file location can not be updated through network"),
    ("log_file", "", Unsupported, "log file location can not be updated through network"),
    ("log_info", 1, InvalidRequest, "expect boolean for 'log_info'"),
    ("log_error", "true", InvalidRequest, "expect boolean for 'log_error'"),
    ("log_verbose_level", True, InvalidRequest, "expect int32 for 'log_verbose_level'"),
    ("log_verbose_level", 1.0, InvalidRequest, "expect int32 for 'log_verbose_level'"),
    ("log_verbose_level", -1, InvalidRequest, "must be from 0 to 4294967295, got -1"),
    ("log_verbose_level", 2**32, InvalidRequest, "got 4294967296"),
    ("log_format", 1, InvalidRequest, "expect string for 'log_format'"),
    ("log_format", "xml", InvalidRequest, "invalid argument for log_format, got: xml"),
    ("log_level", "INFO", InvalidRequest, "unknown log setting 'log_level', expected one of"),
])  # fmt: skip
def test_an_invalid_change_changes_nothing(
    name: str, value: object, error: type[ServerError], text: str
) -> None:
    control = LogControl(LogSettings())
    with pytest.raises(error, match=text):
        control.change({"log_warning": False, name: value})
    assert control.settings == LogSettings()


# --- a reader that halts


LINE = b"x" * 99 + b"\n"


def note(count: int) -> bytes:
    return b"%d missing\n" % count


def unexpected(error: OSError) -> None:
    raise AssertionError(error)


@contextmanager
def opened(path: str, flags: int = os.O_WRONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_pipe_with_a_halted_reader() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(partial(write_all, writing), note, unexpected)
    lines = [b"x" * (1 << 17) + b"\n"]  # more than the pipe takes
    lines += [b"line %06d %s\n" % (number, b"y" * 80) for number in range(100_000)]
    writer.put(lines[0])
    until(lambda: not select.select([], [writing], [], 0)[1], "a full pipe")
    for line in lines[1:]:
        writer.put(line)
    assert 50_000 < writer.dropped < len(lines)
    data = b""
    while not data.endswith(b" missing\n"):
        data += os.read(reading, 1 << 16)
    writer.put(b"again\n")
    assert os.read(reading, 100) == b"again\n"
    *written, told = data.splitlines(keepends=True)
    assert written == lines[: len(lines) - writer.dropped]
    assert told == note(writer.dropped)
    writer.flush()


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_that_are_read_are_not_dropped(blocking: bool) -> None:
    """Also a line larger than the queue, and a pipe that someone made non-blocking."""
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    writer = LogWriter(partial(write_all, writing), note, unexpected)
    lines = [b"z" * (8 << 20)] if blocking else [LINE] * 2000
    for line in lines:
        writer.put(line)
    left = sum(map(len, lines))
    while left:
        left -= len(os.read(reading, 1 << 20))
    assert writer.dropped == 0


def test_a_flush_waits_for_the_reader() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(partial(write_all, writing), note, unexpected)
    for _ in range(100):
        writer.put(LINE)
    writer.flush()
    assert os.read(reading, 1 << 16) == LINE * 100


def test_a_full_device() -> None:
    errors: list[OSError] = []
    with opened("/dev/full") as descriptor:
        writer = LogWriter(partial(write_all, descriptor), note, errors.append)
        for _ in range(1000):
            writer.put(LINE)
        writer.flush()
        assert writer.dropped == 1000
        assert [error.strerror for error in errors] == ["No space left on device"]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with opened(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        writer = LogWriter(partial(write_all, descriptor), note, unexpected)
        writer.put(LINE)
        writer.flush()
        assert path.read_bytes() == LINE
