"""On which line of a protobuf text file a field stands.

protobuf's own parser names the line of a syntax error, but forgets lines once a message is built; a
value that is well-formed and wrong needs its line too. This reads the file once more, for structure
only.
"""

import re

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[\w.+\-/]+)|(?P<mark>.)""",
    re.VERBOSE,
)
_OPEN = {"{": "}", "<": ">"}


def field_lines(text: str) -> dict[str, int]:
    """Line numbers by field path: `max_batch_size`, `input[1].dims`, `parameters['execution']`.

    What follows a map's entry has the entry's own fields in its path: `parameters['x'].value`.

    A path without an index, anywhere in it, stands for the first occurrence. `text` must be valid
    protobuf text format.
    """
    tokens: list[tuple[str, int]] = []
    line = 1
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            tokens.append((match.group(), line))
        line += match.group().count("\n")
    lines: dict[str, int] = {}
    _fields(tokens, 0, [""], lines)
    return lines


def _fields(
    tokens: list[tuple[str, int]], at: int, prefixes: list[str], lines: dict[str, int]
) -> int:
    """Read the fields of one message, which has several paths; the position of what closes it."""
    seen: dict[str, int] = {}
    while at < len(tokens) and tokens[at][0] not in ("}", ">"):
        name, line = tokens[at]
        at += 1
        if name in (",", ";"):
            continue
        paths = [prefix + name for prefix in prefixes]
        _note(paths, line, lines)
        if at < len(tokens) and tokens[at][0] == ":":
            at += 1
        listed = at < len(tokens) and tokens[at][0] == "["
        at += listed
        while at < len(tokens) and tokens[at][0] != "]":
            if tokens[at][0] == ",":
                at += 1
                continue
            index = seen.get(name, 0)
            seen[name] = index + 1
            own = [f"{path}[{index}]" for path in paths]
            if tokens[at][0] in _OPEN:
                own += [f"{path}[{key}]" for path in paths for key in _map_key(tokens, at + 1)]
            _note(own, tokens[at][1] if listed else line, lines)
            if tokens[at][0] in _OPEN:
                at = _fields(tokens, at + 1, [f"{path}." for path in paths + own], lines) + 1
            else:
                at += 1
                while at < len(tokens) and tokens[at][0][0] in "\"'":
                    at += 1  # strings that stand side by side are one value
            if not listed:
                break
        at += listed
    return at


def _note(paths: list[str], line: int, lines: dict[str, int]) -> None:
    for path in paths:
        lines.setdefault(path, line)


def _map_key(tokens: list[tuple[str, int]], at: int) -> list[str]:
    """The text that a map's entry begins with as its key, in single quotes; none if it is none."""
    match [token for token, _ in tokens[at : at + 3]]:
        case ["key", ":", text] if text[0] in "\"'":
            return [f"'{text[1:-1]}'"]
        case ["key", ":", number] if number.isdecimal():
            return [f"'{number}'"]
        case _:
            return []
