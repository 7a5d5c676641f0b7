"""Trace settings as they are given at start-up."""

import logging
import re
import sys
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.engine.tracing import make_tracing
from headrace.observability.trace_settings import (
    Mode,
    TraceConfig,
    TraceSettings,
    old_options,
    read_trace_config,
)


def test_nothing_is_traced_by_default() -> None:
    assert read_trace_config([]) == TraceConfig()
    assert TraceConfig().settings == TraceSettings(rate=1000, count=-1)


def test_a_file() -> None:
    texts = ["triton,file=/t.json", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS"]
    settings = TraceSettings(timestamps=True, rate=100, log_frequency=50)
    assert read_trace_config(texts) == TraceConfig(Mode.TRITON, settings, "/t.json")


def test_levels_add_up_and_other_values_replace_one_another() -> None:
    config = read_trace_config(["level=TIMESTAMPS", "rate=1", "level=TENSORS", "rate=2"])
    assert config.settings == TraceSettings(True, True, rate=2)
    assert read_trace_config(["level=OFF"]).settings.off


def test_the_older_options() -> None:
    texts = old_options("t.json", ["MIN"], 7, 5, 3)
    assert read_trace_config(texts) == TraceConfig(
        Mode.TRITON, TraceSettings(True, False, 7, 5, 3), "t.json"
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


def test_what_opentelemetrys_variables_say_counts_less_than_options() -> None:
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
    ("file=x", "unknown setting 'file', expected level, rate, count, mode; what belongs to a"),
    ("jaeger,file=x", "unknown mode 'jaeger', expected triton or opentelemetry"),
    ("triton,url=x", "unknown setting 'url' of mode triton, expected file, log-frequency"),
    ("opentelemetry,resource=x", "'x': expected KEY=VALUE"),
    ("opentelemetry,bsp_max_queue_size=0", "expected a number from 1 to"),
])  # fmt: skip
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_trace_config(["mode=opentelemetry", text])


def test_what_contradicts_itself_is_said() -> None:
    with pytest.raises(ValueError, match="at most bsp_max_queue_size, 2048"):
        read_trace_config(["mode=opentelemetry", "opentelemetry,bsp_max_export_batch_size=4096"])
    with pytest.raises(ValueError, match="TENSORS is not for mode opentelemetry"):
        read_trace_config(["mode=opentelemetry", "level=TENSORS"])


def test_tracing_to_nowhere_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    on = TraceSettings(timestamps=True)
    with caplog.at_level(logging.WARNING):
        make_tracing(TraceConfig())
        make_tracing(TraceConfig(settings=on, file=str(tmp_path / "t")))
        assert not caplog.records
        make_tracing(TraceConfig(settings=on))
    assert "nothing is traced: --trace-config triton,file=PATH says where to" in caplog.text


def test_what_a_collector_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.engine.span_writer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(LoadFailed, match=r"pip install 'headrace\[otel\]'"):
        make_tracing(TraceConfig(Mode.OPENTELEMETRY))
