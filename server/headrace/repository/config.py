"""`config.pbtxt`: text to a message, with errors that name file, line and field.

protobuf's parser reports the line of a syntax error, but discards lines once a message is built; a
well-formed but wrong value needs its line too. `field_lines` reads the text again, for its
structure only.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from google.protobuf import json_format, text_format

from headrace.core.errors import InvalidConfig
from headrace.protocol.pb.model_config_pb2 import ModelConfig

TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[\w.+\-/]+)|(?P<mark>.)""",
    re.VERBOSE,
)
_OPEN = {"{": "}", "<": ">"}


def field_lines(text: str) -> dict[str, int]:
    """Line numbers by field path: `max_batch_size`, `input[1].dims`, `parameters['execution']`.

    Fields of a map's entry are part of the path: `parameters['x'].value`.

    A path without an index stands for the first occurrence. `text` must be valid protobuf text
    format.
    """
    tokens: list[tuple[str, int]] = []
    line = 1
    for match in TOKEN.finditer(text):
        if match.lastgroup != "skip":
            tokens.append((match.group(), line))
        line += match.group().count("\n")
    lines: dict[str, int] = {}
    _fields(tokens, 0, [""], lines)
    return lines


def _fields(
    tokens: list[tuple[str, int]], at: int, prefixes: list[str], lines: dict[str, int]
) -> int:
    """Read the fields of one message, which has several paths; returns the position of its end."""
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
                    at += 1  # adjacent strings are one value
            if not listed:
                break
        at += listed
    return at


def _note(paths: list[str], line: int, lines: dict[str, int]) -> None:
    for path in paths:
        lines.setdefault(path, line)


def _map_key(tokens: list[tuple[str, int]], at: int) -> list[str]:
    """The key at the start of a map's entry, in single quotes; none if it is not an entry."""
    match [token for token, _ in tokens[at : at + 3]]:
        case ["key", ":", text] if text[0] in "\"'":
            return [f"'{text[1:-1]}'"]
        case ["key", ":", number] if number.isdecimal():
            return [f"'{number}'"]
        case _:
            return []


_UNKNOWN_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\S+?)\.?$')
_DATATYPES = "inference.DataType"
_ALIKE = 0.8  # similarity above which a value is suggested, but not TYPE_INT8 for TYPE_FLOAT
# Other libraries' names of datatypes.
_ELSEWHERE = {
    "FLOAT": "FP32", "FLOAT16": "FP16", "FLOAT32": "FP32", "FLOAT64": "FP64", "DOUBLE": "FP64",
    "HALF": "FP16", "BFLOAT16": "BF16", "BYTE": "INT8", "SHORT": "INT16", "INT": "INT32",
    "LONG": "INT64", "BOOLEAN": "BOOL", "BYTES": "STRING", "STR": "STRING", "TEXT": "STRING",
    "OBJECT": "STRING",
}  # fmt: skip
_LONGEST_JSON = 1 << 20  # characters of a configuration


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a configuration; `path` is the field, such as `input[0].dims`."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration as written; `lines` are the lines of its fields, 0 if unknown.

    `name` is the file's name in messages.
    """

    name: str
    config: ModelConfig
    lines: dict[str, int] = field(default_factory=dict)

    def explain(self, problem: Problem) -> str:
        """Format `problem` as one line with file, line and field."""
        path = problem.path
        while path and path not in self.lines:
            # Try the parents: from `input[0].dims` to `input[0]`, then `input`.
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        line = self.lines.get(path, 0)
        where = f"{self.name}:{line}" if line else self.name
        return f"{where}: {problem.path}: {problem.text}"

    def sets(self, path: str) -> bool:
        """True if the file itself sets the field, even to its default value."""
        return path in self.lines


def refuse(file: ConfigFile, found: Iterable[Problem]) -> None:
    """Raise `InvalidConfig` with all problems, one line each, if there are any."""
    if lines := [file.explain(problem) for problem in found]:
        raise InvalidConfig("\n".join(lines))


def parameter(config: ModelConfig, name: str, default: str = "") -> str:
    """The value of one of a configuration's parameters."""
    return config.parameters[name].string_value if name in config.parameters else default


def read_config(path: Path | None, model: str) -> ConfigFile:
    """Read the configuration in `path`, or an empty one; raises `InvalidConfig`."""
    if path is None:
        return ConfigFile(f"{model} (no config.pbtxt)", ModelConfig())
    name = f"{model}/{path.name}"
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except OSError as error:
        raise InvalidConfig(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{name}: cannot be read: {error}") from error
    return parse_config(text, name)


def parse_config(text: str, name: str) -> ConfigFile:
    """Parse protobuf text format.

    Raises `InvalidConfig` with file, line and, for an unknown name, the most similar known one.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        message = re.sub(r"^\d+:\d+ : ", "", str(error)).replace("inference.", "")
        line = error.GetLine()
        where = f"{name}:{line}" if line else name
        raise InvalidConfig(f"{where}: {message}{_suggestion(str(error))}") from None
    return ConfigFile(name, config, field_lines(text))


def parse_json_config(text: str, name: str) -> ConfigFile:
    """Parse the JSON form of a configuration.

    Raises `InvalidConfig` with the position of the error, like `parse_config`.
    """
    if len(text) > _LONGEST_JSON:
        raise InvalidConfig(
            f"{name}: has {len(text)} characters, at most {_LONGEST_JSON} are taken"
        )
    config = ModelConfig()
    try:
        document = orjson.loads(text)
        if type(document) is not dict:
            raise InvalidConfig(f"{name}: must be a JSON object")
        json_format.ParseDict(document, config)
    except orjson.JSONDecodeError as error:
        raise InvalidConfig(f"{name}: is not JSON: {error}") from None
    # Protobuf accepts some invalid values and prints them unchanged.
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        message = (str(error).splitlines() or [""])[0].replace("inference.", "")
        raise InvalidConfig(f"{name}: {message}{_suggestion(str(error))}") from None
    fields = ModelConfig.DESCRIPTOR.fields
    known = {key: f.name for f in fields for key in (f.name, f.json_name)}
    return ConfigFile(
        name, config, {known[key]: 0 for key in document if document[key] is not None}
    )


def _suggestion(message: str) -> str:
    """The known names most similar to the unknown one in a parser's message, as a suffix."""
    candidates: list[str] = []
    near: list[str] = []
    pool = ModelConfig.DESCRIPTOR.file.pool
    if match := _UNKNOWN_FIELD.search(message):
        candidates = [f.name for f in pool.FindMessageTypeByName(match["type"]).fields]
        near = difflib.get_close_matches(match["name"].strip("\"'"), candidates, 1)
    elif match := _UNKNOWN_VALUE.search(message):
        candidates = [v.name for v in pool.FindEnumTypeByName(match["type"]).values]
        name = match["name"].strip("\"'")
        bare = name.upper().removeprefix("TYPE_")
        if match["type"] == _DATATYPES and bare in _ELSEWHERE:
            near = [f"TYPE_{_ELSEWHERE[bare]}"]
        else:
            near = [c for c in candidates if c == f"TYPE_{bare}"]
            near = near or difflib.get_close_matches(name, candidates, 1, _ALIKE)
    if match is None:
        return ""
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(candidates)}"
