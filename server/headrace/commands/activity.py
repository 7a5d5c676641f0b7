"""What a server has done between two scrapes of its metrics: rates, quantiles, sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.client.metrics import Sample

Samples = Mapping[str, Sequence[Sample]]
Key = tuple[str, str]  # model and version
Counts = Sequence[tuple[float, float]]  # upper bounds, and how many are up to each

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Scrape:
    """The values at a time, in seconds of a clock that does not jump."""

    at: float
    samples: Samples


@dataclass(frozen=True, slots=True)
class VersionActivity:
    """One version of a model. Rates are per second, times seconds by name of quantile; both are
    of the interval. None is where nothing happened or nothing is told."""

    model: str
    version: str
    requests: float
    failures: float
    rows: float
    batches: float
    waiting: int
    latency: Mapping[str, float | None]
    queue: Mapping[str, float | None]
    compute: Mapping[str, float | None]
    memory: float | None
    instances: Mapping[str, int] = field(default_factory=dict)  # how many by their kind
    backends: Mapping[str, bool] = field(default_factory=dict)  # of several, which gets requests
    servers: Mapping[str, bool] = field(default_factory=dict)  # that run it, which are sent calls
    reasons: Mapping[str, float] = field(default_factory=dict)  # failures a second by reason

    @property
    def reason(self) -> str:
        """The reason of most failures; "" where nothing fails."""
        return max(self.reasons, key=self.reasons.__getitem__, default="")

    @property
    def backend(self) -> str:
        """What gets its requests, of several backends."""
        return next((name for name, active in self.backends.items() if active), "")

    @property
    def detoured(self) -> bool:
        """Whether that is not the first of them."""
        return bool(self.backends) and not next(iter(self.backends.values()))

    @property
    def servers_in(self) -> int:
        """How many of its servers are sent calls."""
        return sum(self.servers.values())

    @property
    def batch_rows(self) -> float | None:
        """Rows of a batch on average."""
        return self.rows / self.batches if self.batches else None


@dataclass(frozen=True, slots=True)
class AnswerRate:
    """Requests a second that a door has answered with a status."""

    door: str
    operation: str
    status: str
    rate: float

    @property
    def error(self) -> bool:
        """Whether they were answered with an error, or their clients have gone."""
        return self.status >= "4" if self.status.isdigit() else self.status != "OK"


@dataclass(frozen=True, slots=True)
class ServerActivity:
    """The server as a whole; `cpu` is 1 for a whole core in use by its own process."""

    seconds: float
    ready: bool
    refused: float
    admitted: int
    admitted_limit: int
    resident: float | None
    cpu: float | None
    versions: Sequence[VersionActivity]
    answers: Sequence[AnswerRate] = ()  # of the interval, most first

    @property
    def errors(self) -> list[AnswerRate]:
        """Those that were not answered well, also since the request was wrong."""
        return [answer for answer in self.answers if answer.error]

    @property
    def requests(self) -> float:
        """Answered per second, of all models."""
        return sum(version.requests for version in self.versions)

    @property
    def failures(self) -> float:
        """Failed per second, of all models."""
        return sum(version.failures for version in self.versions)


def activity(before: Scrape, after: Scrape) -> ServerActivity:
    """What has happened from one scrape to the next."""
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
    return sorted((one for one in found if one.rate), key=lambda one: -one.rate)


def grown_counts(before: Counts, after: Counts) -> Counts:
    """What a histogram has counted from one scrape to the next, by upper bound."""
    old = dict(before)
    if any(count < old.get(bound, 0) for bound, count in after):
        return after  # the server has started anew
    return [(bound, count - old.get(bound, 0)) for bound, count in after]


def quantile(counts: Counts, share: float) -> float | None:
    """The value that `share` of what was counted is below, evenly spread within each bucket.

    The highest bound that is finite for what is above all; None if there is nothing.
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
        """The sum of all values, of those of `key` only if there is one; 0 if there are none."""
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
    return after - before if after >= before else after  # the server has started anew
