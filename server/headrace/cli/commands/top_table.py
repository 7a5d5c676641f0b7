"""Activity of a server between two scrapes of its metrics, and its table.

`parse` reads Prometheus' text format, `activity` computes rates, quantiles and sizes from two
scrapes, and `plain_lines`, `rich_lines` and `document` format them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headrace.cli.text import duration, number, size

if TYPE_CHECKING:
    from rich.text import Text

    from headrace.api.operations import Document


_ERRORS = 4  # kinds of error answers listed above the table
_LEAST_NAME = 8  # minimum width of a model's name

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels."""

    labels: Mapping[str, str]
    value: float


def parse(text: str) -> dict[str, list[Sample]]:
    """The samples by name, in order; raises `ValueError` for a malformed line."""
    found: dict[str, list[Sample]] = {}
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"not a line of metrics: {line[:100]}")
        labels = {name: _plain(value) for name, value in _LABEL.findall(match[2] or "")}
        found.setdefault(match[1], []).append(Sample(labels, float(match[3])))
    return found


def _plain(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), value)


# --- activity

Samples = Mapping[str, Sequence[Sample]]
Key = tuple[str, str]  # model and version
Counts = Sequence[tuple[float, float]]  # upper bounds with cumulative counts

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Scrape:
    """The values at a time, in seconds of a monotonic clock."""

    at: float
    samples: Samples


