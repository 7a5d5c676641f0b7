"""Formats of a scrape: Prometheus' text, OpenMetrics, and the protobuf of native histograms.

A family is written in parts of a bounded size, since a thousand models have tens of thousands of
samples. Parts have the same name; the format joins them.

In OpenMetrics, and there alone, a bucket has its exemplar. Its counters are named `..._total`, so
those of Triton's names are of the type `unknown`: names are the same in all formats. Native
histograms have no standard text: Prometheus reads them from protobuf, beside ordinary buckets.
"""

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from headrace.protocol.compression import weight_of
from headrace.protocol.pb import prometheus_pb2 as pb
from headrace.protocol.protobuf_contents import varint

if TYPE_CHECKING:  # 20 ms and 4 MB, for the first scrape
    from prometheus_client.core import Exemplar, Metric, NativeHistogram

# The label of a part of a metric by its type, after the others, which are sorted, as in Triton.
_LAST = {"histogram": "le", "summary": "quantile"}
_HEADER = re.compile(rb"(?:# (?:HELP|TYPE) .*\n)*")
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_PROTOBUF = "application/vnd.google.protobuf"


@dataclass(frozen=True, slots=True)
class Exposition:
    """A format: its media type, how a part of a family is written, and how parts are joined.

    `write` takes further counters, beside Triton's, whose names have no _total.
    """

    content_type: str
    write: "Callable[[Metric, Container[str]], bytes]"
    join: Callable[[Sequence[bytes]], bytes]
    end: bytes = b""


def chosen(accept: str, native: bool) -> Exposition:
    """The format that a client prefers, by its `Accept` header; the text without a preference.

    Protobuf is offered for `native` histograms only.
    """
    best, weight = TEXT, 0.0
    for part in accept.lower().split(","):
        kind, *parameters = [text.strip() for text in part.split(";")]
        given = dict(text.partition("=")[::2] for text in parameters)
        found = TEXT if kind == "text/plain" else None
        if kind == "application/openmetrics-text":
            found = OPENMETRICS if given.get("version", "1.0.0") in ("1.0.0", "0.0.1") else None
        elif kind == _PROTOBUF and given.get("encoding") == "delimited":
            found = PROTOBUF if native else None
        own = weight_of(given.get("q", "1"))
        if found is not None and own > weight:
            best, weight = found, own
    return best


# --- text


def _text(metric: "Metric", plain: Container[str]) -> bytes:
    return _written(metric, _name(metric, plain), metric.type, _IN_HELP)


def _openmetrics(metric: "Metric", plain: Container[str]) -> bytes:
    kind = metric.type
    if kind == "counter" and _is_plain(metric.name, plain):
        kind = "unknown"
    return _written(metric, metric.name, kind, _IN_LABEL, exemplars=True)


def _name(metric: "Metric", plain: Container[str]) -> str:
    """The name of a family in formats whose counters are named like their samples."""
    total = metric.type == "counter" and not _is_plain(metric.name, plain)
    return f"{metric.name}_total" if total else metric.name


def _is_plain(name: str, plain: Container[str]) -> bool:
    """True for a counter whose samples have no _total."""
    return name.startswith("nv_") or name in plain


def _written(
    metric: "Metric", name: str, kind: str, escaped: dict[int, str], exemplars: bool = False
) -> bytes:
    described = metric.documentation.translate(escaped)
    lines = [f"# HELP {name} {described}\n# TYPE {name} {kind}\n"]
    last = _LAST.get(metric.type, "")
    exact = last if exemplars else ""
    for sample in metric.samples:
        if sample.native_histogram is not None:
            continue
        labels, more = "", ""
        if found := sample.labels:
            names = sorted(found) if len(found) > 1 else found
            if last in found:
                names = [*(each for each in names if each != last), last]
            own = ",".join(f'{each}="{_label(found[each], each == exact)}"' for each in names)
            labels = f"{{{own}}}"
        if exemplars and sample.exemplar is not None:
            more = _exemplar(sample.exemplar)
        lines.append(f"{sample.name}{labels} {_number(sample.value)}{more}\n")
    return "".join(lines).encode()


def _label(text: str, exact: bool) -> str:
    """The value of a label; OpenMetrics has one way to write the number of an `exact` one."""
    if exact and text != "+Inf":
        return repr(float(text))
    return text.translate(_IN_LABEL)


def _exemplar(exemplar: "Exemplar") -> str:
    own = ",".join(f'{name}="{text}"' for name, text in exemplar.labels.items())
    return f" # {{{own}}} {exemplar.value!r} {exemplar.timestamp:.3f}"


