"""The series of a version's workers."""

from prometheus_client.metrics_core import Metric

from headrace.engine.metrics import WORKER_FAMILIES, collected
from headrace.observability.machine import resident_bytes
from headrace.observability.series import WorkerSeries
from headrace.observability.statistics import EndKind, RecycleReason, WorkerCounters

ONE = {"model": "m", "version": "1"}


def samples(families: list[Metric]) -> dict[str, dict[str, float]]:
    """By name, the value of each sample by the label that it has beside those of its version."""
    found: dict[str, dict[str, float]] = {}
    for family in families:
        found[family.name] = {}
        for sample in family.samples:
            [more] = [v for k, v in sample.labels.items() if k not in ONE] or [""]
            found[family.name][more] = sample.value
    return found


def test_what_has_become_of_workers() -> None:
    counters = WorkerCounters()
    counters.ends[EndKind.HANG] += 2
    counters.recycled[RecycleReason.MAX_RSS] += 1
    series = WorkerSeries(3, {"m_0": 1000, "m_2": 2000}, counters, 4)
    assert samples(list(collected(WORKER_FAMILIES, [(ONE, series)]))) == {
        "headrace_workers": {"": 3},
        "headrace_workers_running": {"": 2},
        "headrace_worker_resident_bytes": {"m_0": 1000, "m_2": 2000},
        "headrace_worker_ends": {
            "exit": 0,
            "signal": 0,
            "hang": 2,
            "limit": 0,
            "nonsense": 0,
            "abandoned": 0,
        },
        "headrace_worker_recycles": {"max_rss": 1, "max_requests": 0},
        "headrace_quarantined_requests": {"": 4},
    }


def test_memory_of_a_process() -> None:
    assert resident_bytes(1) > 4096
    assert resident_bytes(2**30) == 0
