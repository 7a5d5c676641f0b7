"""When a worker is to be replaced."""

import pytest

from headrace.execution.recycling import recycle_reason, retry_delay
from headrace.execution.worker_options import WorkerOptions
from headrace.observability.statistics import RecycleReason


@pytest.mark.parametrize(
    ("max_rss", "max_requests", "resident", "requests", "reason"),
    [
        (0, 0, 10**12, 10**9, None),
        (100, 0, 100, 9, None),
        (100, 0, 101, 0, RecycleReason.MAX_RSS),
        (0, 5, 10**12, 4, None),
        (0, 5, 0, 5, RecycleReason.MAX_REQUESTS),
        (100, 5, 101, 5, RecycleReason.MAX_RSS),
    ],
)
def test_when_a_worker_is_replaced(
    max_rss: int, max_requests: int, resident: int, requests: int, reason: RecycleReason | None
) -> None:
    options = WorkerOptions(max_rss=max_rss, max_requests=max_requests)
    assert recycle_reason(options, resident, requests) is reason


def test_delays_grow_up_to_a_minute() -> None:
    assert [retry_delay(failures) for failures in (0, 1, 2, 3, 4, 99)] == [5, 10, 20, 40, 60, 60]
