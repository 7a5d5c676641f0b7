"""What one model version has done so far, as plain integers.

Added to once per batch on the event-loop thread, read by the statistics endpoint and by Prometheus
scrapes on the same thread: there is no lock and nothing is published. Times are nanoseconds; the
meaning of each counter is Triton's: a batched request has the whole batch's compute times,
`inference_count` counts rows of successful requests, `execution_count` successful batches.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from time import time_ns

from headrace.observability.backends import BackendCounts
from headrace.observability.endpoints import EndpointCounts
from headrace.observability.responses import Responses

# Upper bounds in nanoseconds, from 50 microseconds to 10 seconds, in steps of about 2.2.
LATENCY_BOUNDS: tuple[int, ...] = tuple(
    int(ms * 1_000_000)
    for ms in (
        0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000,
    )
)  # fmt: skip
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class Closed(StrEnum):
    """Why a batch closed, of those that might have got more requests."""

    FULL = "full"  # at a preferred or the greatest size, or the next request does not fit
    SHAPE = "shape"  # only requests of other shapes wait, as far as is looked
    DELAY = "delay"  # its oldest request has waited for as long as the configuration says
    IDLE = "idle"  # nothing else waits, and an instance is free
    DEADLINE = "deadline"  # one of its requests would have timed out in the delay


class Histogram:
    """Counts of durations by `LATENCY_BOUNDS`; the last count is of those above all bounds."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS) + 1)
        self.total_ns = 0

    def observe(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration that `times` requests had."""
        self.counts[bisect_left(LATENCY_BOUNDS, duration_ns)] += times
        self.total_ns += duration_ns * times


class BatchCounters:
    """Executions of one batch size."""

    __slots__ = ("compute_infer_ns", "compute_input_ns", "compute_output_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0


class VersionStatistics:
    """The counters of one model version."""

    def __init__(self) -> None:
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
        self.batches: dict[int, BatchCounters] = {}
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
        batch = self.batches.get(batch_rows)
        if batch is None:
            batch = self.batches[batch_rows] = BatchCounters()
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

    def batch_opened(self, batch_rows: int, started: int, gathered: int, computed: int) -> None:
        """Count a batch whose requests are answered later."""
        self.execution_count += 1
        self.last_inference_ms = time_ns() // 1_000_000
        batch = self.batches.get(batch_rows)
        if batch is None:
            batch = self.batches[batch_rows] = BatchCounters()
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

    def request_failed(self, reason: str, duration_ns: int, fault: bool = False) -> None:
        """Count a request that ended without an answer for one of `FAILURE_REASONS`."""
        self.failures[reason] += 1
        self.faults += fault
        self.fail_ns += duration_ns
