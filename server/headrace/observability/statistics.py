"""Counters of the server and its model versions, as plain integers.

Added to on the event-loop thread, once per batch, call or answer, and read by the statistics
endpoint and by Prometheus scrapes on the same thread: there is no lock and nothing is published.
Times are nanoseconds; the meaning of each counter of a version is Triton's: a batched request has
the whole batch's compute times, `inference_count` counts rows of successful requests,
`execution_count` successful batches.

How many requests each door has answered, by operation and status, is in `Answers`: a door holds the
counts of an operation, a list by status, and adds one for each answer, which is all that an answer
pays. A front end counts for itself and hands on what has come every second. Operations and statuses
are those of the protocol: nothing that clients choose becomes a label.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import time_ns

import numpy as np

# Upper bounds in nanoseconds, from 50 microseconds to 10 seconds, in steps of about 2.2.
LATENCY_BOUNDS: tuple[int, ...] = tuple(
    int(ms * 1_000_000)
    for ms in (
        0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000,
    )
)  # fmt: skip
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# Of gRPC, by number.
STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
INFER = "infer"
OTHER = "other"  # the operation of what belongs to none, such as an unknown path
_HTTP_STATUSES = 600
MOST_ORDINALS = 100  # that are kept apart; responses from here on are counted as this one
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"  # the metric, as Triton calls it
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2_000.0, 5_000.0)  # ms
LATENCY_KINDS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_KEPT = 4096  # requests whose latencies summaries are made of
_AGE_NS = 60 * 10**9  # older ones are left out

Sample = tuple[str, str, str, int]  # door, operation, status and how many
Grown = tuple[str, str, int, int]  # the same with the status as a number


class Closed(StrEnum):
    """Why a batch closed, of those that might have got more requests."""

    FULL = "full"  # at a preferred or the greatest size, or the next request does not fit
    SHAPE = "shape"  # only requests of other shapes wait, as far as is looked
    DELAY = "delay"  # its oldest request has waited for as long as the configuration says
    IDLE = "idle"  # nothing else waits, and an instance is free
    DEADLINE = "deadline"  # one of its requests would have timed out in the delay


class Histogram:
    """Counts of durations by upper bounds in nanoseconds; the last is of those above all bounds."""

    __slots__ = ("bounds", "counts", "total_ns")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_ns = 0

    def observe(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration that `times` requests had."""
        self.counts[bisect_left(self.bounds, duration_ns)] += times
        self.total_ns += duration_ns * times


