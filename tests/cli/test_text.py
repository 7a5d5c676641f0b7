"""Tables, times and sizes."""

import io
import re
import sys

import pytest

from headrace.cli.text import duration, fitted_table, number, printable, size, styled, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0, "0 µs"), (1.234e-6, "1.23 µs"), (0.00099999, "1.00 ms"),
        (0.0123, "12.3 ms"), (0.99999, "1.00 s"), (1.5, "1.50 s"), (119, "119 s"),
        (120, "2 min"), (7260, "2 h"), (200_000, "2 d"),
    ],
)  # fmt: skip
def test_times(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1 << 20, "1 MiB"),
        (1_048_000, "1.00 MiB"), (5.5 * 2**30, "5.50 GiB"), (2.0**60, "1048576 TiB"),
    ],
)  # fmt: skip
def test_sizes(nbytes: float | None, text: str) -> None:
    assert size(nbytes) == text


def test_numbers() -> None:
    shown = [number(value) for value in (None, 0, 0.25, 12.34, 123.4, 12_345, 1.5e6)]
    assert shown == ["-", "0", "0.25", "12.3", "123", "12345", "1.5M"]


def test_control_characters() -> None:
    assert printable("a\x1b[2Jb\x9bc\r\n\td\xa0é") == "a\\x1b[2Jb\\x9bc\\r\n\td\xa0é"


def test_tables() -> None:
    assert table(("A", "BB"), [("aaa", "1"), ("a", "22")], right="BB") == [
        "A    BB", "aaa   1", "a    22",
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = ("NAME", "N"), [("[b]two words", "1"), ("one", "22")]
    assert fitted_table(head, [("a\x1b[2J", "1")]) == table(head, [("a\\x1b[2J", "1")])
    assert fitted_table(head, rows, right="N") == table(head, rows, right="N")
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in fitted_table(head, rows, right="N")]
    assert [line.split() for line in shown] == [
        ["NAME", "N"], ["[b]two", "1"], ["words"], ["one", "22"],
    ]  # fmt: skip
    assert max(map(len, shown)) <= 12
    monkeypatch.setitem(sys.modules, "rich", None)  # as where it is not installed
    assert fitted_table(head, rows) == table(head, rows)


def test_characters_have_styles_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a * [b]", " : *"]
    assert list(styled(lines, {"*": "bold"})) == lines
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    bold = "\x1b[1m*\x1b[0m"
    assert list(styled(lines, {"*": "bold"})) == [f"a {bold} [b]", f" : {bold}"]
