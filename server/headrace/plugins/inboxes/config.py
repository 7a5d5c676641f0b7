"""The file that declares inboxes, in TOML: `docs/inboxes.md` describes it."""

import os
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.plugins.inboxes.bodies import FORMS
from headrace.plugins.inboxes.broker import BrokerAddress, InvalidInbox, read_address

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_ADDRESSES = ("from", "to", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxConfig:
    """One inbox. `retry_secs` is the wait before the second try, `exactly_once` None: if it can."""

    source: BrokerAddress
    to: BrokerAddress
    failed: BrokerAddress
    model: str
    version: str = ""
    body: str = "auto"
    name: str = ""
    in_flight: int = 512
    tries: int = 3
    retry_secs: float = 1.0
    deliveries: int = 20
    exactly_once: bool | None = None


_LEAST: dict[str, float] = {"in_flight": 1, "tries": 1, "retry_secs": 0, "deliveries": 1}


def read_inboxes(path: Path) -> list[InboxConfig]:
    """The inboxes that a file declares; raises `InvalidInbox`, and `OSError`."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInbox(f"{path}: {error}") from None
    given = document.pop("inbox", None)
    if document:
        raise InvalidInbox(f"{path}: expected [[inbox]] tables alone, got '{next(iter(document))}'")
    if not isinstance(given, list) or not all(isinstance(table, dict) for table in given):
        raise InvalidInbox(f"{path} declares no inbox: expected [[inbox]] tables")
    return [_inbox(table, f"{path}: inbox {at}") for at, table in enumerate(given, 1)]


def _inbox(table: dict[str, Any], where: str) -> InboxConfig:
    known = {field.name: field for field in fields(InboxConfig)}
    names = {"from" if name == "source" else name: name for name in known}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in names:
            raise InvalidInbox(
                f"{where}: unknown member '{name}', expected one of {', '.join(names)}"
            )
        values[names[name]] = _value(name, value, known[names[name]].type, where)
    for name in (*_ADDRESSES, "model"):
        if names[name] not in values:
            raise InvalidInbox(f"{where}: '{name}' is missing")
    return InboxConfig(**values)


def _value(name: str, value: Any, kind: Any, where: str) -> Any:
    """A member's value; raises `InvalidInbox`."""
    if name in _ADDRESSES or kind is str:
        if not isinstance(value, str):
            raise InvalidInbox(f"{where}: '{name}' must be a text, got {value!r}")
        if name in _ADDRESSES:
            return read_address(_expanded(value, where), f"{where}: '{name}'")
        if name == "body" and value not in FORMS:
            raise InvalidInbox(f"{where}: 'body' must be one of {', '.join(FORMS)}, got {value!r}")
        return value
    if name == "exactly_once":
        if not isinstance(value, bool):
            raise InvalidInbox(f"{where}: '{name}' must be true or false, got {value!r}")
        return value
    allowed = (int, float) if kind is float else (int,)
    if type(value) not in allowed or not _LEAST[name] <= value < 1 << 31:
        what = "number" if kind is float else "whole number"
        raise InvalidInbox(f"{where}: '{name}' must be a {what} >= {_LEAST[name]}, got {value!r}")
    return value


def _expanded(text: str, where: str) -> str:
    """Replace ${NAME} by variables of the environment, so that passwords need not be in files."""

    def read(match: re.Match[str]) -> str:
        if (found := os.environ.get(match[1])) is None:
            raise InvalidInbox(f"{where}: the environment has no variable {match[1]}")
        return found

    return _VARIABLE.sub(read, text)