class BatchCounters:
    """Executions of one batch size."""

    __slots__ = ("compute_infer_ns", "compute_input_ns", "compute_output_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0


class Duration:
    """So many, and nanoseconds of all of them."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count += 1
        self.ns += ns


class ResponseCounters:
    """Counters of the responses of one ordinal.

    `compute_infer` and `compute_output` are parts of `success`. `empty_response` is an end that
    came as a message of its own, `cancel` a request that was given up while this one was awaited.
    """

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


class Responses:
    """The counters of the responses of a version that answers a request any number of times.

    `ordinals` are in no order. `first` is there if the version is one that answers many times.
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

    `requests` counts those that it has answered, be it with an error, `batches` those that it has
    run, `switches` how often requests went over to it from another one.
    """

    requests: int = 0
    batches: int = 0
    switches: int = 0


@dataclass(slots=True)
class EndpointCounts:
    """Counters of one upstream of a version.

    `requests` counts the calls that it was sent, each with a batch, `failures` those of them that
    it has not answered as a healthy server does, `ejections` how often it was left out for those.
    """

    requests: int = 0
    failures: int = 0
    ejections: int = 0


class EndKind(StrEnum):
    """The way in which a worker has ended unasked."""

    EXIT = "exit"  # by itself, with whatever status
    SIGNAL = "signal"  # it crashed, or something else has killed it
    HANG = "hang"  # no sign of life
    LIMIT = "limit"  # a batch took longer than it may
    NONSENSE = "nonsense"  # it sent what makes no sense
    ABANDONED = "abandoned"  # it went on with what nobody waited for any more


class RecycleReason(StrEnum):
    """Why a worker was replaced while it was well; the name of the parameter that says when."""

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
    """The latencies of the last requests, in nanoseconds, of each of `LATENCY_KINDS`."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, ...]] = deque(maxlen=_KEPT)

    def add(self, now: int, *durations: int) -> None:
        """Keep the durations of one request, in the order of kinds, in place of the oldest."""
        self._requests.append((now, *durations))

    def quantiles(self, kind: str, quantiles: Sequence[float], now: int) -> list[float]:
        """Nanoseconds for each quantile; NaN if nothing is recent enough."""
        index = 1 + LATENCY_KINDS.index(kind)
        recent = [request[index] for request in self._requests if request[0] > now - _AGE_NS]
        if not recent:
            return [float("nan")] * len(quantiles)
        found: list[float] = np.quantile(recent, quantiles, method="inverted_cdf").tolist()
        return found


class VersionStatistics:
    """The counters of one model version.

    `window` has the latencies of its last requests, which quantiles need: only if they are asked
    for.
    """

    def __init__(self, summaries: bool = False) -> None:
        self.window = Window() if summaries else None
        self.success_count = 0
        self.success_ns = 0
        self.failures = dict.fromkeys(FAILURE_REASONS, 0)
        self.faults = 0  # those of them that are the version's own
        self.fail_ns = 0
        self.queue_ns = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.batches: dict[int, BatchCounters] = defaultdict(BatchCounters)  # by their rows
        self.batches_closed = dict.fromkeys(Closed, 0)
        self.queue_histogram = Histogram()
        self.compute_histogram = Histogram()
        self.request_histogram = Histogram()
        self._histograms = self.compute_histogram, self.queue_histogram, self.request_histogram
        self.paused_histogram = Histogram()  # compute times that clients made longer by not reading
        self.responses = Responses()
        self.backends: dict[str, BackendCounts] = {}  # by name, of a model that has several
        self.ended_runs: Counter[str] = Counter()  # of this process, by why they were ended
        self.endpoints: dict[str, EndpointCounts] = {}  # by name, of one that other servers run

    @property
    def fail_count(self) -> int:
        """Requests that had been accepted and ended without an answer."""
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
    ) -> None:
        """Count a batch: when each answered request arrived, the rows of all of them, the rows of
        the batch, and the times of its four moments.
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
        compute, queue, request = self._histograms
        compute.counts[bisect_left(LATENCY_BOUNDS, ended - started)] += count
        compute.total_ns += (ended - started) * count
        waits, lasts = queue.counts, request.counts
        for moment in arrived:
            waits[bisect_left(LATENCY_BOUNDS, started - moment)] += 1
            lasts[bisect_left(LATENCY_BOUNDS, ended - moment)] += 1
        arrivals = sum(arrived)
        waited, lasted = started * count - arrivals, ended * count - arrivals
        queue.total_ns += waited
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
        """Count a request with its last response, which came later than its batch was run."""
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

    def request_failed(self, reason: str, duration_ns: int, fault: bool = False) -> None:
        """Count a request that ended without an answer for one of `FAILURE_REASONS`."""
        self.failures[reason] += 1
        self.faults += fault
        self.fail_ns += duration_ns


class Answers:
    """Counts of answers by door, operation and status."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def of(self, door: str, operation: str) -> list[int]:
        """The counts of an operation by status, for the door ("http" or "grpc") to add to."""
        counts = self._counts.get((door, operation))
        if counts is None:
            counts = [0] * (len(STATUS_NAMES) if door == "grpc" else _HTTP_STATUSES)
            self._counts[door, operation] = counts
        return counts

    def take(self) -> list[Grown]:
        """Take the counts since the last time, for the process that is told."""
        grown = [
            (*key, status, count)
            for key, counts in self._counts.items()
            if any(counts)
            for status, count in enumerate(counts)
            if count
        ]
        for door, operation, status, _ in grown:
            self._counts[door, operation][status] = 0
        return grown

    def add(self, grown: Iterable[Sequence[object]]) -> None:
        """Count what another process has taken; raises `ValueError` or `TypeError` for nonsense."""
        for door, operation, status, count in grown:
            if not (isinstance(status, int) and isinstance(count, int)):
                raise TypeError(f"expected numbers, got {status!r} and {count!r}")
            self.of(str(door), str(operation))[status] += count

    def samples(self) -> Iterator[Sample]:
        """All counts; of each operation at least that of good answers."""
        for (door, operation), counts in sorted(self._counts.items()):
            good = 0 if door == "grpc" else 200
            for status, count in enumerate(counts):
                if count or status == good:
                    name = STATUS_NAMES[status] if door == "grpc" else str(status)
                    yield door, operation, name, count
