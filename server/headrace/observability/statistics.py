"""Counters of the server and its model versions, as plain integers.

Updated on the event-loop thread, once per batch, call or answer, and read by the statistics
endpoint and by Prometheus scrapes on the same thread: there is no lock and nothing is published.
Times are nanoseconds; each counter of a version means the same as in Triton: a batched request has
the whole batch's compute times, `inference_count` counts rows of successful requests,
`execution_count` successful batches.

`Answers` counts answers by door, operation and status: a door holds the counters of an operation, a
list by status, and increments one per answer. A front end counts for itself and reports every
second. Operations and statuses are those of the protocol: nothing chosen by clients becomes a
label.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from time import time_ns
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

# Upper bounds in nanoseconds, from 50 microseconds to 10 minutes, in steps of about 2.2.
LATENCY_BOUNDS: tuple[int, ...] = tuple(
    int(ms * 1_000_000)
    for ms in (
        0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000,
        30_000, 60_000, 120_000, 300_000, 600_000,
    )
)  # fmt: skip
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# gRPC statuses by number.
STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
INFER = "infer"
OTHER = "other"  # the label for requests of no operation, such as an unknown path
_HTTP_STATUSES = 600
MOST_ORDINALS = 100  # distinct ordinals; later responses count as this one
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"  # Triton's name of the metric
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2_000.0, 5_000.0)  # ms
LATENCY_KINDS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_KEPT = 4096  # requests in the window of summaries
_AGE_NS = 60 * 10**9  # older ones are left out

_FEW = 4  # requests of a batch, up to which each is looked up in the histograms

ANONYMOUS = "anonymous"  # the class of clients without a proof of who they are
Sample = tuple[str, str, str, int]  # door, operation, status and count
# Door, operation, class, status, count, nanoseconds, and pairs of a bucket's place and count.
Grown = tuple[str, str, str, int, int, int, list[list[int]]]


class Closed(StrEnum):
    """The reason why a batch closed while more requests might have joined."""

    FULL = "full"  # a preferred or the maximum size, or the next request does not fit
    SHAPE = "shape"  # only requests of other shapes are queued, within the look-ahead
    DELAY = "delay"  # its oldest request has waited for the configured delay
    IDLE = "idle"  # nothing else is queued, and an instance is free
    DEADLINE = "deadline"  # one of its requests would have timed out during the delay


# Buckets of native histograms: eight for each doubling of seconds, as Prometheus' own libraries
# have by default (schema 3), from 31 microseconds to 17 minutes.
NATIVE_SCHEMA, _NATIVE_FROM, _NATIVE_TO = 3, -15 * 8, 10 * 8
_NATIVE_BOUNDS = tuple(int(2 ** (i / 8) * 1e9) for i in range(_NATIVE_FROM, _NATIVE_TO + 1))


@dataclass(frozen=True)
class LatencyBounds:
    """The upper bounds of all histograms of latencies, in nanoseconds.

    `counted` are those by which durations are counted, `buckets` those of the exported buckets, in
    seconds the `texts`. All of `LATENCY_BOUNDS` are counted, since traffic between versions is
    decided by them; with `native`, those of a native histogram, too.
    """

    buckets: tuple[int, ...] = LATENCY_BOUNDS
    native: bool = False
    counted: tuple[int, ...] = field(init=False)
    texts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        counted = {*LATENCY_BOUNDS, *self.buckets, *(_NATIVE_BOUNDS if self.native else ())}
        object.__setattr__(self, "counted", tuple(sorted(counted)))
        object.__setattr__(self, "texts", tuple(str(bound / 1e9) for bound in self.buckets))


DEFAULT_BOUNDS = LatencyBounds()


class Exemplar(NamedTuple):
    """A traced request: the trace's id, its duration in seconds, and the time of its end."""

    trace_id: str
    value: float
    time: float


