"""Custom metrics of models."""

import logging
import os

import pytest

from headrace.engine.exposition import OPENMETRICS, PROTOBUF, TEXT, Exposition
from headrace.engine.metrics import collected
from headrace.observability.model_metrics import ModelMetrics


def family(metrics: ModelMetrics, owner: str, name: str, kind: str) -> None:
    """A metric family as a model declares it."""
    document = {"do": "family", "family": name, "kind": kind, "description": f"About {name}"}
    metrics.change(owner, document)


def change(
    metrics: ModelMetrics, owner: str, name: str, do: str, value: float = 0, **more: object
) -> None:
    """A change of a metric with one label."""
    labels = {"a": str(more.pop("label", "b"))}
    metrics.change(owner, {"do": do, "family": name, "labels": labels, "value": value, **more})


def samples(metrics: ModelMetrics) -> dict[str, float]:
    """Samples by name and label values."""
    found = [m for family, readings in metrics.collect() for m in collected([family], readings)]
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in found
        for sample in metric.samples
    }


@pytest.fixture
def metrics() -> ModelMetrics:
    return ModelMetrics()


def test_values(metrics: ModelMetrics) -> None:
    family(metrics, "m", "calls", "COUNTER")
    family(metrics, "m", "level", "GAUGE")
    change(metrics, "m", "calls", "create")
    change(metrics, "m", "calls", "increment", 2)
    change(metrics, "m", "calls", "increment", 1, label="c")
    change(metrics, "m", "level", "set", 5)
    change(metrics, "m", "level", "increment", -2)
    assert samples(metrics) == {"calls b": 2, "calls c": 1, "level b": 3}
    assert metrics.value({"family": "calls", "labels": {"a": "b"}}) == 2
    assert metrics.value({"family": "calls", "labels": {}}) is None
    assert metrics.value({"family": "nothing", "labels": {}}) is None


@pytest.mark.parametrize("format", [TEXT, OPENMETRICS, PROTOBUF])
def test_texts_of_models_never_break_a_scrape(metrics: ModelMetrics, format: Exposition) -> None:
    """A file's name of any bytes has half surrogate pairs, as a label of a model."""
    half = os.fsdecode(b"caf\xe9")
    about = {"do": "family", "family": "files", "kind": "GAUGE", "description": half}
    metrics.change("m", about)
    change(metrics, "m", "files", "set", 5, label=half)
    [(found, sources)] = metrics.collect()
    [metric] = collected([found], sources)
    assert b"caf?" in format.write(metric, ())
    assert metrics.value({"family": "files", "labels": {"a": half}}) == 5


def test_families_change_during_a_scrape(metrics: ModelMetrics) -> None:
    family(metrics, "m", "first", "GAUGE")
    family(metrics, "n", "second", "GAUGE")
    change(metrics, "n", "second", "create")
    reading = metrics.collect()
    assert next(reading)[0].name == "first"
    change(metrics, "n", "second", "set", 5)
    family(metrics, "m", "third", "GAUGE")
    metrics.forget("m")
    [(found, sources)] = reading
    assert (found.name, sources) == ("second", [({"a": "b"}, 5.0)])


def test_a_histogram(metrics: ModelMetrics) -> None:
    family(metrics, "m", "sizes", "HISTOGRAM")
    change(metrics, "m", "sizes", "create", buckets=[1.0, 2.5])
    for value in (0.5, 1.0, 1.5, 9.0):
        change(metrics, "m", "sizes", "observe", value)
    assert samples(metrics) == {
        "sizes_bucket b 1": 2, "sizes_bucket b 2.5": 3, "sizes_bucket b +Inf": 4,
        "sizes_count b": 4, "sizes_sum b": 12,
    }  # fmt: skip
    metrics = ModelMetrics()  # without buckets, all are counted
    family(metrics, "m", "sizes", "HISTOGRAM")
    change(metrics, "m", "sizes", "create", buckets=[])
    change(metrics, "m", "sizes", "observe", 3)
    assert samples(metrics) == {"sizes_bucket b +Inf": 1, "sizes_count b": 1, "sizes_sum b": 3}


def test_a_family_is_deleted_as_often_as_it_was_made(metrics: ModelMetrics) -> None:
    for owner in ("m", "m", "n"):
        family(metrics, owner, "calls", "COUNTER")
    for owner in ("m", "n"):
        change(metrics, owner, "calls", "increment", 1)
        change(metrics, owner, "calls", "increment", 1, label=owner)
    delete: dict[str, object] = {"do": "delete", "family": "calls"}
    metrics.change("m", delete)
    assert samples(metrics) == {"calls b": 2, "calls m": 1, "calls n": 1}
    metrics.change("m", delete)
    assert samples(metrics) == {"calls b": 2, "calls n": 1}
    metrics.change("m", delete)  # no family of its own is left
    metrics.change("n", delete)
    assert samples(metrics) == {}
    family(metrics, "m", "calls", "GAUGE")


def test_models_share_a_metric_until_the_last_unload(metrics: ModelMetrics) -> None:
    for owner in ("m", "n"):
        family(metrics, owner, "calls", "COUNTER")
        change(metrics, owner, "calls", "increment", 1)
    change(metrics, "n", "calls", "increment", 1, label="own")
    metrics.forget("n")
    assert samples(metrics) == {"calls b": 2}
    change(metrics, "n", "calls", "increment", 1)
    assert samples(metrics) == {"calls b": 2}
    metrics.forget("m")
    assert samples(metrics) == {}


def test_a_family_has_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    metrics = ModelMetrics()
    family(metrics, "m", "calls", "COUNTER")
    family(metrics, "n", "calls", "GAUGE")
    change(metrics, "n", "calls", "set", 1)
    assert samples(metrics) == {}
    assert "metric calls is a counter already, and cannot be a GAUGE" in caplog.text


@pytest.mark.parametrize(("first", "second", "shared"), [
    (("x_total", "COUNTER"), ("x", "GAUGE"), "x"),
    (("x", "HISTOGRAM"), ("x_total", "COUNTER"), "x"),
    (("x", "COUNTER"), ("x_total", "COUNTER"), "x"),
    (("x", "HISTOGRAM"), ("x_sum", "GAUGE"), "x_sum"),
    (("x_count", "COUNTER"), ("x", "HISTOGRAM"), "x_count"),
    (("x", "GAUGE"), ("x_total", "GAUGE"), ""),
    (("x", "COUNTER"), ("x_sum", "GAUGE"), ""),
])  # fmt: skip
def test_families_share_no_name(
    metrics: ModelMetrics, first: tuple[str, str], second: tuple[str, str], shared: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A scrape would list samples of one under the other, or the same ones twice."""
    for name, kind in (first, second):
        family(metrics, "m", name, kind)
        change(metrics, "m", name, "create", buckets=[])
    kept = [each.name for each, _ in metrics.collect()]
    assert kept == [name for name, _ in ((first,) if shared else (first, second))]
    if shared:
        assert f"metric {second[0]} cannot be a {second[1]} beside the " in caplog.text
        assert f": both would be {shared} in a scrape" in caplog.text
    metrics.forget("m")
    family(metrics, "n", *second)
    assert [each.name for each, _ in metrics.collect()] == [second[0]]
