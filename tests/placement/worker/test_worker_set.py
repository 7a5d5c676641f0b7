"""Replacement of workers."""

import asyncio
from typing import Any

import pytest

from headrace.core.errors import ServerError
from headrace.observability.statistics import RecycleReason
from headrace.placement.placement import Surroundings
from headrace.placement.worker.python_options import WorkerOptions
from headrace.placement.worker.worker_set import WorkerSet, recycle_reason
from tests.scheduling.fakes import signature


@pytest.mark.parametrize(
    ("max_rss", "max_requests", "resident", "requests", "reason"),
    [
        (0, 0, 10**12, 10**9, None), (100, 0, 100, 9, None),
        (100, 0, 101, 0, RecycleReason.MAX_RSS), (0, 5, 10**12, 4, None),
        (0, 5, 0, 5, RecycleReason.MAX_REQUESTS), (100, 5, 101, 5, RecycleReason.MAX_RSS),
    ],
)  # fmt: skip
def test_times_of_replacement(
    max_rss: int, max_requests: int, resident: int, requests: int, reason: RecycleReason | None
) -> None:
    options = WorkerOptions(max_rss=max_rss, max_requests=max_requests)
    assert recycle_reason(options, resident, requests) is reason


def test_new_requests_are_refused_before_queued_ones_fail() -> None:
    """A client may send its next request from within its answer; it would wait for ever."""
    told: list[str] = []

    class Failing:
        suspend = resume = answer = None

        def fail_waiting(self, error: ServerError) -> bool:
            told.append(f"failed: {error}")
            return True

    scheduler: Any = Failing()
    host: Any = None
    loop = asyncio.new_event_loop()
    version = Surroundings(signature(), scheduler, host, loop, lambda: told.append("refused"))
    WorkerSet(version).changed()  # without any worker that could restart
    loop.close()
    assert told[0] == "refused"
    assert "its worker processes end again and again" in told[1]
