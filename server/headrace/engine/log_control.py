"""The settings of the log as clients see and change them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.observability.logs import FORMATS, LogSettings

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
