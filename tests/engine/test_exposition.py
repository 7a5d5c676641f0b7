"""Formats of a scrape, each read back by a parser that is not ours."""

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.engine.exposition import OPENMETRICS, PROTOBUF, TEXT, Exposition, chosen
from headrace.engine.metrics import process_registry, scrape
from headrace.observability.machine import Machine
from headrace.observability.statistics import (
    NATIVE_SCHEMA,
    LatencyBounds,
    MetricsOptions,
    VersionStatistics,
)
from headrace.protocol.pb import prometheus_pb2 as pb
from tests.engine.fakes import FakeEngine, FakeVersion, collector

OM = "application/openmetrics-text;version=1.0.0"
PROTO = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
TRACE = "0af7651916cd43dd8448eb211c80319c"
NATIVE = LatencyBounds(native=True)


@pytest.mark.parametrize(("accept", "native", "format"), [
    ("", True, TEXT), ("*/*", True, TEXT), ("text/html", True, TEXT), ("text/plain", True, TEXT),
    (f"{OM},text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False, OPENMETRICS),
    (f"{OM};q=0.3,text/plain;q=0.5", False, TEXT), 
    ("Application/openMetrics-text", False, OPENMETRICS),
    (f"{PROTO},{OM};q=0.8", True, PROTOBUF), (f"{PROTO},{OM};q=0.8", False, OPENMETRICS),
    ("application/vnd.google.protobuf", True, TEXT),  # of an encoding that is not delimited
    (f"{OM};q=none", False, TEXT), ("application/openmetrics-text;version=2.0.0", False, TEXT),
])  # fmt: skip
def test_choice_of_a_format(accept: str, native: bool, format: Exposition) -> None:
    assert chosen(accept, native) is format


def written(
    format: Exposition, statistics: VersionStatistics, options: MetricsOptions | None = None
) -> bytes:
    engine = FakeEngine([FakeVersion('a "b"', "1", statistics), FakeVersion("c", "2", statistics)])
    found = collector(engine, Machine(), options or MetricsOptions(summaries=True))
    return asyncio.run(scrape(found, process_registry(), format=format))


def worked(bounds: LatencyBounds | None = None) -> VersionStatistics:
    counted = VersionStatistics(True, bounds or LatencyBounds())
    counted.batch_succeeded([0, 1_000], 2, 2, 100_000, 110_000, 400_000, 430_000)
    counted.request_traced(TRACE, 430_000)
    return counted


def families(text: bytes) -> dict[str, Metric]:
    found = text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    return {family.name: family for family in found}


def test_openmetrics_have_the_names_of_the_text_and_exemplars() -> None:
    found = families(written(OPENMETRICS, worked()))
    plain = found["nv_inference_request_success"]
    assert plain.type == "unknown"
    assert [sample.name for sample in plain.samples] == ["nv_inference_request_success"] * 2
    assert found["headrace_overload_refusals"].type == "counter"
    durations = found["headrace_request_duration_seconds"].samples
    told = [sample for sample in durations if sample.exemplar]
    assert {sample.labels["model"] for sample in told} == {'a "b"', "c"}
    for sample in told:
        assert sample.labels["le"] == "0.0005"
        assert sample.exemplar is not None
        assert sample.exemplar.labels == {"trace_id": TRACE}
        assert sample.exemplar.value == 0.00043
        assert sample.exemplar.timestamp is not None
    texts = written(TEXT, worked()).decode()
    assert TRACE not in texts
    names = {line.partition("{")[0].split()[0] for line in texts.splitlines() if line[0] != "#"}
    assert names == {sample.name for family in found.values() for sample in family.samples}


def messages(data: bytes) -> Iterator[pb.MetricFamily]:
    """The families of a body, each behind a varint with its length."""
    at = 0
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield pb.MetricFamily.FromString(data[at : at + length])
        at += length


def test_a_gauge_may_have_the_labels_of_other_types() -> None:
    """A model's, whose values are no numbers there."""
    metric = Metric("level", "About levels", "gauge")
    metric.add_sample("level", {"quantile": "median", "le": "low", "b": "x"}, 5)
    for format in (TEXT, OPENMETRICS):
        *_, sample = format.write(metric, ()).decode().splitlines()
        assert sample == 'level{b="x",le="low",quantile="median"} 5'
    [found] = pb.MetricFamily.FromString(PROTOBUF.write(metric, ())).metric
    assert [label.name for label in found.label] == ["b", "le", "quantile"]


def test_protobuf_has_native_histograms_beside_the_buckets() -> None:
    options = MetricsOptions(summaries=True, bounds=NATIVE)
    counted = worked(NATIVE)
    found = {family.name: family for family in messages(written(PROTOBUF, counted, options))}
    assert found["nv_inference_request_success"].metric[0].counter.value == 2
    assert found["headrace_ready"].metric[0].gauge.value == 1
    summary = found["nv_inference_request_summary_us"].metric[0].summary
    assert (summary.sample_count, len(summary.quantile)) == (2, 5)
    assert "headrace_requests_total" in found
    family = found["headrace_request_duration_seconds"]
    first, second = family.metric
    assert {label.name: label.value for label in first.label} == {"model": 'a "b"', "version": "1"}
    for histogram in (first.histogram, second.histogram):
        assert histogram.sample_count == 2
        assert histogram.sample_sum == pytest.approx(0.000859)
        assert histogram.bucket[-1].cumulative_count == 2
        assert [b.exemplar.label[0].value for b in histogram.bucket if b.exemplar.label] == [TRACE]
        # Both took 429 and 430 microseconds: one bucket, of which that is the upper bound.
        assert histogram.schema == NATIVE_SCHEMA
        [span], [delta] = histogram.positive_span, histogram.positive_delta
        assert (span.length, delta, histogram.zero_count) == (1, 2, 0)
        upper = 2 ** (span.offset / 2**NATIVE_SCHEMA)
        assert upper / 2 ** (1 / 8) < 0.000429 < 0.00043 <= upper


def test_a_native_histogram_of_many_durations() -> None:
    counted = VersionStatistics(bounds=NATIVE)
    for microseconds in (1, 20, 40, 41, 900, 950, 5_000_000):
        ns = microseconds * 1_000
        counted.batch_succeeded([0], 1, 1, 0, 0, ns, ns)
    options = MetricsOptions(bounds=NATIVE)
    found = {family.name: family for family in messages(written(PROTOBUF, counted, options))}
    histogram = found["headrace_compute_duration_seconds"].metric[0].histogram
    counts, index, total, before = dict[int, int](), 0, histogram.zero_count, 0
    deltas = iter(histogram.positive_delta)
    for span in histogram.positive_span:
        index += span.offset
        for _ in range(span.length):
            before += next(deltas)
            counts[index] = before
            total += before
            index += 1
    assert histogram.zero_count == 2  # up to 30 microseconds
    assert total == histogram.sample_count == 7
    assert sorted(counts.values()) == [1, 2, 2]
    idle = found["headrace_batch_wait_duration_seconds"].metric[1].histogram
    assert idle.sample_count == 7


def test_an_empty_native_histogram_is_one() -> None:
    options, empty = MetricsOptions(bounds=NATIVE), VersionStatistics(bounds=NATIVE)
    found = {family.name: family for family in messages(written(PROTOBUF, empty, options))}
    histogram = found["headrace_queue_duration_seconds"].metric[0].histogram
    assert [(span.offset, span.length) for span in histogram.positive_span] == [(0, 0)]


def test_other_buckets() -> None:
    bounds = LatencyBounds((2_000, 425_000, 1_000_000_000))
    text = written(OPENMETRICS, worked(bounds), MetricsOptions(bounds=bounds))
    found = families(text)["headrace_request_duration_seconds"].samples
    counts = {s.labels["le"]: s.value for s in found if "le" in s.labels}
    assert counts == {"2e-06": 0, "0.000425": 0, "1.0": 2, "+Inf": 2}
