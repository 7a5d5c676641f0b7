"""How a setting is declared and read: its names outside, its type, and what it may be."""

import re
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

ENV_PREFIX = "HEADRACE_"
Value = str | int | float | bool | list[str]
# Of texts that are more than that.
METAVARS = {
    "model_repository": "DIR", "model_file": "FILE", "load_model": "MODEL", "pin_model": "MODEL",
    "environment_cache": "DIR", "wheelhouse": "DIR", "grpc_server_cert": "FILE",
    "grpc_server_key": "FILE", "grpc_root_cert": "FILE", "log_file": "FILE", "trace_file": "FILE",
}  # fmt: skip
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class SettingsError(Exception):
    """A setting that is unknown or has a value that cannot be."""


def setting(
    default: Any,
    meaning: str,
    *aliases: str,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int | None = None,
    form: tuple[str, str] = ("", ""),
    between: str = ":",
) -> Any:
    """A field of the settings; the arguments are what `Option` has of it."""
    metadata = {
        "meaning": meaning, "aliases": aliases, "choices": choices, "least": least, "most": most,
        "form": form, "between": between,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """A setting under its outside names. `kind` is bool, int, str or list (of str).

    `form` is a pattern that a text must match, and what that means in words. `between` stands
    between the values of a list in the environment; unless it is a colon, the command line takes
    one value each time.
    """

    name: str
    field: str
    env: str
    kind: type
    default: Value
    meaning: str
    aliases: tuple[str, ...]
    choices: tuple[str, ...]
    least: int
    most: int | None
    form: tuple[str, str]
    between: str

    @property
    def metavar(self) -> str:
        """What stands for the value in help, which completion goes by, too."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        if self.field in METAVARS:
            return METAVARS[self.field]
        return {int: "N", bool: "BOOL"}.get(self.kind, "TEXT")

    @classmethod
    def of(cls, declared: "Field[Any]") -> "Option":
        """The option of a field that `setting` has declared."""
        default = [] if declared.default is MISSING else declared.default
        return cls(
            declared.name.replace("_", "-"),
            declared.name,
            ENV_PREFIX + declared.name.upper(),
            type(default),
            default,
            **declared.metadata,
        )

    def parse(self, value: object, where: str) -> Value:
        """A value from the outside; raises `SettingsError` that says what was expected."""
        text = str(value)
        if isinstance(value, (list, dict)) and self.kind is not list:
            raise SettingsError(f"{where} must be a single value, got {text}")
        if self.kind is list:
            items = value if isinstance(value, list) else text.split(self.between)
            return [str(item) for item in items if str(item)]
        if self.kind is bool:
            if text.lower() in (*_TRUE, *_FALSE):
                return text.lower() in _TRUE
            raise SettingsError(f"{where} must be true or false, got {text!r}")
        if self.kind is int:
            try:
                number = int(text)
            except ValueError:
                raise SettingsError(f"{where} must be a whole number, got {text!r}") from None
            most = 65_535 if "port" in self.name else self.most
            if number < self.least or (most is not None and number > most):
                expected = f"at least {self.least}" if number < self.least else f"at most {most}"
                raise SettingsError(f"{where} must be {expected}, got {number}")
            return number
        pattern, expected = self.form
        if pattern and not re.fullmatch(pattern, text):
            raise SettingsError(f"{where} must be {expected}, got {text!r}")
        if self.choices and text not in self.choices:
            raise SettingsError(f"{where} must be one of {', '.join(self.choices)}, got {text!r}")
        return text
