"""A TOML file whose errors have lines.

`tomllib` tells the line of a syntax error only. A scanner finds the lines of tables and members in
a document that `tomllib` has accepted, so that it need not check anything itself.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from headrace.core.errors import LoadFailed

# Names of tables, numbers of entries in arrays of tables, and last the member's name.
Place = tuple[str | int, ...]

_STRING = (
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
)
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_PART = re.compile(rf"\s*({_STRING}|[\w-]+)\s*", re.DOTALL)
_VALUE = re.compile(rf"{_STRING}|#[^\n]*|[\[{{\]}}\n]|[^\"'#\[{{\]}}\n]+", re.DOTALL)


class InvalidAccess(LoadFailed):
    """The access file cannot be read or is wrong; names file and line.

    `needed` is a further file that it names, if that is what is missing or wrong.
    """

    needed: Path | None = None


def lines_of(text: str) -> dict[Place, int]:
    """The line of every table and member of a valid TOML document."""
    found: dict[Place, int] = {}
    counts: dict[Place, int] = {}  # entries of arrays of tables
    table: Place = ()
    line, counted = 1, 0
    at = _end(_BLANK, text, 0)
    while at < len(text):
        line, counted = line + text.count("\n", counted, at), at
        brackets = 2 if text.startswith("[[", at) else int(text[at] == "[")
        parts, at = _parts(text, at + brackets)
        place = table if not brackets else ()
        for number, part in enumerate(parts, 1):
            place = (*place, part)
            found.setdefault(place, line)
            if number == len(parts) and brackets == 2:
                counts[place] = counts.get(place, -1) + 1
            if place in counts:
                place = (*place, counts[place])
                found.setdefault(place, line)
        if brackets:
            table = place
            at += brackets
        else:
            at = _after_value(text, at + 1)
        at = _end(_BLANK, text, at)
    return found


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _parts(text: str, at: int) -> tuple[list[str], int]:
    """The parts of a dotted key, and where it ends."""
    parts = []
    while match := _PART.match(text, at):
        part = match[1]
        parts.append(tomllib.loads(f"k = {part}")["k"] if part[0] in "\"'" else part)
        at = match.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    return parts, at


def _after_value(text: str, at: int) -> int:
    """The end of the line on which a value ends."""
    depth = 0
    while match := _VALUE.match(text, at):
        at = match.end()
        depth += (match[0] in "[{") - (match[0] in "]}")
        if match[0] == "\n" and not depth:
            break
    return at


class Section:
    """One table of a file. Each member is taken by its name and type; `end` refuses further ones.

    Everything raises `InvalidAccess`, without the values of members: they may be secrets.
    """

    def __init__(
        self, path: Path, lines: dict[Place, int], place: Place, values: dict[str, Any]
    ) -> None:
        self.path = path
        self.place = place
        self._lines = lines
        self._values = values
        self._asked: list[str] = []

    @classmethod
    def of(cls, path: Path, text: str) -> "Section":
        """The whole file."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # The library's own form is `PROBLEM (at line N, column N)`.
            problem, _, where = str(error).rpartition(" (at ")
            line = re.match(r"line (\d+)", where)
            number = line[1] if line else str(text.count("\n") + 1)
            raise InvalidAccess(f"{path}:{number}: {problem or error}") from None
        except RecursionError:
            raise InvalidAccess(f"{path}:1: values are nested too deeply") from None
        return cls(path, lines_of(text), (), values)

    @property
    def name(self) -> str:
        """The table's own name."""
        return next((part for part in reversed(self.place) if isinstance(part, str)), "")

    @property
    def line(self) -> int:
        """The table's line."""
        return self._line(self.place)

    def error(self, problem: str, member: str = "") -> InvalidAccess:
        """The error of a member, or of the table."""
        place = (*self.place, member) if member else self.place
        return InvalidAccess(f"{self.path}:{self._line(place)}: {problem}")

    def _line(self, place: Place) -> int:
        while place and place not in self._lines:
            place = place[:-1]
        return self._lines.get(place, 1)

    def has(self, name: str) -> bool:
        """True if the member is there, which `end` then accepts."""
        self._asked.append(name)
        return name in self._values

    def _take(self, name: str, kinds: tuple[type, ...], expected: str, default: Any) -> Any:
        if not self.has(name):
            if default is None:
                raise self.error(f"'{name}' is missing, expected {expected}")
            return default
        value = self._values[name]
        if type(value) not in kinds:
            raise self.error(f"'{name}' must be {expected}", name)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text that is not empty; required without a default."""
        found: str = self._take(name, (str,), "a text", default)
        if not found and default != "":
            raise self.error(f"'{name}' must not be empty", name)
        return found

    def texts(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of texts, or one text; required without a default."""
        found = self._take(name, (str, list, tuple), "a list of texts", default)
        texts = (found,) if isinstance(found, str) else tuple(found)
        if not all(isinstance(one, str) and one for one in texts):
            raise self.error(f"'{name}' must be a list of texts that are not empty", name)
        return texts

    def number(self, name: str, default: int, least: int = 0) -> int:
        """A whole number, such as one of seconds."""
        found: int = self._take(name, (int,), "a whole number", default)
        if not least <= found < 1 << 31:
            raise self.error(f"'{name}' must be at least {least}, and below 2147483648", name)
        return found

    def numbered(self, name: str) -> str | int:
        """A name or a number of a user or group, which is required."""
        found: str | int = self._take(name, (int, str), "a name or a number", None)
        if isinstance(found, int) and not 0 <= found < (1 << 32) - 1:
            raise self.error(f"'{name}' must be a number from 0 to 4294967294", name)
        return found

    def moment(self, name: str, default: float) -> float:
        """A date, or one with a time, in seconds since the epoch; UTC unless it says otherwise."""
        found = self._take(name, (date, datetime, float), "a date such as 2027-01-31", default)
        if isinstance(found, float) and self.has(name):
            raise self.error(f"'{name}' must be a date such as 2027-01-31", name)
        return found if isinstance(found, float) else seconds(found)

    def section(self, name: str) -> "Section":
        """The table of this name, an empty one if there is none."""
        values = self._take(name, (dict,), "a table", {})
        return Section(self.path, self._lines, (*self.place, name), values)

    def sections(self, name: str) -> Iterator["Section"]:
        """The tables of an array."""
        found = self._take(name, (list,), f"tables [[{name}]]", [])
        for number, values in enumerate(found):
            if not isinstance(values, dict):
                raise self.error(f"'{name}' must be tables [[{name}]]", name)
            yield Section(self.path, self._lines, (*self.place, name, number), values)

    def named(self) -> Iterator["Section"]:
        """The tables in this one, each of which has a name of its own."""
        for name in self._values:
            yield self.section(name)

    def members(self) -> dict[str, Any]:
        """All members, as they are."""
        self._asked += self._values
        return self._values

    def end(self) -> None:
        """Refuse members that were not asked for."""
        for name in self._values:
            if name not in self._asked:
                known = ", ".join(dict.fromkeys(self._asked))
                raise self.error(f"unknown member '{name}', expected one of {known}", name)


def seconds(moment: date) -> float:
    """A date, or one with a time, in seconds since the epoch; UTC unless it says otherwise."""
    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
