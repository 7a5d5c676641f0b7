"""Declaration of a setting: its external names, type, meaning and valid values.

Command line, environment, settings file, completion and `docs/configuration.md` are derived from
the fields of the settings, declared by `setting`.
"""

import re
from dataclasses import Field, dataclass, field, replace
from typing import Any

ENV_PREFIX = "HEADRACE_"
Value = str | int | float | bool | list[str]
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class SettingsError(Exception):
    """A setting that is unknown or has an invalid value."""


def setting(default: Any, meaning: str, *aliases: str, **more: Any) -> Any:
    """Declare a field of the settings; `more` are further fields of its `Option`."""
    metadata = {"option": Option(default, meaning, aliases, **more)}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """A setting under its external names: a bool, int, str or list of str, as its default.

    `form` is a pattern that a text must match, and its description. `between` separates the values
    of a list in the environment; unless it is a colon, the command line takes one value per option.
    `metavar` represents the value in help, and guides completion. `section` is the title above this
    option and those after it.
    """

    default: Value
    meaning: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    form: tuple[str, str] = ("", "")
    between: str = ":"
    metavar: str = ""
    section: str = ""
    field: str = ""

    @classmethod
    def of(cls, declared: "Field[Any]") -> "Option":
        """The option of a field declared by `setting`."""
        option: Option = declared.metadata["option"]
        return replace(option, field=declared.name)

    @property
    def name(self) -> str:
        """The option's name in a settings file and, after two dashes, on the command line."""
        return self.field.replace("_", "-")

    @property
    def env(self) -> str:
        """The option's name in the environment."""
        return ENV_PREFIX + self.field.upper()

    @property
    def kind(self) -> type:
        """bool, int, str or list."""
        return type(self.default)

    def argument(self, switch: bool = False) -> tuple[list[str], dict[str, Any]]:
        """The arguments of argparse's `add_argument`; a `switch` takes no value.

        Texts are not converted, since `parse` has its own messages.
        """
        text = self.meaning.replace("%", "%%")
        if self.default not in ("", []):
            text += f" (default: {str(self.default).lower()})"
        metavar = self.metavar or {int: "N", bool: "BOOL"}.get(self.kind, "TEXT")
        if self.choices:
            metavar = f"{{{','.join(self.choices)}}}"
        keywords: dict[str, Any] = {"dest": self.field, "metavar": metavar, "help": text}
        if self.kind is list and self.between == ":":
            keywords |= {"nargs": "+", "action": "extend"}
        elif self.kind is list:
            keywords |= {"action": "append"}
        elif self.kind is bool and switch:
            del keywords["metavar"]
            keywords |= {"action": "store_const", "const": "true"}
        elif self.kind is bool:
            keywords |= {"nargs": "?", "const": "true"}
        return [f"--{name}" for name in (self.name, *self.aliases)], keywords

    def parse(self, value: object, where: str) -> Value:
        """Convert an external value; raises `SettingsError` with what was expected."""
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
            return self._number(text, where)
        pattern, expected = self.form
        if pattern and not re.fullmatch(pattern, text):
            raise SettingsError(f"{where} must be {expected}, got {text!r}")
        if self.choices and text not in self.choices:
            raise SettingsError(f"{where} must be one of {', '.join(self.choices)}, got {text!r}")
        return text

    def _number(self, text: str, where: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise SettingsError(f"{where} must be a whole number, got {text!r}") from None
        if number < self.least:
            raise SettingsError(f"{where} must be at least {self.least}, got {number}")
        if self.most is not None and number > self.most:
            raise SettingsError(f"{where} must be at most {self.most}, got {number}")
        return number
