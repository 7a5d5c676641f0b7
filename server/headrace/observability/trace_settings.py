"""Trace settings, of the server and of single models.

Each setting is declared once, in `_NUMBERS` and `_COLLECTOR`: its name on the command line
(`--trace-config [MODE,]KEY=VALUE`, or one of Triton's older options), its name in the protocol, its
field and its valid values.

A model inherits the server's settings, and the server those of the command line, unless they are
set. Models without settings of their own share the server's sampler, and its count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.core.texts import whole_number

DEFAULT_URL = "http://localhost:4318/v1/traces"
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
_OLD_LEVELS = {"MIN": TIMESTAMPS, "MAX": TIMESTAMPS}
_MAX_UINT32 = 2**32 - 1
_MAX_INT32 = 2**31 - 1
# By the protocol's name: the field, which is also the key on the command line, and the least and
# greatest value.
_NUMBERS = {
    "trace_rate": ("rate", 0, _MAX_UINT32),
    "trace_count": ("count", -1, _MAX_INT32),
    "log_frequency": ("log_frequency", 0, _MAX_UINT32),
}
_KEYS = {field.replace("_", "-"): name for name, (field, _, _) in _NUMBERS.items()}
_FIXED = {
    "trace_file": "trace file location can not be updated through network protocol",
    "trace_mode": "trace mode can not be updated through network protocol",
}


class _Size(NamedTuple):
    """A number of the span exporter, and its OpenTelemetry environment variable."""

    field: str
    variable: str
    default: int
    least: int = 1


_COLLECTOR = {
    "bsp_max_queue_size": _Size("max_queue_size", "OTEL_BSP_MAX_QUEUE_SIZE", 2048),
    "bsp_schedule_delay": _Size("schedule_delay_ms", "OTEL_BSP_SCHEDULE_DELAY", 5000, 0),
    "bsp_max_export_batch_size": _Size(
        "max_export_batch_size", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512
    ),
}
_URL_VARIABLE, _BASE_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


class TraceMode(StrEnum):
    """The form of traces."""

    TRITON = "triton"  # a JSON file, in the form that Triton's tools read
    OPENTELEMETRY = "opentelemetry"  # spans for a collector


# The keys of the command line by mode; "" for general ones.
_MODE_KEYS: dict[str, tuple[str, ...]] = {
    "": ("level", "rate", "count", "mode", "slow-ms", "failed", "chosen"),
    TraceMode.TRITON: ("file", "log-frequency"),
    TraceMode.OPENTELEMETRY: ("url", "resource", *_COLLECTOR),
}


class Choice(NamedTuple):
    """Requests to trace whatever the rate is.

    `kind` is `id`, with a pattern of shell style as the `name`, or `header` or `parameter`, which
    has to be there, and not `0` or `false`.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class TailRules:
    """Requests that are traced beside those that the rate picks.

    Requests that take `slow_ns` or longer, and with `failed` those that end with an error, are
    known at their end: all have to be recorded until then. `choices` are known at their begin.
    """

    slow_ns: int = 0
    failed: bool = False
    choices: tuple[Choice, ...] = ()

    @property
    def records(self) -> bool:
        """True if every request has to be recorded."""
        return bool(self.slow_ns or self.failed)

    @property
    def headers(self) -> tuple[str, ...]:
        """The lower-case names of the headers of choices."""
        return tuple(name for kind, name in self.choices if kind == "header")

    def chooses(
        self, request_id: str, parameters: Mapping[str, object], header: Callable[[str], str]
    ) -> bool:
        """True if a request is to be traced; `header` returns the value of one, "" for none."""
        for kind, name in self.choices:
            if kind == "id":
                if request_id and fnmatchcase(request_id, name):
                    return True
            else:
                found = header(name) if kind == "header" else parameters.get(name, "")
                if str(found).strip().lower() not in ("", "0", "false"):
                    return True
        return False

    def keeps(self, duration_ns: int, error: str) -> bool:
        """True for a request that was slow, or has failed."""
        return (0 < self.slow_ns <= duration_ns) or (self.failed and bool(error))


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Changeable settings: one request in `rate` is traced, 0 for those traced by clients only.

    `count` is the number still to be traced, -1 for no limit. Every `log_frequency` traces go to a
    file of their own, unless it is 0.
    """

    timestamps: bool = False
    tensors: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    @property
    def off(self) -> bool:
        """True if nothing of a request is recorded."""
        return not (self.timestamps or self.tensors)

    @property
    def levels(self) -> list[str]:
        """The levels under the protocol's names."""
        names = [TIMESTAMPS] * self.timestamps + [TENSORS] * self.tensors
        return names or [OFF]


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Settings fixed at start-up: the destination of traces, and the initial settings.

    `options` are further settings of the mode, in the order of its documentation.
    """

    mode: TraceMode = TraceMode.TRITON
    settings: TraceSettings = TraceSettings()
    file: str = ""
    url: str = ""
    resource: Mapping[str, str] | None = None
    max_queue_size: int = 2048
    schedule_delay_ms: int = 5000
    max_export_batch_size: int = 512
    tail: TailRules = TailRules()

    @property
    def options(self) -> dict[str, list[str]]:
        """The options of the mode under the protocol's names."""
        if self.mode is TraceMode.TRITON:
            return {"trace_file": [self.file]}
        resource = [f"{key}={value}" for key, value in (self.resource or {}).items()]
        sizes = {key: [str(getattr(self, size.field))] for key, size in _COLLECTOR.items()}
        return {"url": [self.url], "resource": resource, **sizes}

    def problem(self, settings: TraceSettings) -> str:
        """The reason why these settings cannot trace anything; "" if they can, or are off."""
        if settings.off:
            return ""
        if self.mode is TraceMode.OPENTELEMETRY:
            return "" if not settings.tensors else f"{TENSORS} is not for mode {self.mode}"
        if settings.rate == 0 and not (self.tail.records or self.tail.choices):
            return "sample rate must be non-zero"
        return "" if self.file else "trace file name is not given"