class Histogram:
    """Counts of durations by upper bound in nanoseconds; the last count is above all bounds."""

    __slots__ = ("bounds", "counts", "total_ns")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_ns = 0

    def observe(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration, for `times` requests."""
        self.counts[bisect_left(self.bounds, duration_ns)] += times
        self.total_ns += duration_ns * times

    def within(self, bounds: Sequence[float]) -> list[int]:
        """The counts for fewer bounds, each of which is one of its own."""
        if bounds == self.bounds:
            return self.counts
        found, last = [], 0
        for bound in bounds:
            place = bisect_left(self.bounds, bound) + 1
            found.append(sum(self.counts[last:place]))
            last = place
        return [*found, sum(self.counts[last:])]


class BatchCounters:
    """Executions of one batch size."""

    __slots__ = ("compute_infer_ns", "compute_input_ns", "compute_output_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0


class Duration:
    """A count, and the sum of nanoseconds."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns


class ResponseCounters:
    """Counters of the responses with one ordinal.

    `compute_infer` and `compute_output` are parts of `success`. `empty_response` is an end sent as
    a separate message, `cancel` a request cancelled before this response.
    """

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


class ResponseCounts:
    """The response counters of a decoupled version.

    `ordinals` are unordered. `first` is set for decoupled versions.
    """

    def __init__(self) -> None:
        self.ordinals: dict[int, ResponseCounters] = defaultdict(ResponseCounters)
        self.first: Histogram | None = None

    def of(self, ordinal: int) -> ResponseCounters:
        """The counters of an ordinal."""
        return self.ordinals[min(ordinal, MOST_ORDINALS)]


@dataclass(slots=True)
class BackendCounts:
    """Counters of one backend of a version.

    `requests` counts answered requests, including errors, `batches` executed batches, `switches`
    the times that requests were switched to it.
    """

    requests: int = 0
    batches: int = 0
    switches: int = 0


@dataclass(slots=True)
class StepCounts:
    """Counters of one step of an ensemble: its calls that have ended, those that failed, and the
    time from their submission to their end.
    """

    requests: int = 0
    failures: int = 0
    ns: int = 0


@dataclass(slots=True)
class EndpointCounts:
    """Counters of one upstream of a version.

    `requests` counts calls sent to it, one per batch, `failures` those without a healthy answer,
    `ejections` the times that it was ejected for failures.
    """

    requests: int = 0
    failures: int = 0
    ejections: int = 0


class EndKind(StrEnum):
    """The way in which a worker ended unexpectedly."""

    EXIT = "exit"  # exited by itself, with any status
    SIGNAL = "signal"  # crashed, or killed from outside
    HANG = "hang"  # no heartbeat
    LIMIT = "limit"  # a batch exceeded its time limit, or temporary files their size
    NONSENSE = "nonsense"  # it sent an invalid frame
    ABANDONED = "abandoned"  # it continued an abandoned execution


class RecycleReason(StrEnum):
    """The reason for replacing a healthy worker; the name of the parameter that sets it."""

    MAX_RSS = "max_rss"
    MAX_REQUESTS = "max_requests"


@dataclass(slots=True)
class WorkerCounters:
    """Counters of the workers of one version: ends by kind, replacements by reason."""

    ends: dict[EndKind, int] = field(default_factory=lambda: dict.fromkeys(EndKind, 0))
    recycled: dict[RecycleReason, int] = field(
        default_factory=lambda: dict.fromkeys(RecycleReason, 0)
    )


class Window:
    """The latencies of the last requests, in nanoseconds, for each of `LATENCY_KINDS`."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, ...]] = deque(maxlen=_KEPT)

    def add(self, now: int, *durations: int) -> None:
        """Add the durations of one request, in the order of kinds, replacing the oldest."""
        self._requests.append((now, *durations))

    def quantiles(self, kind: str, quantiles: Sequence[float], now: int) -> list[float]:
        """Nanoseconds for each quantile; NaN if there are no recent requests."""
        index = 1 + LATENCY_KINDS.index(kind)
        recent = [request[index] for request in self._requests if request[0] > now - _AGE_NS]
        if not recent:
            return [float("nan")] * len(quantiles)
        found: list[float] = np.quantile(recent, quantiles, method="inverted_cdf").tolist()
        return found


class CacheCounts:
    """Requests that the response cache has answered, and those that were run for it.

    Their times are from the beginning of the search to the answer, and those of searching and
    keeping. The windows are as in `VersionStatistics`.
    """

    def __init__(self, summaries: bool = False) -> None:
        self.hits, self.misses = Duration(), Duration()
        self.hit_window = Window() if summaries else None
        self.miss_window = Window() if summaries else None


class PaddingCounts:
    """Requests that were padded, by dimension and bucket, and positions of their rows.

    Positions are those of requests, `own`, or `added` ones, by dimension and kind.
    """

    def __init__(self) -> None:
        self.requests, self.positions = Counter[tuple[str, str]](), Counter[tuple[str, str]]()

    def add(self, dimension: str, rows: int, length: int, bucket: int) -> None:
        """Count a request of `length`, whose rows were padded to `bucket`."""
        self.requests[dimension, str(bucket)] += 1
        self.positions[dimension, "own"] += rows * length
        self.positions[dimension, "added"] += rows * (bucket - length)


# Arguments of `VersionStatistics.batch_succeeded`.
BatchCounts = tuple[Sequence[int], int, int, int, int, int, int, int]


class VersionStatistics:
    """The counters of one model version.

    `window` has the latencies of its last requests, for quantiles; only if these are enabled.
    `exemplars` has the last traced request for each bucket of the durations of requests.
    """

    def __init__(self, summaries: bool = False, bounds: LatencyBounds = DEFAULT_BOUNDS) -> None:
        self.bounds = bounds
        counted = bounds.counted
        self.exemplars: dict[int, Exemplar] = {}
        self.window = Window() if summaries else None
        self.success_count = 0
        self.success_ns = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.faults = 0  # failures that count against the version
        self.overloaded = False  # requests are being refused for their delay in the queue
        self.overload_refusals = 0  # included in the failures
        self.fail_ns = 0
        self.queue_ns = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.batches: dict[int, BatchCounters] = defaultdict(BatchCounters)  # by number of rows
        self.batches_closed = dict.fromkeys(Closed, 0)
        self.queue_histogram = Histogram(counted)
        self.batch_wait_histogram = Histogram(counted)
        self.transfer_histogram = Histogram(counted)
        self.compute_histogram = Histogram(counted)
        self.request_histogram = Histogram(counted)
        self._of_batches = self.compute_histogram, self.transfer_histogram
        self._of_requests = self.queue_histogram, self.batch_wait_histogram, self.request_histogram
        self.paused_histogram = Histogram(
            counted
        )  # compute times extended by clients that did not read
        self.responses = ResponseCounts()
        self.backends: dict[str, BackendCounts] = {}  # by name, for a model with several backends
        self.ended_runs: Counter[str] = Counter()  # terminated runs in this process, by reason
        self.endpoints: dict[str, EndpointCounts] = {}  # by name, for an upstream model
        self.cache: CacheCounts | None = None  # for a version with a response cache
        self.padding: PaddingCounts | None = None  # for a version whose requests are padded
        self.steps: dict[str, StepCounts] = {}  # by name, for an ensemble
        self._owed: list[BatchCounts] = []

    def owe(self, counts: BatchCounts) -> int:
        """Keep the arguments of `batch_succeeded` for the next `settle`; from any thread.

        Returns how many wait for it.
        """
        self._owed.append(counts)
        return len(self._owed)

    def settle(self) -> None:
        """Count the batches of threads."""
        owed, self._owed = self._owed, []
        for counts in owed:
            self.batches_closed[Closed.IDLE] += 1
            self.batch_succeeded(*counts)

    @property
    def fail_count(self) -> int:
        """Accepted requests that ended without an answer."""
        return sum(self.failures.values())

    def batch_succeeded(
        self,
        arrived: Sequence[int],
        inferences: int,
        batch_rows: int,
        started: int,
        gathered: int,
        computed: int,
        ended: int,
        free: int = 0,
    ) -> None:
        """Count a batch: arrival times of its answered requests, the sum of their rows, the rows of
        the batch, and its timestamps. From `free` on an instance could have run it.
        """
        count = len(arrived)
        inputs, infer, outputs = gathered - started, computed - gathered, ended - computed
        self.success_count += count
        self.inference_count += inferences
        self.execution_count += 1
        self.compute_input_ns += inputs * count
        self.compute_infer_ns += infer * count
        self.compute_output_ns += outputs * count
        self.last_inference_ms = time_ns() // 1_000_000
        batch = self.batches[batch_rows]
        batch.count += 1
        batch.compute_input_ns += inputs
        batch.compute_infer_ns += infer
        batch.compute_output_ns += outputs
        bounds = self.bounds.counted
        compute, transfer = self._of_batches
        compute.counts[bisect_left(bounds, ended - started)] += count
        compute.total_ns += (ended - started) * count
        transfer.counts[bisect_left(bounds, inputs + outputs)] += count
        transfer.total_ns += (inputs + outputs) * count
        queue, formed, request = self._of_requests
        waits, forms, lasts = queue.counts, formed.counts, request.counts
        if count > _FEW:
            arrived = sorted(arrived)
            early = bisect_left(arrived, free)
            since = [free] * early + arrived[early:]
            forming = started * count - sum(since)
            # Requests of one batch share a few buckets: these are looked up, not each duration.
            for histogram, moments, end in (
                (queue, arrived, started), (formed, since, started), (request, arrived, ended),
            ):  # fmt: skip
                counts, below = histogram.counts, 0
                last = bisect_left(bounds, end - moments[0])
                for place in range(bisect_left(bounds, end - moments[-1]), last):
                    within = count - bisect_left(moments, end - bounds[place])
                    counts[place] += within - below
                    below = within
                counts[last] += count - below
        else:
            forming = 0
            for moment in arrived:
                place = bisect_left(bounds, started - moment)
                waits[place] += 1
                if moment < free:
                    place = bisect_left(bounds, started - free)
                    forming += started - free
                else:
                    forming += started - moment
                forms[place] += 1
                lasts[bisect_left(bounds, ended - moment)] += 1
        arrivals = sum(arrived)
        waited, lasted = started * count - arrivals, ended * count - arrivals
        queue.total_ns += waited
        formed.total_ns += forming
        request.total_ns += lasted
        self.queue_ns += waited
        self.success_ns += lasted
        if self.window is not None:
            for moment in arrived:
                self.window.add(ended, ended - moment, started - moment, inputs, infer, outputs)

    def batch_opened(self, batch_rows: int, started: int, gathered: int, computed: int) -> None:
        """Count a batch whose requests are answered later."""
        self.execution_count += 1
        self.last_inference_ms = time_ns() // 1_000_000
        batch = self.batches[batch_rows]
        batch.count += 1
        batch.compute_input_ns += gathered - started
        batch.compute_infer_ns += computed - gathered

    def request_completed(
        self, arrived: int, rows: int, started: int, ended: int, paused: bool = False
    ) -> None:
        """Count a request whose last response came after its batch."""
        self.success_count += 1
        self.inference_count += rows
        self.compute_infer_ns += ended - started
        self.queue_ns += started - arrived
        self.success_ns += ended - arrived
        self.compute_histogram.observe(ended - started)
        self.queue_histogram.observe(started - arrived)
        self.request_histogram.observe(ended - arrived)
        if paused:
            self.paused_histogram.observe(ended - started)
        if self.window is not None:
            self.window.add(ended, ended - arrived, started - arrived, 0, ended - started, 0)

    def cache_hit(self, arrived: int, began: int, ended: int) -> None:
        """Count a request that was answered without a run of its own; it waited until `began`."""
        cache = self.cache
        assert cache is not None, "a hit without a cache. This is a bug."
        cache.hits.add(ended - began)
        self.success_count += 1
        self.success_ns += ended - arrived
        self.queue_ns += began - arrived
        self.request_histogram.observe(ended - arrived)
        if cache.hit_window is not None:
            cache.hit_window.add(ended, ended - began)

    def cache_miss(self, spent: int, now: int) -> None:
        """Count a run for the cache, which has spent so many nanoseconds on it."""
        cache = self.cache
        assert cache is not None, "a miss without a cache. This is a bug."
        cache.misses.count += 1
        cache.misses.ns += spent
        if cache.miss_window is not None:
            cache.miss_window.add(now, spent)

    def request_traced(self, trace_id: str, duration_ns: int) -> None:
        """Keep a successful request that was traced as the exemplar of its bucket."""
        place = bisect_left(self.bounds.buckets, duration_ns)
        self.exemplars[place] = Exemplar(trace_id, duration_ns / 1e9, time_ns() / 1e9)

    def request_composed(
        self, arrived: int, rows: int, ended: int, inputs: int, infer: int, paused: bool
    ) -> None:
        """Count a request that calls of other models have answered, with the sums of their times:
        gathering, and execution.
        """
        self.execution_count += 1
        self.last_inference_ms = time_ns() // 1_000_000
        batch = self.batches[rows]
        batch.count += 1
        batch.compute_input_ns += inputs
        batch.compute_infer_ns += infer
        self.request_completed(arrived, rows, arrived, ended, paused)
        self.compute_input_ns += inputs
        self.compute_infer_ns += infer - (ended - arrived)

    def request_failed(self, reason: str, duration_ns: int, fault: bool = False) -> None:
        """Count a request that failed, for one of `FAILURE_REASONS`."""
        self.failures[reason] += 1
        self.faults += fault
        self.fail_ns += duration_ns


class AnswerCounters(list[int]):
    """Counts of the answers of one operation to clients of one class, by status.

    `durations` has the histograms of their durations by status; `good` is that of successful ones,
    for a door that counts those itself. `of_class` has those of the other classes by name.
    """

    __slots__ = ("_bounds", "durations", "good", "of_class")

    def __init__(
        self,
        by_grpc: bool,
        bounds: LatencyBounds,
        of_class: Callable[[str], "AnswerCounters"],
    ) -> None:
        super().__init__([0] * (len(STATUS_NAMES) if by_grpc else _HTTP_STATUSES))
        self._bounds = bounds
        self.good = Histogram(bounds.counted)
        self.durations = {0 if by_grpc else 200: self.good}
        self.of_class = of_class

    def duration_of(self, status: int) -> Histogram:
        """The durations of answers with a status."""
        found = self.durations.get(status)
        if found is None:
            found = self.durations[status] = Histogram(self._bounds.counted)
        return found

    def answered(self, status: int, duration_ns: int) -> None:
        """Count an answer that was given so long after its request had begun."""
        self[status] += 1
        self.duration_of(status).observe(duration_ns)


class Answers:
    """Counts of answers by door, operation, class of client and status.

    The class is the `kind` of an identity: `anonymous`, `key`, `token`, `certificate` or `peer`.
    """

    def __init__(self, bounds: LatencyBounds = DEFAULT_BOUNDS) -> None:
        self.bounds = bounds
        self._counts: dict[tuple[str, str, str], AnswerCounters] = {}

    def of(
        self, door: str, operation: str, by_grpc: bool = False, identity: str = ANONYMOUS
    ) -> AnswerCounters:
        """The counters of an operation for a door to update, by HTTP status, or `by_grpc`'s.

        Those of the door "grpc" are by gRPC's. `identity` is the class of the clients.
        """
        counts = self._counts.get((door, operation, identity))
        if counts is None:
            by_grpc = by_grpc or door == "grpc"
            counts = AnswerCounters(
                by_grpc, self.bounds, partial(self.of, door, operation, by_grpc)
            )
            self._counts[door, operation, identity] = counts
        return counts

    def take(self) -> list[Grown]:
        """Take the counts since the last call, to report them to another process."""
        grown: list[Grown] = []
        for key, counts in self._counts.items():
            if not any(counts):
                continue
            for status, count in enumerate(counts):
                if not count:
                    continue
                counts[status] = 0
                durations = counts.duration_of(status)
                places = [[at, many] for at, many in enumerate(durations.counts) if many]
                grown.append((*key, status, count, durations.total_ns, places))
                for at, _ in places:
                    durations.counts[at] = 0
                durations.total_ns = 0
        return grown

    def add(self, grown: Iterable[Sequence[Any]]) -> None:
        """Add the counts of another process with the same bounds.

        Raises `ValueError`, `TypeError` or `IndexError` if malformed.
        """
        for door, operation, identity, status, count, total_ns, places in grown:
            numbers = status, count, total_ns
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError(f"expected numbers, got {numbers!r}")
            counts = self.of(str(door), str(operation), identity=str(identity))
            counts[status] += count
            durations = counts.duration_of(status)
            durations.total_ns += total_ns
            for at, many in places:
                durations.counts[at] += many

    def samples(self) -> Iterator[Sample]:
        """All counts; for each operation at least that of successful answers."""
        sums: dict[tuple[str, str], list[int]] = {}
        for (door, operation, _), counts in sorted(self._counts.items()):
            known = sums.get((door, operation))
            added = counts if known is None else map(sum, zip(known, counts, strict=True))
            sums[door, operation] = list(added)
        for (door, operation), statuses in sums.items():
            good = 0 if len(statuses) == len(STATUS_NAMES) else 200
            for status, count in enumerate(statuses):
                if count or status == good:
                    yield door, operation, _status_name(statuses, status), count

    def durations(self) -> Iterator[tuple[str, str, str, str, Histogram]]:
        """Door, operation, class, status and the durations of all answers so far."""
        for (door, operation, identity), counts in sorted(self._counts.items()):
            for status, found in sorted(counts.durations.items()):
                if counts[status]:
                    yield door, operation, identity, _status_name(counts, status), found


def _status_name(counts: Sequence[int], status: int) -> str:
    return STATUS_NAMES[status] if len(counts) == len(STATUS_NAMES) else str(status)


S = TypeVar("S", contravariant=True)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_TRUE, _FALSE = ("true", "1"), ("false", "0")


class NativeBuckets(NamedTuple):
    """The buckets of a native histogram of seconds.

    `zeros` counts values up to `threshold`; of `counts`, the first is for the values up to
    2 ** (`first` / 2 ** `schema`).
    """

    schema: int
    threshold: float
    zeros: int
    first: int
    counts: Sequence[int]


class Buckets(NamedTuple):
    """A histogram: counts up to each bound and above all of them; the sum of the values.

    `exemplars` are by the places of their buckets.
    """

    bounds: Sequence[str]
    counts: Sequence[int]
    total: float
    native: NativeBuckets | None = None
    exemplars: Mapping[int, Exemplar] = {}


def in_seconds(
    histogram: Histogram,
    bounds: LatencyBounds = DEFAULT_BOUNDS,
    exemplars: Mapping[int, Exemplar] | None = None,
) -> Buckets:
    """The buckets of a histogram of nanoseconds, in seconds."""
    native = None
    if bounds.native:
        zeros, *counts = histogram.within(_NATIVE_BOUNDS)
        threshold = 2 ** (_NATIVE_FROM / 2**NATIVE_SCHEMA)
        native = NativeBuckets(NATIVE_SCHEMA, threshold, zeros, _NATIVE_FROM + 1, counts)
    counts, total = histogram.within(bounds.buckets), histogram.total_ns / 1e9
    return Buckets(bounds.texts, counts, total, native, exemplars or {})


class Quantiles(NamedTuple):
    """A summary: values by quantile, the number of observations, and the sum of their values."""

    values: Mapping[str, float]
    observed: int
    total: float


Reading = float | Buckets | Quantiles | None


@dataclass(frozen=True, slots=True)
class Family(Generic[S]):
    """A metric family: `name` is that of its samples, `kind` the Prometheus type.

    `read` returns the value of a source, None for no sample, or a mapping of values by label value,
    or by a tuple of the values of the `labels`.
    """

    name: str
    kind: str
    read: Callable[[S], Reading | Mapping[Any, Reading]]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSeries:
    """The workers of one version, for a scrape.

    `resident` has the bytes of each instance with a running worker, `instances` counts all of them.
    """

    instances: int
    resident: Mapping[str, int]
    counters: WorkerCounters
    quarantined: int


@dataclass(frozen=True, slots=True)
class SequenceSeries:
    """The sequences of one version, for a scrape: with a seat, and waiting for one.

    `ended` counts those that have ended, by how they did, `restarted` the starts of known ones.
    """

    seated: int
    backlog: int
    restarted: int
    ended: Mapping[str, int]


# A family with its sources and their labels.
Sourced = tuple[Family[Any], Sequence[tuple[Mapping[str, str], Any]]]


@dataclass(slots=True)
class EndpointSeries:
    """The current state of an upstream.

    `outstanding` is the number of calls in flight, `serves` is true if it receives calls.
    `sequences` is the number of sequences with their state there; None for a model without
    sequences. `differences` counts deviations of its model from the requested configuration.
    """

    name: str
    counts: EndpointCounts
    outstanding: int = 0
    serves: bool = False
    sequences: int | None = None
    differences: int = 0


@dataclass(frozen=True, slots=True)
class BackendSeries:
    """The current state of a backend; `active` is true if it gets requests."""

    name: str
    counts: BackendCounts
    active: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of a GPU at one moment; None for values that it does not report.

    Memory in bytes, `utilization` from 0 to 1, power in watts, `energy` in joules since the driver
    was loaded.
    """

    uuid: str
    memory_total: int
    memory_used: int
    utilization: float | None = None
    power_usage: float | None = None
    power_limit: float | None = None
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class GpuSeries:
    """GPUs for a scrape, and the bytes of page-locked memory: total, and in use."""

    readings: Sequence[GpuReading] = ()
    pinned: tuple[int, int] | None = None


class MemoryCounts(NamedTuple):
    """The number of models in memory, their limit in bytes, and evictions so far."""

    models: int
    budget: int
    evictions: int


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """`counters` of microseconds, `histograms` and `summaries` under Triton's names.

    `quantiles` are those of the summaries, `bounds` those of all histograms of latencies.
    """

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = QUANTILES
    bounds: LatencyBounds = DEFAULT_BOUNDS

    @classmethod
    def of(cls, texts: Sequence[str]) -> "MetricsOptions":
        """Parse texts such as `summary_latencies=true`; raises `ValueError`.

        Quantiles may be given with an error, such as `0.5:0.05`, as in Triton; it is ignored, since
        quantiles are exact here.
        """
        found: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if name not in _NAMES or not equals:
                raise ValueError(
                    f"expected NAME=VALUE with one of {', '.join(_NAMES)}, got {text!r}"
                )
            found[name] = value
        default = cls()
        return cls(
            _flag(found, "counter_latencies", default.counters),
            _flag(found, "histogram_latencies", default.histograms),
            _flag(found, "summary_latencies", default.summaries),
            _quantiles(found["summary_quantiles"]) if "summary_quantiles" in found else QUANTILES,
            LatencyBounds(
                _buckets(found["histogram_buckets"])
                if "histogram_buckets" in found
                else LATENCY_BOUNDS,
                _flag(found, "native_histograms", False),
            ),
        )


_NAMES = (
    "counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles",
    "histogram_buckets", "native_histograms",
)  # fmt: skip
_MOST_BUCKETS, _LONGEST_SECS = 200, 86_400


def _flag(found: dict[str, str], name: str, default: bool) -> bool:
    if name not in found:
        return default
    text = found[name].lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name} must be true or false, got {found[name]!r}")
    return text in _TRUE


