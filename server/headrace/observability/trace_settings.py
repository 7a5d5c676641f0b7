"""What is traced: settings of the server and of single models, as values.

A model's settings that are not its own are the server's, and the server's that nobody has set are
those of the command line. Who has none of its own shares the server's sampler, and its count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.core.errors import InvalidRequest, Unsupported

TRACE_FILE_FIXED = "trace file location can not be updated through network protocol"
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
_MAX_UINT32 = 2**32 - 1
_MAX_INT32 = 2**31 - 1
# By a client's name of a setting, its field and the least and greatest value.
_NUMBERS = {
    "trace_rate": ("rate", 0, _MAX_UINT32),
    "trace_count": ("count", -1, _MAX_INT32),
    "log_frequency": ("log_frequency", 0, _MAX_UINT32),
}


class Mode(StrEnum):
    """What becomes of traces."""

    TRITON = "triton"  # a JSON file, in the form that Triton's tools read
    OPENTELEMETRY = "opentelemetry"  # spans for a collector


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What to trace: one request in `rate`, 0 for none unless its client traces it.

    `count` is how many more, -1 for any number. Every `log_frequency` traces are a file of their
    own, unless it is 0.
    """

    timestamps: bool = False
    tensors: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    @property
    def off(self) -> bool:
        """Whether nothing is to be recorded of a request."""
        return not (self.timestamps or self.tensors)

    @property
    def levels(self) -> list[str]:
        """What is recorded, by the protocol's names."""
        names = [TIMESTAMPS] * self.timestamps + [TENSORS] * self.tensors
        return names or [OFF]


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What is fixed at start-up: where traces go, and the settings to begin with.

    `options` are what is told of the mode beside, in the order of its documentation.
    """

    mode: Mode = Mode.TRITON
    settings: TraceSettings = TraceSettings()
    file: str = ""
    url: str = ""
    resource: Mapping[str, str] | None = None
    max_queue_size: int = 2048
    schedule_delay_ms: int = 5000
    max_export_batch_size: int = 512

    @property
    def options(self) -> dict[str, list[str]]:
        """The options of the mode by the names that clients know."""
        if self.mode is Mode.TRITON:
            return {"trace_file": [self.file]}
        resource = [f"{key}={value}" for key, value in (self.resource or {}).items()]
        return {
            "url": [self.url],
            "resource": resource,
            "bsp_max_queue_size": [str(self.max_queue_size)],
            "bsp_schedule_delay": [str(self.schedule_delay_ms)],
            "bsp_max_export_batch_size": [str(self.max_export_batch_size)],
        }

    def problem(self, settings: TraceSettings) -> str:
        """Why nothing could be traced by settings that are not off; "" for none."""
        if settings.off:
            return ""
        if self.mode is Mode.OPENTELEMETRY:
            return "" if not settings.tensors else f"{TENSORS} is not for mode {self.mode}"
        if settings.rate == 0:
            return "sample rate must be non-zero"
        return "" if self.file else "trace file name is not given"


class Sampler:
    """Picks requests by settings that several models may share. Owned by the event-loop thread.

    `open` counts traces under way. Once it is retired, or has picked all that it may, and none is
    under way, nothing more comes of it.
    """

    __slots__ = ("open", "rate", "remaining", "retired", "seen", "settings")

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.rate = settings.rate
        self.remaining = settings.count
        self.seen = 0
        self.open = 0
        self.retired = False

    @property
    def spent(self) -> bool:
        """Whether it has picked as many as it may."""
        return self.remaining == 0

    def pick(self) -> bool:
        """Whether to trace the next request."""
        if not self.rate or not self.remaining:
            return False
        self.seen += 1
        if self.seen % self.rate:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True

    def now(self) -> TraceSettings:
        """Its settings with the count that is left."""
        return replace(self.settings, count=self.remaining)


Changes = Mapping[str, Any]  # by field; None for what is not set any more


class SettingsTable:
    """The settings of the server and its models, and the samplers they make."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._own: dict[str, dict[str, Any]] = {"": {}}  # "" stands for the server
        self._samplers = {"": Sampler(config.settings)}

    @property
    def models(self) -> list[str]:
        """Those with settings of their own, and "" for the server."""
        return list(self._samplers)

    def sampler(self, model: str = "") -> Sampler:
        """What picks a model's requests, or those of models without settings of their own."""
        return self._samplers.get(model) or self._samplers[""]

    def change(self, model: str, changes: Changes) -> list[Sampler]:
        """Set, or unset, settings of a model or, for "", of the server; the samplers replaced.

        Raises `InvalidRequest` if nothing could be traced by them, and changes nothing then.
        """
        made = {model: self._with(model, changes)}
        if not model:  # what models have of the server changes with it
            base = made[""][1] or self.config.settings
            for name, own in self._own.items():
                if name:
                    made[name] = own, self._effective(name, own, base)
        for _, settings in made.values():
            if settings is not None and (problem := self.config.problem(settings)):
                raise InvalidRequest(f"Attempting to set invalid trace setting :{problem}")
        retired: list[Sampler] = []
        for name, (own, settings) in made.items():
            old = self._samplers.pop(name, None)
            if old is not None:
                old.retired = True
                retired.append(old)
            if settings is None:
                self._own.pop(name, None)
            else:
                self._own[name] = dict(own)
                self._samplers[name] = Sampler(settings)
        return retired

    def _with(self, model: str, changes: Changes) -> tuple[dict[str, Any], TraceSettings | None]:
        """What a model, or the server, would have of its own, and what that makes, if anything."""
        own = dict(self._own.get(model, {}))
        for field, value in changes.items():
            own.pop(field, None)
            if value is not None:
                own[field] = value
        if "count" in own and "count" not in changes:
            own["count"] = self._samplers[model].remaining
        if model and not own:
            return own, None
        base = self._samplers[""].now() if model else self.config.settings
        return own, _merged(base, own)

    def _effective(self, model: str, own: dict[str, Any], base: TraceSettings) -> TraceSettings:
        if "count" in own:
            own["count"] = self._samplers[model].remaining
        return _merged(base, own)


