"""How log lines look, and which are written."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.observability.logs import EXTRA, JsonFormatter, TextFormatter

CREATED = 1_700_000_000.123456


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord(
        "headrace.engine", logging.WARNING, "file.py", 7, message, args or ("you",), None
    )
    made.created = CREATED
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def failed() -> logging.LogRecord:
    made = record()
    try:
        raise ValueError("what went wrong")
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
        "time": "2023-11-14T22:13:20.123456Z",
        "level": "warning",
        "logger": "headrace.engine",
        "message": "hello you",
    }


def test_extra_members_of_a_json_line() -> None:
    extra = {name: f"<{name}>" for name in EXTRA}
    entry = parsed(record(**extra, something_else=1))
    assert {name: entry[name] for name in EXTRA} == extra
    assert "something_else" not in entry


def test_a_json_line_holds_the_traceback() -> None:
    entry = parsed(failed())
    assert entry["traceback"].startswith("Traceback (most recent call last):\n")
    assert entry["traceback"].endswith("ValueError: what went wrong")


@pytest.mark.parametrize("value", ["\udcff", 2**70, Path("/x"), "a\nb", "é\0"])
def test_whatever_is_logged_gets_into_a_json_line(value: object) -> None:
    entry = parsed(record("%s", value, request_id=value))
    assert entry["message"] == str(value)
    assert str(entry["request_id"]) == str(value)


def test_a_text_line() -> None:
    line = TextFormatter(iso=True).format(record())
    assert line == "2023-11-14T22:13:20.123Z WARNING headrace.engine: hello you"
    short = TextFormatter(iso=False).format(record())
    assert re.fullmatch(r"\d\d:\d\d:20\.123 WARNING headrace\.engine: hello you", short)


def test_a_text_line_with_a_request_id() -> None:
    line = TextFormatter(iso=True).format(record(request_id="abc-ü"))
    assert line.endswith(" headrace.engine: [request id: abc-ü] hello you")


def test_a_text_line_of_a_request_without_an_id() -> None:
    line = TextFormatter(iso=True).format(record(request_id=""))
    assert line.endswith(" headrace.engine: hello you")


def test_a_request_id_cannot_forge_a_line() -> None:
    line = TextFormatter(iso=True).format(record(request_id="1]\n12:00 ERROR root: fake"))
    assert line.splitlines() == [line]
    assert "[request id: 1]\\n12:00 ERROR root: fake]" in line


@pytest.mark.parametrize(("text", "written"), [
    ("a\nb\r\tc", "a\\nb\\r\\tc"), ("\x1b[2J\x9b1m\x7f", "\\x1b[2J\\x9b1m\\x7f"),
    ("a\u2028b\x85c", "a\\u2028b\\x85c"),
    ("\u202egnp", "\\u202egnp"),  # the rest of the line from right to left
    ("\udcff", "\\udcff"), ("\x00", "\\x00"), ("größer 🙂 'a' \\n", "größer 🙂 'a' \\n"),
])  # fmt: skip
def test_what_would_not_print_is_escaped(text: str, written: str) -> None:
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


def test_a_traceback_cannot_forge_more_than_lines_of_its_own() -> None:
    made = record()
    try:
        raise ValueError("one\ntwo \x1b[1A")
    except ValueError:
        made.exc_info = sys.exc_info()
    lines = TextFormatter(iso=True).format(made).splitlines()
    assert lines[-2:] == ["ValueError: one", "two \\x1b[1A"]


def test_a_traceback_follows_the_text_line() -> None:
    first, *rest = TextFormatter(iso=True).format(failed()).splitlines()
    assert first.endswith("hello you")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: what went wrong"


# Configuring changes the loggers of the whole process, so it is done in one of its own.
PROGRAM = """
import logging, sys
from headrace.observability.logs import LogSettings, Logs
Logs(LogSettings(**eval(sys.argv[1])))
for name in ("headrace.engine", "somebody.else", "uvicorn.error"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s of %s", level, name)
"""
OURS, THEIRS = "headrace.engine", "somebody.else"


def written(**settings: object) -> tuple[str, list[tuple[str, str]]]:
    """What a process with these settings writes to standard error: as text, and as who and what."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(settings)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == ""
    return ran.stderr, re.findall(r"(debug|info|warning|error) of ([\w.]+)", ran.stderr)


def test_which_levels_are_written() -> None:
    _, lines = written()
    assert lines == [
        ("info", OURS),
        ("warning", OURS),
        ("error", OURS),
        ("info", THEIRS),
        ("warning", THEIRS),
        ("error", THEIRS),
        ("warning", "uvicorn.error"),
        ("error", "uvicorn.error"),
    ]


def test_levels_are_switched_one_by_one() -> None:
    _, lines = written(verbose=1, info=False, warning=False)
    assert lines == [
        ("debug", OURS),
        ("error", OURS),
        ("error", THEIRS),
        ("error", "uvicorn.error"),
    ]


def test_writing_json_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    text, _ = written(format="json", file=str(file), error=False)
    assert text == ""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["level"] for entry in entries] == ["info", "warning"] * 2 + ["warning"]