class Sampler:
    """Samples requests by settings that several models may share. Owned by the event-loop thread.

    `open` counts unfinished traces. A sampler that is retired, or has sampled its count, is
    finished once none is open.
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
        """True if it has sampled its count."""
        return self.remaining == 0

    def pick(self) -> bool:
        """True if the next request is to be traced."""
        if not self.rate or not self.remaining:
            return False
        self.seen += 1
        return self.seen % self.rate == 0 and self.take()

    def take(self) -> bool:
        """Count a request that is traced whatever the rate is; False if the count is reached."""
        if not self.remaining:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True

    def now(self) -> TraceSettings:
        """The settings with the remaining count."""
        return replace(self.settings, count=self.remaining)


Changes = Mapping[str, Any]  # by field; None to unset one


class SettingsTable:
    """The settings of the server and its models, and the samplers they make."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._own: dict[str, dict[str, Any]] = {"": {}}  # "" is the server
        self._samplers = {"": Sampler(config.settings)}

    @property
    def models(self) -> list[str]:
        """The models with settings of their own, and "" for the server."""
        return list(self._samplers)

    def sampler(self, model: str = "") -> Sampler:
        """The sampler of a model, or of all models without settings of their own."""
        return self._samplers.get(model) or self._samplers[""]

    def change(self, model: str, changes: Changes) -> list[Sampler]:
        """Change settings of a model or, for "", of the server; returns the replaced samplers.

        Raises `InvalidRequest`, and changes nothing, if the result cannot trace.
        """
        made: dict[str, tuple[dict[str, Any], TraceSettings]] = {}
        base = self._samplers[""].now() if model else self.config.settings
        # Settings that models inherit from the server change with it.
        for name in [model] if model else ["", *(name for name in self._own if name)]:
            own = dict(self._own.get(name, {}))
            if "count" in own:
                own["count"] = self._samplers[name].remaining
            if name == model:
                own = {field: v for field, v in {**own, **changes}.items() if v is not None}
            made[name] = own, _merged(base, own)
            if not name:
                base = made[""][1]
            if (own or not name) and (problem := self.config.problem(made[name][1])):
                raise InvalidRequest(f"Attempting to set invalid trace setting :{problem}")
        retired = [self._samplers.pop(name) for name in made if name in self._samplers]
        for sampler in retired:
            sampler.retired = True
        for name, (own, settings) in made.items():
            if own or not name:
                self._own[name], self._samplers[name] = own, Sampler(settings)
            else:  # inherit from the server again
                self._own.pop(name, None)
        return retired


def _merged(base: TraceSettings, own: Mapping[str, Any]) -> TraceSettings:
    fields = {name: value for name, value in own.items() if name != "levels"}
    if "levels" in own:
        levels = own["levels"]
        fields |= {"timestamps": TIMESTAMPS in levels, "tensors": TENSORS in levels}
    return replace(base, **fields)


def read_changes(document: Mapping[str, Sequence[object] | None]) -> dict[str, Any]:
    """The changes in a client's document, by field: lists of values; an empty one unsets.

    Raises `InvalidRequest`, or `Unsupported` for fixed settings.
    """
    changes: dict[str, Any] = {}
    for name, values in document.items():
        if name in _FIXED:
            raise Unsupported(_FIXED[name])
        if name == "trace_level":
            changes["levels"] = read_levels(values) if values else None
        elif name in _NUMBERS:
            changes[_NUMBERS[name][0]] = _number(name, values) if values else None
        else:
            expected = ", ".join(("trace_level", *_NUMBERS))
            raise InvalidRequest(f"unknown trace setting '{name[:80]}', expected one of {expected}")
    return changes


def read_levels(values: Sequence[object]) -> tuple[str, ...]:
    """Parse levels by name; raises `InvalidRequest`."""
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
    """Parse the number of a setting; raises `InvalidRequest`."""
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


# --- the command line

Given = dict[tuple[str, str], list[str]]  # all values by mode ("" for general ones) and key


