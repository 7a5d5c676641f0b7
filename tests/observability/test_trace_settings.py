"""Trace settings: precedence, and selection of requests."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.build import make_tracing
from headrace.core.errors import InvalidRequest, LoadFailed, ServerError, Unsupported
from headrace.observability.trace_settings import (
    Choice,
    SettingsTable,
    TailRules,
    TraceConfig,
    TraceMode,
    TraceSettings,
    old_options,
    read_changes,
    read_trace_config,
)

ON = TraceSettings(timestamps=True, rate=1)


def table(settings: TraceSettings = ON, mode: TraceMode = TraceMode.TRITON) -> SettingsTable:
    return SettingsTable(TraceConfig(mode, settings, "trace.json"))


def change(made: SettingsTable, model: str, **document: Any) -> None:
    lists = {
        name: value if isinstance(value, list) or value is None else [value]
        for name, value in document.items()
    }
    made.change(model, read_changes(lists))


def test_a_model_inherits_the_servers_settings() -> None:
    made = table()
    assert made.sampler("m") is made.sampler("other") is made.sampler()
    change(made, "", trace_rate="7")
    assert made.sampler("m").now() == TraceSettings(timestamps=True, rate=7)
    change(made, "m", trace_rate="12", log_frequency="34")
    change(made, "", trace_rate="56", trace_count="78", trace_level="OFF")
    assert made.sampler("m").now() == TraceSettings(rate=12, count=78, log_frequency=34)
    assert made.sampler("other").now() == TraceSettings(rate=56, count=78)
    # An unset value is inherited from the server, then from the command line.
    change(made, "", trace_rate=None, trace_count=[])
    assert made.sampler().now() == TraceSettings(rate=1)
    assert made.sampler("m").now() == TraceSettings(rate=12, log_frequency=34)
    change(made, "m", trace_rate=None, trace_level=None)
    assert made.sampler("m").now() == TraceSettings(rate=1, log_frequency=34)
    change(made, "m", log_frequency=None)
    assert made.sampler("m") is made.sampler()


def test_sampling_by_rate_and_count() -> None:
    sampler = table(TraceSettings(timestamps=True, rate=3, count=2)).sampler()
    assert [sampler.pick() for _ in range(12)] == [False, False, True] * 2 + [False] * 6
    assert sampler.spent
    assert sampler.now().count == 0
    never = table(TraceSettings(timestamps=True, rate=0)).sampler()
    assert not any(never.pick() for _ in range(3))


def test_the_remaining_count_survives_other_changes() -> None:
    made = table()
    change(made, "", trace_count="5")
    change(made, "m", trace_count="3")
    for model in ("", "", "m"):
        assert made.sampler(model).pick()
    change(made, "", trace_rate="2")
    change(made, "m", log_frequency="1")
    assert made.sampler().now().count == 3
    assert made.sampler("m").now() == TraceSettings(True, rate=2, count=2, log_frequency=1)


def test_samplers_that_are_replaced_are_retired() -> None:
    made = table()
    change(made, "m", trace_rate="2")
    before = made.sampler(), made.sampler("m")
    retired = made.change("", {"log_frequency": 1})
    assert set(retired) == set(before)
    assert all(sampler.retired for sampler in before)
    assert not made.sampler("m").retired


@pytest.mark.parametrize(("config", "settings", "problem"), [
    (TraceConfig(file="f"), ON, ""), (TraceConfig(), TraceSettings(), ""),
    (TraceConfig(), ON, "trace file name is not given"),
    (TraceConfig(file="f"), TraceSettings(True, rate=0), "sample rate must be non-zero"),
    (TraceConfig(TraceMode.OPENTELEMETRY), TraceSettings(True, rate=0), ""),
    (TraceConfig(TraceMode.OPENTELEMETRY), TraceSettings(True, True), "TENSORS is not for mode"),
])  # fmt: skip
def test_settings_that_cannot_trace(
    config: TraceConfig, settings: TraceSettings, problem: str
) -> None:
    assert problem in config.problem(settings)
    assert bool(problem) == bool(config.problem(settings))


def test_an_invalid_change_is_refused_as_a_whole() -> None:
    made = table()
    change(made, "m", trace_level="TENSORS")
    before = made.sampler("m"), made.sampler()
    with pytest.raises(
        InvalidRequest, match="Attempting to set invalid trace setting :sample rate"
    ):
        change(made, "", trace_rate="0")
    assert (made.sampler("m"), made.sampler()) == before


@pytest.mark.parametrize(("name", "values", "error", "text"), [
    ("trace_file", ["x"], Unsupported, "trace file location can not be updated through net"),
    ("trace_file", None, Unsupported, "trace file location can not be updated through net"),
    ("trace_mode", ["triton"], Unsupported, "trace mode can not be updated"),
    ("trace_level", ["OFF", "TENSORS"], InvalidRequest, "Expect only one trace level 'OFF'"),
    ("trace_level", ["timestamps"], InvalidRequest, "unknown trace level 'timestamps'"),
    ("trace_level", [1], InvalidRequest, "unknown trace level '1'"),
    ("trace_rate", ["x"], InvalidRequest, "Unable to parse 'trace_rate', got: x"),
    ("trace_rate", ["1.5"], InvalidRequest, "Unable to parse 'trace_rate', got: 1.5"),
    ("trace_rate", [5], InvalidRequest, "'trace_rate' must be a string that holds a number"),
    ("trace_rate", ["1", "2"], InvalidRequest, "expect only 1 value for 'trace_rate'"),
    ("trace_rate", ["-1"], InvalidRequest, "out of range \\[ 0, 4294967295 \\], got: -1"),
    ("trace_count", ["-2"], InvalidRequest, "Expecting value >= -1, got:-2"),
    ("trace_count", ["10000000000"], InvalidRequest, "out of range \\[ -1, 2147483647 \\]"),
    ("log_frequency", ["10000000000"], InvalidRequest, "'log_frequency', value is out of"),
    ("log_frequency", ["9" * 5_000], InvalidRequest, "Unable to parse 'log_frequency'"),
    ("trace_levle", ["OFF"], InvalidRequest, "unknown trace setting 'trace_levle'"),
])  # fmt: skip
def test_invalid_settings(
    name: str, values: list[object] | None, error: type[ServerError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read_changes({name: values})


# --- at start-up


def test_nothing_is_traced_by_default() -> None:
    assert read_trace_config([]) == TraceConfig()
    assert TraceConfig().settings == TraceSettings(rate=1000, count=-1)


def test_a_file() -> None:
    texts = ["triton,file=/t.json", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS"]
    settings = TraceSettings(timestamps=True, rate=100, log_frequency=50)
    assert read_trace_config(texts) == TraceConfig(TraceMode.TRITON, settings, "/t.json")


def test_levels_add_up_and_other_values_replace_one_another() -> None:
    config = read_trace_config(["level=TIMESTAMPS", "rate=1", "level=TENSORS", "rate=2"])
    assert config.settings == TraceSettings(True, True, rate=2)
    assert read_trace_config(["level=OFF"]).settings.off


def test_rules_for_requests_beside_the_rate() -> None:
    texts = [
        "slow-ms=250", "failed=TRUE", "chosen=header:X-Trace", "chosen=id:debug-*",
        "chosen=parameter:Trace", "rate=0", "triton,file=f", "level=TIMESTAMPS",
    ]  # fmt: skip
    config = read_trace_config(texts)
    choices = Choice("header", "x-trace"), Choice("id", "debug-*"), Choice("parameter", "Trace")
    assert config.tail == TailRules(250_000_000, True, choices)
    assert config.problem(config.settings) == ""
    assert read_trace_config(["failed=true", "failed=0"]).tail == TailRules()


def test_the_older_options() -> None:
    texts = old_options("t.json", ["MIN"], 7, 5, 3)
    assert read_trace_config(texts) == TraceConfig(
        TraceMode.TRITON, TraceSettings(True, False, 7, 5, 3), "t.json"
    )
    assert read_trace_config([*texts, "rate=1"]).settings.rate == 1


def test_a_collector() -> None:
    config = read_trace_config(
        [
            "mode=opentelemetry", "opentelemetry,url=collector:4318/v1/traces",
            "opentelemetry,resource=service.name=x", "opentelemetry,resource=a.b=c=d", "rate=0",
            "level=TIMESTAMPS", "opentelemetry,bsp_schedule_delay=0",
        ]
    )  # fmt: skip
    assert config.options == {
        "url": ["http://collector:4318/v1/traces"], "resource": ["service.name=x", "a.b=c=d"],
        "bsp_max_queue_size": ["2048"], "bsp_schedule_delay": ["0"],
        "bsp_max_export_batch_size": ["512"],
    }  # fmt: skip
    assert config.settings == TraceSettings(timestamps=True, rate=0)


def test_options_win_over_opentelemetrys_variables() -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1/",
        "OTEL_BSP_MAX_QUEUE_SIZE": "9",
        "OTEL_BSP_SCHEDULE_DELAY": "8",
    }
    config = read_trace_config(
        ["mode=opentelemetry", "opentelemetry,bsp_schedule_delay=7"], variables
    )
    assert (config.url, config.schedule_delay_ms) == ("https://c:1/v1/traces", 7)
    assert (config.max_queue_size, config.max_export_batch_size) == (9, 9)
    variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "https://d:2/x"
    assert read_trace_config(["mode=opentelemetry"], variables).url == "https://d:2/x"


@pytest.mark.parametrize(("text", "message"), [
    ("rate", "'rate': expected KEY=VALUE"), ("rate=", "'rate=': expected KEY=VALUE"),
    ("=1", "'=1': expected KEY=VALUE"), ("rate=x", "Unable to parse 'trace_rate', got: x"),
    ("count=-2", "Expecting value >= -1, got:-2"),
    ("level=ALL", "unknown trace level 'ALL', expected OFF, or TIMESTAMPS, TENSORS or both"),
    ("mode=jaeger", "mode='jaeger': expected triton or opentelemetry"),
    ("file=x", "unknown setting 'file', expected level, rate, count, mode, slow-ms, failed,"),
    ("slow-ms=0", "slow-ms='0': expected milliseconds from 1 to"),
    ("slow-ms=fast", "slow-ms='fast': expected milliseconds from 1 to"),
    ("failed=often", "failed='often': expected true or false"),
    ("chosen=x-trace", "chosen='x-trace': expected id:PATTERN, header:NAME or parameter:NAME"),
    ("chosen=header:", "chosen='header:': expected id:PATTERN, header:NAME or parameter:NAME"),
    ("jaeger,file=x", "unknown mode 'jaeger', expected triton or opentelemetry"),
    ("triton,url=x", "unknown setting 'url' of mode triton, expected file, log-frequency"),
    ("opentelemetry,resource=x", "'x': expected KEY=VALUE"),
    ("opentelemetry,bsp_max_queue_size=0", "expected a number from 1 to"),
])  # fmt: skip
def test_invalid_options_are_reported(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_trace_config(["mode=opentelemetry", text])


def test_contradictory_options_are_reported() -> None:
    with pytest.raises(ValueError, match="at most bsp_max_queue_size, 2048"):
        read_trace_config(["mode=opentelemetry", "opentelemetry,bsp_max_export_batch_size=4096"])
    with pytest.raises(ValueError, match="TENSORS is not for mode opentelemetry"):
        read_trace_config(["mode=opentelemetry", "level=TENSORS"])


def test_tracing_without_a_target_is_reported(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    on = TraceSettings(timestamps=True)
    with caplog.at_level(logging.WARNING):
        make_tracing(TraceConfig())
        make_tracing(TraceConfig(settings=on, file=str(tmp_path / "t")))
        assert not caplog.records
        make_tracing(TraceConfig(settings=on))
    assert "nothing is traced: --trace-config triton,file=PATH says where to" in caplog.text


def test_the_missing_package_of_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.plugins.traces.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(LoadFailed, match=r"pip install 'headrace\[otel\]'"):
        make_tracing(TraceConfig(TraceMode.OPENTELEMETRY))