@dataclass(frozen=True, slots=True)
class VersionActivity:
    """One version of a model during the interval. Rates are per second, times in seconds by name of
    quantile. None means no events, or no such metric.
    """

    model: str
    version: str
    requests_per_second: float
    failures_per_second: float
    rows_per_second: float
    batches_per_second: float
    waiting_requests: int
    latency_seconds: Mapping[str, float | None]
    queue_seconds: Mapping[str, float | None]
    compute_seconds: Mapping[str, float | None]
    memory_bytes: float | None
    instances: Mapping[str, int] = field(default_factory=dict)  # number by kind
    backends: Mapping[str, bool] = field(default_factory=dict)  # backends, true if active
    # Upstreams, true if they receive calls.
    servers: Mapping[str, bool] = field(default_factory=dict)
    failures_per_second_by_reason: Mapping[str, float] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The most frequent reason of failures; "" without failures."""
        rates = self.failures_per_second_by_reason
        return max(rates, key=rates.__getitem__, default="")

    @property
    def backend(self) -> str:
        """The backend that gets the requests, of several."""
        return next((name for name, active in self.backends.items() if active), "")

    @property
    def detoured(self) -> bool:
        """True if it is not the preferred one."""
        return bool(self.backends) and not next(iter(self.backends.values()))

    @property
    def servers_in(self) -> int:
        """The number of upstreams that receive calls."""
        return sum(self.servers.values())

    @property
    def rows_per_batch(self) -> float | None:
        """The mean number of rows per batch."""
        return self.rows_per_second / self.batches_per_second if self.batches_per_second else None


@dataclass(frozen=True, slots=True)
class AnswerRate:
    """Requests per second answered by a door with one status."""

    door: str
    operation: str
    status: str
    per_second: float

    @property
    def error(self) -> bool:
        """True for an error status, or a disconnected client."""
        return self.status >= "4" if self.status.isdigit() else self.status != "OK"


@dataclass(frozen=True, slots=True)
class ServerActivity:
    """The whole server; `cpu` is 1 for one core used by its own process."""

    seconds: float
    ready: bool
    refused_per_second: float
    admitted_requests: int
    admitted_requests_limit: int
    resident_bytes: float | None
    cpu: float | None
    versions: Sequence[VersionActivity]
    answers: Sequence[AnswerRate] = ()  # during the interval, highest rate first

    @property
    def errors(self) -> list[AnswerRate]:
        """Error answers, including those to invalid requests."""
        return [answer for answer in self.answers if answer.error]

    @property
    def requests_per_second(self) -> float:
        """Requests answered per second, all models together."""
        return sum(version.requests_per_second for version in self.versions)

    @property
    def failures_per_second(self) -> float:
        """Requests failed per second, all models together."""
        return sum(version.failures_per_second for version in self.versions)


def activity(before: Scrape, after: Scrape) -> ServerActivity:
    """The activity between two scrapes."""
    seconds = max(after.at - before.at, 1e-9)
    old, new = _Values(before.samples), _Values(after.samples)

    def rate(name: str, key: Key | None = None) -> float:
        return _grown(old.sum(name, key), new.sum(name, key)) / seconds

    def rates(name: str, label: str, key: Key) -> dict[str, float]:
        before = old.by_label(name, label, key)
        grown = {
            one: _grown(before.get(one, 0), count) / seconds
            for one, count in new.by_label(name, label, key).items()
        }
        return {one: value for one, value in grown.items() if value}

    def quantiles(kind: str, key: Key) -> dict[str, float | None]:
        name = f"headrace_{kind}_duration_seconds_bucket"
        counts = grown_counts(old.counts(name, key), new.counts(name, key))
        return {word: quantile(counts, share) for word, share in QUANTILES.items()}

    versions = [
        VersionActivity(
            *key,
            rate("nv_inference_request_success", key),
            rate("nv_inference_request_failure", key),
            rate("nv_inference_count", key),
            rate("nv_inference_exec_count", key),
            int(new.sum("nv_inference_pending_request_count", key)),
            quantiles("request", key),
            quantiles("queue", key),
            quantiles("compute", key),
            new.sum("headrace_model_memory_bytes", key) or None,
            new.by_label("headrace_model_instances", "kind", key),
            new.flags("headrace_backend_active", "backend", key),
            new.flags("headrace_endpoint_healthy", "endpoint", key),
            rates("nv_inference_request_failure", "reason", key),
        )
        for key in new.keys("nv_inference_request_success")
    ]
    has_cpu = "process_cpu_seconds_total" in after.samples
    return ServerActivity(
        seconds,
        bool(new.sum("headrace_ready")),
        rate("headrace_overloaded_total"),
        int(new.sum("headrace_admitted_requests")),
        int(new.sum("headrace_admitted_requests_limit")),
        new.sum("process_resident_memory_bytes") or None,
        rate("process_cpu_seconds_total") if has_cpu else None,
        versions,
        _answers(old, new, seconds),
    )


def _answers(old: "_Values", new: "_Values", seconds: float) -> list[AnswerRate]:
    labels = ("door", "operation", "status")
    before = old.by_labels("headrace_requests_total", labels)
    found = [
        AnswerRate(*key, _grown(before.get(key, 0), count) / seconds)
        for key, count in new.by_labels("headrace_requests_total", labels).items()
    ]
    return sorted((one for one in found if one.per_second), key=lambda one: -one.per_second)


def grown_counts(before: Counts, after: Counts) -> Counts:
    """The growth of a histogram's counts between two scrapes, by upper bound."""
    old = dict(before)
    if any(count < old.get(bound, 0) for bound, count in after):
        return after  # the server was restarted
    return [(bound, count - old.get(bound, 0)) for bound, count in after]


def quantile(counts: Counts, share: float) -> float | None:
    """The quantile `share`, with values evenly distributed within each bucket.

    The highest finite bound for values above all of them; None without values.
    """
    if not counts or not counts[-1][1]:
        return None
    wanted = share * counts[-1][1]
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *counts]):
        if up_to >= wanted and up_to > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (up_to - below)
    return counts[-1][0]