def read_trace_config(
    texts: Sequence[str], environment: Mapping[str, str] | None = None
) -> TraceConfig:
    """Parse the settings of the command line; of several values for a key the last one counts.

    Raises `ValueError` that quotes the invalid text and states what was expected.
    """
    given = _of_variables(environment or {})
    for text in texts:
        mode, key, value = _option(text)
        given.setdefault((mode, key), []).append(value)
    [*_, found] = given.get(("", "mode"), [TraceMode.TRITON])
    try:
        config = _config(TraceMode(found), given)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    problem = config.problem(config.settings)
    # In the other mode nothing is traced, as in Triton.
    if problem and config.mode is TraceMode.OPENTELEMETRY:
        raise ValueError(problem)
    return config


def old_options(
    file: str, levels: Sequence[str], rate: int, count: int, log_frequency: int
) -> list[str]:
    """Triton's older options in the newer form."""
    texts = [f"level={level}" for level in levels]
    texts += [f"triton,file={file}"] if file else []
    return [*texts, f"rate={rate}", f"count={count}", f"triton,log-frequency={log_frequency}"]


def _of_variables(environment: Mapping[str, str]) -> Given:
    """Settings from OpenTelemetry's own environment variables, unless given by options."""
    base = environment.get(_BASE_VARIABLE)
    found = {key: environment.get(size.variable) for key, size in _COLLECTOR.items()}
    found["url"] = environment.get(_URL_VARIABLE) or (base and f"{base.rstrip('/')}/v1/traces")
    return {(TraceMode.OPENTELEMETRY, key): [value] for key, value in found.items() if value}


def _option(text: str) -> tuple[str, str, str]:
    """Split an option into mode ("" for none), key and value; raises `ValueError`."""
    mode, (key, value) = "", _pair(text)
    if "," in key:
        mode, key = (part.strip() for part in key.split(",", 1))
        if mode not in list(TraceMode):
            raise ValueError(f"{text!r}: unknown mode {mode!r}, expected {' or '.join(TraceMode)}")
    known = _MODE_KEYS[mode]
    if key not in known:
        of = f" of mode {mode}" if mode else ""
        more = "" if mode else "; what belongs to a mode has its name before it: MODE,KEY=VALUE"
        raise ValueError(
            f"{text!r}: unknown setting {key!r}{of}, expected {', '.join(known)}{more}"
        )
    if (mode, key) == ("", "mode") and value not in list(TraceMode):
        raise ValueError(f"mode={value!r}: expected {' or '.join(TraceMode)}")
    if key == "resource":
        _pair(value)
    return mode, key, value


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ValueError(f"{text!r}: expected KEY=VALUE")
    return key.strip(), value.strip()


def _config(mode: TraceMode, given: Given) -> TraceConfig:
    levels = [_OLD_LEVELS.get(level, level) for level in given.get(("", "level"), ())]
    own: dict[str, Any] = {"levels": read_levels([level for level in levels if level != OFF])}
    last = {key: values[-1] for key, values in given.items()}
    for (_, key), value in last.items():
        if key in _KEYS:
            own[_NUMBERS[_KEYS[key]][0]] = read_number(_KEYS[key], value)
    settings = _merged(TraceSettings(), own)
    tail = _tail(given)
    if mode is TraceMode.TRITON:
        return TraceConfig(mode, settings, last.get((mode, "file"), ""), tail=tail)
    url = last.get((mode, "url"), DEFAULT_URL)
    sizes: dict[str, Any] = {
        size.field: _size(key, size, last.get((mode, key))) for key, size in _COLLECTOR.items()
    }
    queue, batch = sizes["max_queue_size"], sizes["max_export_batch_size"]
    if (mode, "bsp_max_export_batch_size") not in last:
        sizes["max_export_batch_size"] = min(batch, queue)
    elif batch > queue:
        raise ValueError(
            f"bsp_max_export_batch_size={batch}: expected at most bsp_max_queue_size, {queue}"
        )
    return TraceConfig(
        mode,
        settings,
        url=url if "://" in url else f"http://{url}",
        resource=dict(map(_pair, given.get((mode, "resource"), ()))),
        tail=tail,
        **sizes,
    )


def _tail(given: Given) -> TailRules:
    slow, failed = 0, False
    for text in given.get(("", "slow-ms"), ()):
        found = whole_number(text, 1, _MAX_INT32)
        if found is None:
            raise ValueError(f"slow-ms={text[:40]!r}: expected milliseconds from 1 to {_MAX_INT32}")
        slow = found * 1_000_000
    for text in given.get(("", "failed"), ()):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"failed={text[:40]!r}: expected true or false")
        failed = text.lower() in ("true", "1")
    return TailRules(slow, failed, tuple(map(_choice, given.get(("", "chosen"), ()))))


def _choice(text: str) -> Choice:
    kind, _, name = text.partition(":")
    if kind not in ("id", "header", "parameter") or not name:
        raise ValueError(
            f"chosen={text[:80]!r}: expected id:PATTERN, header:NAME or parameter:NAME"
        )
    return Choice(kind, name.lower() if kind == "header" else name)


def _size(key: str, size: _Size, text: str | None) -> int:
    if text is None:
        return size.default
    number = whole_number(text, size.least, _MAX_INT32)
    if number is None:
        expected = f"expected a number from {size.least} to {_MAX_INT32}"
        raise ValueError(f"{key}={text[:40]!r}: {expected}")
    return number