def _number(value: float) -> str:
    """A value as Triton writes it: integers without a point or an exponent."""
    if isfinite(value):
        whole = int(value)
        return str(whole) if whole == value else repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts of a family below one header."""
    samples = [memoryview(part)[_size_of_header(part) :] for part in parts[1:]]
    return b"".join([parts[0], *samples])


def _size_of_header(part: bytes) -> int:
    """Bytes of the lines before the first sample: to search all of them took 80 ms."""
    found = _HEADER.match(part)
    return found.end() if found else 0


# --- protobuf

_TYPES = {
    "counter": pb.COUNTER,
    "gauge": pb.GAUGE,
    "summary": pb.SUMMARY,
    "histogram": pb.HISTOGRAM,
}


def _protobuf(metric: "Metric", plain: Container[str]) -> bytes:
    """A part of a family as the fields of a message, without its length."""
    name, kind = _name(metric, plain), _TYPES.get(metric.type, pb.UNTYPED)
    family = pb.MetricFamily(name=name, help=metric.documentation, type=kind)
    last = _LAST.get(metric.type)
    known: dict[tuple[tuple[str, str], ...], pb.Metric] = {}
    for sample in metric.samples:
        own = {each: text for each, text in sample.labels.items() if each != last}
        key = tuple(sorted(own.items()))
        if (message := known.get(key)) is None:
            message = known[key] = family.metric.add()
            message.label.extend(pb.LabelPair(name=each, value=text) for each, text in key)
        suffix, value = sample.name.removeprefix(metric.name), sample.value
        if metric.type == "counter":
            message.counter.value = value
        elif metric.type == "gauge":
            message.gauge.value = value
        elif metric.type == "summary":
            _add_summary(message.summary, suffix, sample.labels, value)
        elif metric.type == "histogram":
            if sample.native_histogram is not None:
                _add_native(message.histogram, sample.native_histogram)
            else:
                _add_bucket(message.histogram, suffix, sample.labels, value, sample.exemplar)
        else:
            message.untyped.value = value
    return family.SerializeToString()


def _add_summary(summary: pb.Summary, suffix: str, labels: dict[str, str], value: float) -> None:
    if suffix == "_count":
        summary.sample_count = int(value)
    elif suffix == "_sum":
        summary.sample_sum = value
    else:
        summary.quantile.add(quantile=float(labels["quantile"]), value=value)


def _add_bucket(
    histogram: pb.Histogram,
    suffix: str,
    labels: dict[str, str],
    value: float,
    exemplar: "Exemplar | None",
) -> None:
    if suffix == "_count":
        histogram.sample_count = int(value)
    elif suffix == "_sum":
        histogram.sample_sum = value
    else:
        bucket = histogram.bucket.add(cumulative_count=int(value), upper_bound=float(labels["le"]))
        if exemplar is not None:
            for name, text in exemplar.labels.items():
                bucket.exemplar.label.add(name=name, value=text)
            bucket.exemplar.value = exemplar.value
            seconds, rest = divmod(float(exemplar.timestamp or 0), 1)
            bucket.exemplar.timestamp.seconds = int(seconds)
            bucket.exemplar.timestamp.nanos = int(rest * 1e9)


def _add_native(histogram: pb.Histogram, native: "NativeHistogram") -> None:
    histogram.schema = native.schema
    histogram.zero_threshold = native.zero_threshold
    histogram.zero_count = int(native.zero_count)
    for span in native.pos_spans or ():
        histogram.positive_span.add(offset=span.offset, length=span.length)
    histogram.positive_delta.extend(map(int, native.pos_deltas or ()))
    if not native.pos_spans:  # tells an empty native histogram from one without
        histogram.positive_span.add(offset=0, length=0)


def _delimited(parts: Sequence[bytes]) -> bytes:
    """The message of a family behind its length: a message's bytes may be those of several."""
    whole = b"".join(parts)
    return varint(len(whole)) + whole


TEXT = Exposition("text/plain; version=0.0.4; charset=utf-8", _text, _joined)
OPENMETRICS = Exposition(
    "application/openmetrics-text; version=1.0.0; charset=utf-8", _openmetrics, _joined, b"# EOF\n"
)
PROTOBUF = Exposition(
    f"{_PROTOBUF}; proto=io.prometheus.client.MetricFamily; encoding=delimited",
    _protobuf,
    _delimited,
)
