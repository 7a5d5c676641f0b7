"""The learned cost of a batch, and a replay of logged requests with other settings.

Pure functions over the log of a scheduler. The replay is a simulation of instances that each run
one batch at a time, for as long as the cost says: the policy of the scheduler forms the batches
from the requests as they came. Requests keep their moments whatever the settings: clients that wait
for an answer before they send again would send at other times.

A scheduler forms a batch at the end of a turn of the event loop, with all that was read in it: so a
request of the log is seen when its batch started, if an instance was free and there is no delay.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import sqrt
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from headrace.scheduling.batch_log import LoggedBatch, LoggedRequest
from headrace.scheduling.policy import BatchPolicy

_DELAYS_US = 500, 2_000  # tried for a model without a delay
_LEVELS = 3  # whose requests are tried as the most urgent ones


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Nanoseconds of a batch: `fixed_ns + row_ns * rows`, with the root mean square of the errors.

    Learned from `batches` of `sizes` different numbers of rows: with a single size, all is fixed.
    """

    fixed_ns: float
    row_ns: float
    error_ns: float
    batches: int
    sizes: int

    def of(self, rows: int) -> int:
        """The cost of a batch of so many rows."""
        return round(self.fixed_ns + self.row_ns * rows)


def learn_cost(batches: Sequence[tuple[int, int]]) -> BatchCost | None:
    """The cost by least squares from rows and nanoseconds of batches; None without any.

    Neither part is negative: what noise makes so is 0, and the other part fits best then.
    """
    count = len(batches)
    if not count:
        return None
    mean_rows = sum(rows for rows, _ in batches) / count
    mean_ns = sum(ns for _, ns in batches) / count
    spread = sum((rows - mean_rows) ** 2 for rows, _ in batches)
    slope = 0.0
    if spread:
        slope = sum((rows - mean_rows) * (ns - mean_ns) for rows, ns in batches) / spread
    fixed, slope = mean_ns - max(slope, 0.0) * mean_rows, max(slope, 0.0)
    if fixed < 0:
        squares = sum(rows * rows for rows, _ in batches)
        fixed, slope = 0.0, sum(rows * ns for rows, ns in batches) / squares
    error = sqrt(sum((fixed + slope * rows - ns) ** 2 for rows, ns in batches) / count)
    return BatchCost(fixed, slope, error, count, len({rows for rows, _ in batches}))


class SeenRequest(NamedTuple):
    """A request, and the moment from which on a batch may have it."""

    seen: int
    request: LoggedRequest


def seen_requests(batches: Sequence[LoggedBatch], policy: BatchPolicy) -> list[SeenRequest]:
    """The requests of batches that were formed with a policy, in the order of their arrival."""
    found: list[SeenRequest] = []
    for batch in sorted(batches, key=lambda one: one.started):
        arrived = min(request.arrived for request in batch.requests)
        at_once = batch.closed is not None and not policy.max_delay
        turn = batch.started if at_once and batch.free <= arrived else 0
        found += [SeenRequest(max(turn, each.arrived), each) for each in batch.requests]
    found.sort(key=lambda each: each.request.arrived)
    latest = 0
    for at, (seen, request) in enumerate(found):  # none is seen before an earlier one
        latest = max(latest, seen)
        found[at] = SeenRequest(latest, request)
    return found


@dataclass(frozen=True, slots=True)
class Replayed:
    """The batches of a replay: their rows, by the order of their start, and what came of them.

    `latencies_ns` are from the arrival of each request to the end of its batch, `levels` the
    priority levels of the same requests. `busy` is the share
    of the time in which instances ran, `lasted_ns` the time from the first request to the last end.
    """

    rows: list[int] = field(default_factory=list)
    latencies_ns: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    busy: float = 0.0
    lasted_ns: int = 0