class _Values:
    """Samples by name and version."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._by_key: dict[str, dict[Key, list[Sample]]] = {}

    def keys(self, name: str) -> list[Key]:
        return list(self._of(name))

    def sum(self, name: str, key: Key | None = None) -> float:
        """The sum of all values, or of those of `key`; 0 if there are none."""
        found = self._samples.get(name, ()) if key is None else self._of(name).get(key, ())
        return sum(sample.value for sample in found)

    def by_label(self, name: str, label: str, key: Key) -> dict[str, int]:
        samples = self._of(name).get(key, ())
        return {sample.labels.get(label, ""): int(sample.value) for sample in samples}

    def by_labels(
        self, name: str, labels: tuple[str, str, str]
    ) -> dict[tuple[str, str, str], float]:
        first, second, third = labels
        return {
            (s.labels.get(first, ""), s.labels.get(second, ""), s.labels.get(third, "")): s.value
            for s in self._samples.get(name, ())
        }

    def flags(self, name: str, label: str, key: Key) -> dict[str, bool]:
        return {one: value > 0 for one, value in self.by_label(name, label, key).items()}

    def counts(self, name: str, key: Key) -> Counts:
        found: dict[float, float] = {}
        for sample in self._of(name).get(key, ()):
            bound = float(sample.labels.get("le", "inf"))
            found[bound] = found.get(bound, 0) + sample.value
        return sorted(found.items())

    def _of(self, name: str) -> dict[Key, list[Sample]]:
        if name not in self._by_key:
            groups = self._by_key[name] = {}
            for sample in self._samples.get(name, ()):
                labels = sample.labels
                if "model" in labels:
                    key = labels["model"], labels.get("version", "")
                    groups.setdefault(key, []).append(sample)
        return self._by_key[name]


def _grown(before: float, after: float) -> float:
    return after - before if after >= before else after  # the server was restarted


# --- the table


@dataclass(frozen=True, slots=True)
class View:
    """Content of the screen; a `notice` is shown above the table."""

    title: str
    activity: ServerActivity | None
    order: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    text: Callable[[VersionActivity], str]
    least_width: int = 0  # terminal width from which on the column is shown
    alarms: Callable[[VersionActivity], bool] | None = None
    told: Callable[[VersionActivity], object] | None = None  # shown if true for any version


def _rate(value: float) -> str:
    return number(value) if value else "0"


_COLUMNS = (
    _Column("VER", lambda v: v.version),
    _Column("REQ/S", lambda v: _rate(v.requests_per_second)),
    _Column("ROWS/S", lambda v: _rate(v.rows_per_second), 100),
    _Column("ERR/S", lambda v: _rate(v.failures_per_second),
            alarms=lambda v: v.failures_per_second > 0),
    _Column("REASON", lambda v: v.reason or "-", told=lambda v: v.reason),
    _Column("WAIT", lambda v: str(v.waiting_requests)),
    _Column("P50", lambda v: duration(v.latency_seconds["p50"])),
    _Column("P90", lambda v: duration(v.latency_seconds["p90"]), 100),
    _Column("P99", lambda v: duration(v.latency_seconds["p99"])),
    _Column("QUEUE P99", lambda v: duration(v.queue_seconds["p99"]), 130),
    _Column("COMPUTE P99", lambda v: duration(v.compute_seconds["p99"]), 130),
    _Column("BATCH", lambda v: number(v.rows_per_batch)),
    _Column("INST", lambda v: str(sum(v.instances.values()) or "-")),
    _Column("KIND", lambda v: ",".join(v.instances) or "-", 110),
    _Column("MEMORY", lambda v: size(v.memory_bytes)),
    _Column("BACKEND", lambda v: v.backend or "-", alarms=lambda v: v.detoured,
            told=lambda v: v.backends),
    _Column("SERVERS", lambda v: f"{v.servers_in}/{len(v.servers)}" if v.servers else "-",
            alarms=lambda v: v.servers_in < len(v.servers), told=lambda v: v.servers),
)  # fmt: skip

# By key: largest first, except for names.
ORDERS: Mapping[str, tuple[str, Callable[[VersionActivity], Any]]] = {
    "requests": ("r", lambda v: v.requests_per_second),
    "rows": ("o", lambda v: v.rows_per_second),
    "errors": ("e", lambda v: v.failures_per_second),
    "waiting": ("w", lambda v: v.waiting_requests),
    "p50": ("5", lambda v: v.latency_seconds["p50"] or 0),
    "p99": ("9", lambda v: v.latency_seconds["p99"] or 0),
    "batch": ("b", lambda v: v.rows_per_batch or 0),
    "memory": ("m", lambda v: v.memory_bytes or 0),
    "name": ("n", lambda v: 0),
}
KEYS = {key: order for order, (key, _) in ORDERS.items()}


def ordered(versions: Sequence[VersionActivity], order: str) -> list[VersionActivity]:
    """The versions, largest first by `order`; equal ones by name."""
    value = ORDERS[order][1]
    return sorted(versions, key=lambda v: (-value(v), v.model, _number(v.version), v.version))


def summary(view: View) -> list[str]:
    """The lines above the table."""
    now = view.activity
    if now is None:
        return [view.title, view.notice]
    state = "ready" if now.ready else "NOT READY"
    parts = [f"{_rate(now.requests_per_second)} req/s", f"{_rate(now.failures_per_second)} err/s"]
    parts.append(f"{_rate(now.refused_per_second)} refused/s")
    rest = [f"{now.admitted_requests} of {now.admitted_requests_limit} under way"]
    if now.resident_bytes is not None:
        rest.append(f"{size(now.resident_bytes)}")
    if now.cpu is not None:
        rest.append(f"{now.cpu:.0%} CPU")
    lines = [f"{view.title}  {state}", "  ".join([*parts, *rest])]
    if errors := now.errors:
        named = [
            f"{_rate(e.per_second)}/s {e.door} {e.operation} {e.status}" for e in errors[:_ERRORS]
        ]
        more = ["..."] if len(errors) > _ERRORS else []
        lines.append("answered with errors: " + ", ".join(named + more))
    return [*lines, view.notice] if view.notice else lines


def plain_lines(view: View, width: int, most: int | None = None) -> list[str]:
    """The view as text of `width` columns with `most` versions; None: all."""
    lines = [*summary(view), ""]
    if view.activity is None:
        return lines
    rows, left_out = _cells(view, width, most)
    lines += ["  ".join(row) for row in rows]
    return [*lines, left_out] if left_out else lines


def rich_lines(view: View, width: int, most: int | None = None) -> "Text":
    """Lines of `plain_lines` with colours, for rich."""
    from rich.text import Text

    first, *others = summary(view)
    good = view.activity is not None and view.activity.ready
    lines = [Text(first, "bold" if good else "bold red")]
    lines += [Text(line, "red" if line == view.notice else "") for line in others]
    if view.activity is not None:
        (heads, *rows), left_out = _cells(view, width, most)
        columns = _columns(view.activity, width)
        lines += [Text(""), Text("  ".join(heads), "reverse")]
        versions = ordered(view.activity.versions, view.order)
        lines += [_styled(columns, v, row) for v, row in zip(versions, rows, strict=False)]
        lines += [Text(left_out, "dim")] if left_out else []
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _styled(columns: Sequence[_Column], version: VersionActivity, row: Sequence[str]) -> "Text":
    from rich.text import Text

    usual = "" if version.requests_per_second else "dim"
    cells = [Text(row[0], usual or "bold")]
    for column, cell in zip(columns, row[1:], strict=True):
        alarm = column.alarms is not None and column.alarms(version)
        cells.append(Text(cell, "bold red" if alarm else usual))
    return Text("  ").join(cells)


def document(view: View, time: float) -> "Document":
    """One line of `--json`; `time` is Unix time."""
    now = view.activity
    assert now is not None, "no document without two scrapes. This is a bug."
    server = asdict(now) | {
        "requests_per_second": now.requests_per_second,
        "failures_per_second": now.failures_per_second,
    }
    del server["versions"]
    models = [
        asdict(version) | {"rows_per_batch": version.rows_per_batch}
        for version in ordered(now.versions, view.order)
    ]
    return {"time": time, "seconds": server.pop("seconds"), "server": server, "models": models}


def _columns(now: ServerActivity, width: int) -> list[_Column]:
    """The columns that fit the width and have values."""
    return [
        column
        for column in _COLUMNS
        if column.least_width <= width
        and (column.told is None or any(map(column.told, now.versions)))
    ]


def _cells(view: View, width: int, most: int | None) -> tuple[list[list[str]], str]:
    """The padded cells of the table including its head, and a note on omitted rows."""
    assert view.activity is not None
    columns = _columns(view.activity, width)
    versions = ordered(view.activity.versions, view.order)
    rows = [["MODEL", *(column.head for column in columns)]]
    rows += [[v.model, *(column.text(v) for column in columns)] for v in versions[:most]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(width - sum(widths[1:]) - 2 * len(columns), _LEAST_NAME))
    cells = [
        [_cut(row[0], widths[0]).ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        for row in rows
    ]
    left_out = len(versions) - len(rows) + 1
    return cells, f"and {left_out} more" if left_out else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0
