"""Health samples of versions."""

from headrace.engine.version import ModelVersion
from headrace.plugins.traffic.control import NOTHING, Samples, TrafficWatch, counts_of
from headrace.plugins.traffic.decisions import Counts
from headrace.plugins.traffic.router import VersionLedger
from headrace.plugins.traffic.rules import RollbackRule


def counts(requests: int, failures: int = 0) -> Counts:
    return Counts(requests, failures, (requests - failures, *NOTHING.latencies[1:]))


def test_a_window_moves_on() -> None:
    samples = Samples(10)
    assert samples.recent == NOTHING
    for now, requests in ((0, 100), (5, 120), (10, 150), (15, 150), (25, 160)):
        samples.add(now, counts(requests, requests // 2))
    assert samples.recent == counts(10, 5)
    # A version that starts over.
    samples = Samples(10)
    samples.add(0, counts(100))
    samples.add(1, counts(3))
    samples.add(2, counts(5))
    assert samples.recent == counts(2)


def test_samples_that_count() -> None:
    version, ledger = ModelVersion("m", 1), VersionLedger(refused=2)
    statistics = version.report.statistics
    for reason in ("BACKEND", "REJECTED", "CANCELED", "OTHER"):
        statistics.request_failed(reason, 1)
    for reason in ("BACKEND", "OTHER"):
        statistics.request_failed(reason, 1, fault=True)
    statistics.request_completed(0, 1, 1, 2_000_000)
    found = counts_of(version, ledger)
    assert (found.requests, found.failures, sum(found.latencies)) == (5, 4, 1)


def test_neither_the_queue_nor_a_slow_reader_makes_a_version_slow() -> None:
    version, second = ModelVersion("m", 1), 1_000_000_000
    queued, computed = 60 * second, 1_000_000
    statistics = version.report.statistics
    # Arrived, inferences, rows; started, gathered, computed, ended.
    statistics.batch_succeeded([0], 1, 1, queued, queued, queued, queued + computed)
    statistics.request_completed(0, 1, queued, queued + computed)
    statistics.request_completed(0, 1, 0, 60 * second, paused=True)
    found = counts_of(version, VersionLedger())
    assert (found.requests, sum(found.latencies)) == (3, 2)
    assert found.latency_ms(1.0) <= 1


async def test_a_bad_version_is_reported() -> None:
    now: dict[int, Counts] = {1: counts(0), 2: counts(0), 3: counts(0)}
    told: list[tuple[int, str]] = []
    rule = RollbackRule(max_error_rate=0.1, min_requests=10)
    watch = TrafficWatch(rule, 1, lambda: [2, 3], lambda: now, lambda n, why: told.append((n, why)))
    watch.look()
    now.update({2: counts(100, 50), 3: counts(100, 1)})
    watch.look()
    assert [number for number, _ in told] == [2]
    assert watch.recent(2) == counts(100, 50)
    del now[1]
    now[3] = counts(200, 90)
    watch.look()
    assert len(told) == 1  # no better version exists
    assert watch.recent(1) == NOTHING
    watch.stop()


async def test_a_stopped_watch_reports_nothing() -> None:
    told: list[int] = []
    rule = RollbackRule(max_error_rate=0, min_requests=1)
    now: dict[int, Counts] = {1: counts(0), 2: counts(0), 3: counts(0)}
    watch: TrafficWatch

    def act(number: int, why: str) -> None:
        told.append(number)
        watch.stop()

    watch = TrafficWatch(rule, 1, lambda: [2, 3], lambda: now, act)
    watch.look()
    now.update({2: counts(9, 9), 3: counts(9, 9)})
    watch.look()
    assert told == [2]