def _merged(base: TraceSettings, own: Mapping[str, Any]) -> TraceSettings:
    fields = {name: value for name, value in own.items() if name != "levels"}
    if "levels" in own:
        levels = own["levels"]
        fields |= {"timestamps": TIMESTAMPS in levels, "tensors": TENSORS in levels}
    return replace(base, **fields)


def read_changes(document: Mapping[str, Sequence[object] | None]) -> dict[str, Any]:
    """What a client has asked for, by field: lists of values, of which none at all means unset.

    Raises `InvalidRequest`, or `Unsupported` for what is fixed.
    """
    changes: dict[str, Any] = {}
    for name, values in document.items():
        if name == "trace_file":
            raise Unsupported(TRACE_FILE_FIXED)
        if name == "trace_mode":
            raise Unsupported("trace mode can not be updated through network protocol")
        if name == "trace_level":
            changes["levels"] = read_levels(values) if values else None
        elif name in _NUMBERS:
            changes[_NUMBERS[name][0]] = _number(name, values) if values else None
        else:
            expected = ", ".join(("trace_level", *_NUMBERS))
            raise InvalidRequest(f"unknown trace setting '{name[:80]}', expected one of {expected}")
    return changes


def read_levels(values: Sequence[object]) -> tuple[str, ...]:
    """Levels by their names; raises `InvalidRequest`."""
    for value in values:
        if value not in (OFF, TIMESTAMPS, TENSORS):
            raise InvalidRequest(
                f"unknown trace level {str(value)[:80]!r}, expected {OFF}, or {TIMESTAMPS},"
                f" {TENSORS} or both"
            )
    if OFF in values and len(values) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    return tuple(str(value) for value in values if value != OFF)


def _number(name: str, values: Sequence[object]) -> int:
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name}'")
    [value] = values
    if not isinstance(value, str):
        raise InvalidRequest(f"'{name}' must be a string that holds a number")
    return read_number(name, value)


def read_number(name: str, text: str) -> int:
    """The number of a setting; raises `InvalidRequest`."""
    _, least, most = _NUMBERS[name]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(text) > 40:
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:80]}")
    number = int(text)
    if number < least and name == "trace_count":
        raise InvalidRequest(f"Unable to parse '{name}'. Expecting value >= {least}, got:{number}")
    if not least <= number <= most:
        raise InvalidRequest(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {number}"
        )
    return number
