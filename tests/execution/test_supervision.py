"""For how long a worker counts as silent, and when one is to be replaced."""

import pytest

from headrace.execution.recycling import recycle_reason, retry_delay
from headrace.execution.supervision import Pulse
from headrace.execution.worker_options import WorkerOptions
from headrace.observability.workers import RecycleReason


def test_a_worker_that_counts_is_never_silent() -> None:
    pulse = Pulse()
    assert [pulse.look(7, beats, 1.0) for beats in range(5)] == [0.0] * 5


def test_silence_adds_up_until_the_next_sign() -> None:
    pulse = Pulse()
    assert [pulse.look(7, beats, 1.0) for beats in (5, 5, 5, 6, 6)] == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_the_next_process_starts_afresh() -> None:
    pulse = Pulse()
    assert [pulse.look(pid, 5, 1.0) for pid in (7, 7, 8, 8)] == [0.0, 1.0, 0.0, 1.0]


def test_a_worker_that_has_never_counted_is_silent() -> None:
    pulse = Pulse()
    assert [pulse.look(7, 0, 1.0) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_pause_of_the_server_itself_is_not_held_against_a_worker() -> None:
    pulse = Pulse()
    assert [pulse.look(7, 5, elapsed) for elapsed in (1.0, 600.0)] == [0.0, 2.0]


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
