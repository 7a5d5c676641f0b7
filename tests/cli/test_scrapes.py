"""Prometheus' text format, as prometheus_client writes it."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from headrace.plugins.commands.top_table import Sample, parse
from tests.protocol.strategies import PROPERTY

_VALUES = st.text(st.characters(exclude_categories=["Cs"]))


@PROPERTY
@given(st.dictionaries(st.tuples(_VALUES, _VALUES), st.floats(allow_nan=False), max_size=5))
def test_what_was_written_is_read(values: dict[tuple[str, str], float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "Help\nwith lines", ["a", "b"], registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    samples = parse(generate_latest(registry).decode()).get("g", [])
    assert {(s.labels["a"], s.labels["b"]): s.value for s in samples} == values


def test_histograms() -> None:
    registry = CollectorRegistry()
    Histogram("h", "Help", buckets=(1, 2), registry=registry).observe(1.5)
    samples = parse(generate_latest(registry).decode())
    assert samples["h_bucket"] == [
        Sample({"le": "1.0"}, 0), Sample({"le": "2.0"}, 1), Sample({"le": "+Inf"}, 1)
    ]  # fmt: skip
    assert samples["h_sum"] == [Sample({}, 1.5)]


def test_a_time_behind_the_value() -> None:
    assert parse('x{a="}",} 3 1700000000\n') == {"x": [Sample({"a": "}"}, 3)]}


@PROPERTY
@given(st.text())
def test_other_text(text: str) -> None:
    with suppress(ValueError):
        parse(text)


def test_a_page_of_something_else() -> None:
    with pytest.raises(ValueError, match="not a line of metrics: <html>"):
        parse("<html>")
