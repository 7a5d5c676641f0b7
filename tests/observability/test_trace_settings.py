"""Which settings are in force, and which requests they pick."""

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest, ServerError, Unsupported
from headrace.observability.trace_settings import (
    Mode,
    SettingsTable,
    TraceConfig,
    TraceSettings,
    read_changes,
)

ON = TraceSettings(timestamps=True, rate=1)


def table(settings: TraceSettings = ON, mode: Mode = Mode.TRITON) -> SettingsTable:
    return SettingsTable(TraceConfig(mode, settings, "trace.json"))


def change(made: SettingsTable, model: str, **document: Any) -> None:
    lists = {
        name: value if isinstance(value, list) or value is None else [value]
        for name, value in document.items()
    }
    made.change(model, read_changes(lists))


def test_a_model_has_what_the_server_has() -> None:
    made = table()
    assert made.sampler("m") is made.sampler("other") is made.sampler()
    change(made, "", trace_rate="7")
    assert made.sampler("m").now() == TraceSettings(timestamps=True, rate=7)


def test_what_a_model_has_of_its_own_stays_its_own() -> None:
    made = table()
    change(made, "m", trace_rate="12", log_frequency="34")
    change(made, "", trace_rate="56", trace_count="78", trace_level="OFF")
    assert made.sampler("m").now() == TraceSettings(rate=12, count=78, log_frequency=34)
    assert made.sampler("other").now() == TraceSettings(rate=56, count=78)


def test_unset_settings_are_the_servers_and_then_those_of_the_command_line() -> None:
    made = table()
    change(made, "m", trace_rate="12", log_frequency="34")
    change(made, "", trace_rate="56", trace_count="78", trace_level="OFF")
    change(made, "", trace_rate=None, trace_count=[])
    assert made.sampler().now() == TraceSettings(rate=1)
    assert made.sampler("m").now() == TraceSettings(rate=12, log_frequency=34)
    change(made, "m", trace_rate=None, trace_level=None)
    assert made.sampler("m").now() == TraceSettings(rate=1, log_frequency=34)
    change(made, "m", log_frequency=None)
    assert made.sampler("m") is made.sampler()


def test_one_of_so_many_is_picked_as_often_as_the_count_says() -> None:
    sampler = table(TraceSettings(timestamps=True, rate=3, count=2)).sampler()
    assert [sampler.pick() for _ in range(12)] == [False, False, True] * 2 + [False] * 6
    assert sampler.spent
    assert sampler.now().count == 0


def test_none_is_picked_by_a_rate_of_none() -> None:
    sampler = table(TraceSettings(timestamps=True, rate=0)).sampler()
    assert not any(sampler.pick() for _ in range(3))


def test_what_is_left_of_a_count_outlives_other_changes() -> None:
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
    (TraceConfig(Mode.OPENTELEMETRY), TraceSettings(True, rate=0), ""),
    (TraceConfig(Mode.OPENTELEMETRY), TraceSettings(True, True), "TENSORS is not for mode"),
])  # fmt: skip
def test_settings_by_which_nothing_could_be_traced(
    config: TraceConfig, settings: TraceSettings, problem: str
) -> None:
    assert problem in config.problem(settings)
    assert bool(problem) == bool(config.problem(settings))


def test_such_a_change_is_refused_as_a_whole() -> None:
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
def test_what_cannot_be_set(
    name: str, values: list[object] | None, error: type[ServerError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read_changes({name: values})
