"""Trace settings as they are given at start-up: `[MODE,]KEY=VALUE`, and Triton's older options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.texts import whole_number
from headrace.observability.trace_settings import (
    Mode,
    TraceConfig,
    TraceSettings,
    read_levels,
    read_number,
)

DEFAULT_URL = "http://localhost:4318/v1/traces"
_GENERAL = ("level", "rate", "count", "mode")
_KEYS = {
    Mode.TRITON: ("file", "log-frequency"),
    Mode.OPENTELEMETRY: (
        "url", "resource", "bsp_max_queue_size", "bsp_schedule_delay",
        "bsp_max_export_batch_size",
    ),
}  # fmt: skip
_OLD_LEVELS = {"MIN": "TIMESTAMPS", "MAX": "TIMESTAMPS"}
# What OpenTelemetry's own variables say where no option does.
_VARIABLES = {
    "bsp_max_queue_size": "OTEL_BSP_MAX_QUEUE_SIZE",
    "bsp_schedule_delay": "OTEL_BSP_SCHEDULE_DELAY",
    "bsp_max_export_batch_size": "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "url": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
}
_BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_NUMBERS = {"rate": "trace_rate", "count": "trace_count", "log-frequency": "log_frequency"}
_MOST = 2**31 - 1


@dataclass(slots=True)
class _Given:
    """What has been said so far, by mode ("" for what is general) and key."""

    values: dict[tuple[str, str], str] = field(default_factory=dict)
    levels: list[str] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)


def read_trace_config(
    texts: Sequence[str], environment: Mapping[str, str] | None = None
) -> TraceConfig:
    """What to trace, and where to; of several values for a key the last one counts.

    Raises `ValueError` that quotes what is wrong and says what was expected.
    """
    given = _Given()
    _take_variables(given, environment or {})
    for text in texts:
        _take(given, text)
    try:
        mode = Mode(given.values.get(("", "mode"), Mode.TRITON))
    except ValueError:
        found = given.values["", "mode"]
        raise ValueError(f"mode={found!r}: expected {' or '.join(Mode)}") from None
    try:
        config = _config(mode, given)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    problem = config.problem(config.settings)
    if problem and config.mode is Mode.OPENTELEMETRY:  # otherwise nothing is traced, as in Triton
        raise ValueError(problem)
    return config


def old_options(
    file: str, levels: Sequence[str], rate: int, count: int, log_frequency: int
) -> list[str]:
    """What Triton's older options say, in the form of the newer one."""
    texts = [f"level={level}" for level in levels]
    texts += [f"triton,file={file}"] if file else []
    return [*texts, f"rate={rate}", f"count={count}", f"triton,log-frequency={log_frequency}"]


def _take(given: _Given, text: str) -> None:
    mode, key, value = "", *_pair(text)
    if "," in key:
        mode, key = (part.strip() for part in key.split(",", 1))
        if mode not in list(Mode):
            raise ValueError(f"{text!r}: unknown mode {mode!r}, expected {' or '.join(Mode)}")
    known = _KEYS[Mode(mode)] if mode else _GENERAL
    if key not in known:
        of = f" of mode {mode}" if mode else ""
        more = "" if mode else "; what belongs to a mode has its name before it: MODE,KEY=VALUE"
        raise ValueError(
            f"{text!r}: unknown setting {key!r}{of}, expected {', '.join(known)}{more}"
        )
    if key == "level":
        given.levels.append(_OLD_LEVELS.get(value, value))
    elif key == "resource":
        name, attribute = _pair(value)
        given.resource[name] = attribute
    else:
        given.values[mode, key] = value


def _take_variables(given: _Given, environment: Mapping[str, str]) -> None:
    if base := environment.get(_BASE_VARIABLE):
        given.values[Mode.OPENTELEMETRY, "url"] = f"{base.rstrip('/')}/v1/traces"
    for key, name in _VARIABLES.items():
        if value := environment.get(name):
            given.values[Mode.OPENTELEMETRY, key] = value


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ValueError(f"{text!r}: expected KEY=VALUE")
    return key.strip(), value.strip()


def _config(mode: Mode, given: _Given) -> TraceConfig:
    values = given.values
    levels = read_levels([level for level in given.levels if level != "OFF"] or ["OFF"])
    numbers: dict[str, Any] = {
        key.replace("-", "_"): read_number(_NUMBERS[key], value)
        for (_, key), value in values.items()
        if key in _NUMBERS
    }
    settings = replace(
        TraceSettings(timestamps="TIMESTAMPS" in levels, tensors="TENSORS" in levels), **numbers
    )
    if mode is Mode.TRITON:
        return TraceConfig(mode, settings, values.get((mode, "file"), ""))
    url = values.get((mode, "url"), DEFAULT_URL)
    queue = _size(values, "bsp_max_queue_size", 2048)
    batch = _size(values, "bsp_max_export_batch_size", min(512, queue))
    if batch > queue:
        raise ValueError(
            f"bsp_max_export_batch_size={batch}: expected at most bsp_max_queue_size, {queue}"
        )
    return TraceConfig(
        mode, settings,
        url=url if "://" in url else f"http://{url}",
        resource=given.resource,
        max_queue_size=queue,
        schedule_delay_ms=_size(values, "bsp_schedule_delay", 5000, least=0),
        max_export_batch_size=batch,
    )  # fmt: skip


def _size(values: dict[tuple[str, str], str], key: str, default: int, least: int = 1) -> int:
    text = values.get((Mode.OPENTELEMETRY, key), str(default))
    number = whole_number(text, least, _MOST)
    if number is None:
        raise ValueError(f"{key}={text[:40]!r}: expected a number from {least} to {_MOST}")
    return number