def _quantiles(text: str) -> tuple[float, ...]:
    quantiles = []
    for part in text.split(","):
        quantile, colon, error = part.partition(":")
        try:
            numbers = [float(quantile), *([float(error)] if colon else [])]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= number <= 1 for number in numbers):
            raise ValueError(
                f"summary_quantiles must be numbers from 0 to 1, such as 0.5:0.05,0.99:0.001,"
                f" got {text!r}"
            )
        quantiles.append(numbers[0])
    return tuple(quantiles)


def _buckets(text: str) -> tuple[int, ...]:
    """Bounds in nanoseconds from a text with seconds."""
    try:
        seconds = [float(part) for part in text.split(",")]
    except ValueError:
        seconds = []
    bounds = [round(bound * 1e9) for bound in seconds if 0 < bound <= _LONGEST_SECS]
    rising = all(one < next_ for one, next_ in pairwise(bounds))
    if not seconds or len(bounds) < len(seconds) or bounds[0] < 1_000 or not rising:
        raise ValueError(
            f"histogram_buckets must be rising seconds from 0.000001 to {_LONGEST_SECS}, such as"
            f" 0.001,0.01,0.1, got {text!r}"
        )
    if len(bounds) > _MOST_BUCKETS:
        raise ValueError(f"histogram_buckets: at most {_MOST_BUCKETS}, got {len(bounds)}")
    return tuple(bounds)
