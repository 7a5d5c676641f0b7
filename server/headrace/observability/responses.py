"""The responses of a model that answers a request any number of times, by their ordinals.

A model that answers once has none of it. Times are nanoseconds. Owned by the event-loop thread.
"""

from bisect import bisect_left
from collections.abc import Sequence

MOST = 100  # ordinals that are kept apart; those from here on are counted as this one
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"  # the metric, as Triton calls it
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2_000.0, 5_000.0)  # ms


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
    """What has become of the responses of one ordinal.

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


class FirstResponses:
    """Milliseconds from requests to their first responses, counted by upper bounds."""

    def __init__(self, bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total_ms = 0.0

    def observe(self, ns: int) -> None:
        """Count one."""
        ms = ns / 1e6
        self.counts[bisect_left(self.bounds, ms)] += 1
        self.total_ms += ms


class Responses:
    """The counters of a version's responses.

    `ordinals` are in no order. `first` is there if the version is one that answers many times.
    """

    def __init__(self) -> None:
        self.ordinals: dict[int, ResponseCounters] = {}
        self.first: FirstResponses | None = None

    def of(self, ordinal: int) -> ResponseCounters:
        """The counters of an ordinal."""
        ordinal = min(ordinal, MOST)
        counters = self.ordinals.get(ordinal)
        if counters is None:
            counters = self.ordinals[ordinal] = ResponseCounters()
        return counters
