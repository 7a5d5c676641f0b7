"""Reading Prometheus' text format: the values of a scrape by name and labels."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels."""

    labels: Labels
    value: float


def parse(text: str) -> dict[str, list[Sample]]:
    """The samples by name, in their order; raises `ValueError` for a line that is none."""
    found: dict[str, list[Sample]] = {}
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"not a line of metrics: {line[:100]}")
        labels = {name: _plain(value) for name, value in _LABEL.findall(match[2] or "")}
        found.setdefault(match[1], []).append(Sample(labels, float(match[3])))
    return found


def _plain(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), value)
