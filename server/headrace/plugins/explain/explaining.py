"""Explanations of a version: how its batches were formed, where time goes, what would be better.

An explanation is made of the version's counters and the log of its scheduler's last batches, which
begins with the first explanation, and ends some time after the last one: without it requests cost
nothing more. The replays run on a thread: they take 0.05 s, and ten times that if hundreds of
requests wait. Times are in nanoseconds.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from headrace.engine.running import RunningVersion
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import VersionStatistics
from headrace.plugins.explain.replay import (
    alternatives,
    learn_cost,
    percentile,
    replay,
    seen_requests,
)
from headrace.scheduling.batch_log import LoggedBatch, LoggedRequest
from headrace.scheduling.batcher import Batcher
from headrace.scheduling.policy import SchedulingPolicy

_SHOWN = 20  # batches that are listed
_AGAIN = "again"  # the reason of batches that were not formed from a queue

Document = dict[str, Any]


async def explain(version: ModelVersion) -> Document:
    """The explanation of a version; raises `ModelNotReady`."""
    running = version.report.running
    if running is None:
        raise version.not_ready()
    scheduling, scheduler = running.loaded.scheduling, running.scheduler
    instances = sum(max(each.concurrency, 1) for each in running.instances)
    batches, logged_ns = list[LoggedBatch](), 0
    if isinstance(scheduler, Batcher):
        batches, logged_ns = scheduler.logged()
    obstacle = _obstacle(running, batches)
    recorded = await asyncio.to_thread(_of_batches, batches, scheduling, instances, obstacle)
    return {
        "name": version.model, "version": version.name,
        "settings": {
            "max_batch_size": scheduling.batch.max_rows,
            "preferred_batch_size": sorted(scheduling.batch.preferred),
            "max_queue_delay_microseconds": scheduling.batch.max_delay // 1_000,
            "instances": instances,
        },
        "since_load": _since_load(version.report.statistics),
        "logged_ns": logged_ns, **recorded,
    }  # fmt: skip


def _obstacle(running: RunningVersion, batches: Sequence[LoggedBatch]) -> str:
    """The reason why nothing can be replayed; "" if it can be."""
    if not isinstance(running.scheduler, Batcher):
        return "its batches are not formed by one queue: only the counters are known"
    if running.sequences is not None or any(b.requests[0].targeted for b in batches):
        return "its requests have a state: they do not share batches as they come"
    if running.decoupled:
        return "its requests are answered one by one: their batches are not logged"
    if not batches:
        return "no batch has been logged yet: the log has begun with the first explanation"
    return ""


def _since_load(counts: VersionStatistics) -> Document:
    """Averages of all successful requests."""
    sums = counts.queue_ns, counts.compute_input_ns, counts.compute_infer_ns, counts.success_ns
    each = [total // max(counts.success_count, 1) for total in sums]
    batches = {reason.value: count for reason, count in counts.batches_closed.items()}
    return {
        "requests": counts.success_count, "batches": counts.execution_count, "closed": batches,
        "request": _parts(*each),
    }  # fmt: skip


def _parts(
    queue: int, gather: int, run: int, total: int, arrive: int | None = None, answer: int = 0
) -> Document:
    """The parts of a request's time: the rest is that of dividing the outputs.

    `total` is that without the time at the door, which is not known where `arrive` is None.
    """
    parts = {
        "queue_ns": queue, "gather_ns": gather, "run_ns": run,
        "rest_ns": max(total - queue - gather - run, 0),
    }  # fmt: skip
    if arrive is None:
        return {"arrive_ns": None, **parts, "answer_ns": None, "total_ns": total}
    return {
        "arrive_ns": arrive, **parts, "answer_ns": answer, "total_ns": arrive + total + answer
    }  # fmt: skip


def _arrived(request: LoggedRequest) -> int:
    """Nanoseconds from the begin of a request at its door to its arrival in the queue."""
    return max(request.arrived - request.begun, 0) if request.begun else 0


def _of_batches(
    batches: Sequence[LoggedBatch], scheduling: SchedulingPolicy, instances: int, obstacle: str
) -> Document:
    """The part of an explanation that is computed from the log."""
    cost = learn_cost([(batch.rows, batch.ended - batch.started) for batch in batches])
    requests = [(batch, request) for batch in batches for request in batch.requests]
    lasted = [batch.ended - request.arrived for batch, request in requests]
    count = max(len(requests), 1)
    request = _parts(
        sum(batch.started - each.arrived for batch, each in requests) // count,
        sum(batch.gathered - batch.started for batch, _ in requests) // count,
        sum(batch.computed - batch.gathered for batch, _ in requests) // count,
        sum(lasted) // count,
        sum(_arrived(each) for _, each in requests) // count,
        sum(batch.answered - batch.ended for batch, _ in requests) // count,
    )
    closed = Counter(batch.closed.value if batch.closed else _AGAIN for batch in batches)
    what_if = list[Document]()
    if cost is not None and not obstacle:
        policy, seen = scheduling.batch, seen_requests(batches, scheduling.batch)
        largest = max(each.rows for _, each in requests)
        levels = sorted({each.level for _, each in requests})
        for other in alternatives(policy, instances, largest, cost.sizes, levels):
            found = replay(seen, other.policy, other.instances, cost.of, moved=other.moved)
            result = _result(found.rows, found.latencies_ns, found.levels)
            what_if.append({"change": other.change, **result, "busy": round(found.busy, 4)})
        if len(what_if) == 1:
            obstacle = "all batches had the same number of rows: the cost of others is not known"
    return {
        "logged": {
            "requests": len(requests), "closed": dict(closed), "request": request,
            **_result(
                [batch.rows for batch in batches], lasted, [each.level for _, each in requests]
            ),
        },
        "cost": None if cost is None else {
            "batches": cost.batches, "sizes": cost.sizes, "fixed_ns": round(cost.fixed_ns),
            "row_ns": round(cost.row_ns), "error_ns": round(cost.error_ns),
        },
        "last_batches": [_batch(batch) for batch in reversed(batches[-_SHOWN:])],
        "what_if": what_if, "obstacle": obstacle,
    }  # fmt: skip


def _result(rows: Sequence[int], latencies_ns: Sequence[int], levels: Sequence[int]) -> Document:
    """The number and size of batches, logged or replayed, and the latencies of their requests.

    `levels` are the priority levels of the requests: of several, each has its latencies.
    """
    by_level: dict[int, list[int]] = {}
    for level, latency in zip(levels, latencies_ns, strict=True):
        by_level.setdefault(level, []).append(latency)
    return {
        "batches": len(rows), "rows_per_batch": round(sum(rows) / max(len(rows), 1), 2),
        **_latencies(latencies_ns),
        "levels": [
            {"level": level, "requests": len(of), **_latencies(of)}
            for level, of in sorted(by_level.items())
            if len(by_level) > 1
        ],
    }  # fmt: skip


def _latencies(found: Sequence[int]) -> Document:
    return {"mean_ns": sum(found) // max(len(found), 1), "p99_ns": percentile(found, 0.99)}


def _batch(batch: LoggedBatch) -> Document:
    """A batch; its `queue_ns` are those of the request that waited longest."""
    request = min(batch.requests, key=attrgetter("arrived"))
    first = request.arrived
    return {
        "rows": batch.rows, "requests": len(batch.requests),
        "closed": batch.closed.value if batch.closed else _AGAIN,
        **_parts(
            batch.started - first, batch.gathered - batch.started,
            batch.computed - batch.gathered, batch.ended - first, _arrived(request),
            batch.answered - batch.ended,
        ),
    }  # fmt: skip