def replay(
    requests: Sequence[SeenRequest],
    policy: BatchPolicy,
    instances: int,
    cost: Callable[[int], int],
    pause: int = 0,
    more: int = 0,
    moved: Mapping[int, int] = MappingProxyType({}),
) -> Replayed:
    """Run requests, in the order in which they are seen, as if a policy had formed the batches.

    `cost` is the nanoseconds of a batch of so many rows. Clients send `more` requests: each one
    `pause` nanoseconds after the answer to a request, with as many rows. Requests of the priority
    levels in `moved` have those instead. Precondition: no request has more rows than the policy
    allows.
    """

    def level(request: LoggedRequest) -> int:
        return moved.get(request.level, request.level)

    coming = list(requests)
    rows_run, latencies, levels = list[int](), list[int](), list[int]()
    waiting: list[LoggedRequest] = []
    running: list[int] = []  # ends of batches
    spent = at = last = 0
    ask_at: int | None = None
    while True:
        moments = [coming[at].seen] if at < len(coming) else []
        moments += running[:1]
        if ask_at is not None:
            moments.append(ask_at)
        if not moments:
            break
        now = min(moments)
        while at < len(coming) and coming[at].seen <= now:
            insort(waiting, coming[at].request, key=level)
            at += 1
        while running and running[0] <= now:
            heappop(running)
        ask_at = None
        while waiting and len(running) < instances:
            places, _, ask_at = policy.take(waiting, now)
            if not places:
                break
            rows = sum(waiting[place].rows for place in places)
            took = cost(rows)
            last = max(last, now + took)
            spent += took
            rows_run.append(rows)
            latencies += [now + took - waiting[place].arrived for place in places]
            levels += [waiting[place].level for place in places]
            for place in places[: len(requests) + more - len(coming)]:
                moment = now + took + pause
                again = SeenRequest(moment, waiting[place]._replace(arrived=moment))
                insort(coming, again, lo=at, key=attrgetter("seen"))
            heappush(running, now + took)
            if len(places) == places[-1] + 1:
                del waiting[: len(places)]
            else:
                taken = set(places)
                waiting = [one for place, one in enumerate(waiting) if place not in taken]
    lasted = last - requests[0].seen if requests else 0
    busy = spent / (lasted * instances) if lasted else 0.0
    return Replayed(rows_run, latencies, levels, busy, lasted)


class Alternative(NamedTuple):
    """Other settings: what they change, under the names of the configuration.

    Requests of the priority levels in `moved` have those instead.
    """

    change: dict[str, Any]
    policy: BatchPolicy
    instances: int
    moved: Mapping[int, int] = MappingProxyType({})


def alternatives(
    policy: BatchPolicy, instances: int, largest: int, sizes: int, levels: Sequence[int] = (1,)
) -> Iterator[Alternative]:
    """The present settings, and others: each changes one of size, delay, instances and priorities.

    A preferred size that is the largest one follows it. Of several priority `levels`, the requests
    of each of the first ones are tried at the most urgent level, and all of them at one.
    No batch is smaller than the `largest` request. If all batches have had one of `sizes` rows, the
    cost of others is not known: nothing changes then, unless the model does not batch.
    """
    yield Alternative({}, policy, instances)
    if policy.max_rows and sizes < 2:
        return
    rows, delay = policy.max_rows, policy.max_delay
    for size in (rows // 2, rows * 2) if rows else ():
        if size >= max(largest, 1):
            preferred = {size if each == rows else each for each in policy.preferred}
            fitting = frozenset(each for each in preferred if each <= size)
            other = replace(policy, max_rows=size, preferred=fitting)
            yield Alternative({"max_batch_size": size}, other, instances)
    if rows:
        for us in (0, delay // 2_000, delay // 500) if delay else _DELAYS_US:
            if us * 1_000 != delay:
                other = replace(policy, max_delay=us * 1_000)
                yield Alternative({"max_queue_delay_microseconds": us}, other, instances)
    for number in (instances - 1, instances + 1):
        if number:
            yield Alternative({"instances": number}, policy, number)
    if len(levels) > 1:
        first, *others = sorted(levels)
        for level in others[:_LEVELS]:
            change = {f"priority {level}": first}
            yield Alternative(change, policy, instances, {level: first})
        if len(others) > 1:
            same = dict.fromkeys(others, first)
            yield Alternative({"priority_levels": 0}, policy, instances, same)


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least such a share of them does not exceed; 0 without any."""
    return int(np.quantile(values or [0], share, method="inverted_cdf"))
