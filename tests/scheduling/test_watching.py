"""When single requests were computed, as the scheduler tells whoever watches them."""

from headrace.observability.statistics import VersionStatistics
from headrace.scheduling.watching import WatchingRecorder

Times = tuple[int, int, int, int]


def test_only_who_is_watched_is_told_of() -> None:
    counters = VersionStatistics()
    recorder = WatchingRecorder(counters)
    told: list[Times] = []

    def tell(*times: int) -> None:
        told.append(times)  # type: ignore[arg-type]

    recorder.watch(20, tell)
    recorder.batch_succeeded([10, 11], 2, 2, 30, 31, 35, 36)
    assert told == []
    recorder.batch_succeeded([19, 20], 2, 2, 40, 41, 45, 46)
    assert told == [(40, 41, 45, 46)]
    assert counters.success_count == 4
    recorder.unwatch(20, tell)
    assert recorder.idle


def test_several_who_arrived_at_one_moment() -> None:
    recorder = WatchingRecorder(VersionStatistics())
    told: list[str] = []

    def first(*_: int) -> None:
        told.append("first")

    def second(*_: int) -> None:
        told.append("second")

    recorder.watch(1, first)
    recorder.watch(1, second)
    recorder.unwatch(1, first)
    recorder.request_completed(1, 1, 5, 9)
    assert told == ["second"]
    assert not recorder.idle


def test_everything_is_counted_as_before() -> None:
    counters = VersionStatistics()
    recorder = WatchingRecorder(counters)
    recorder.batch_opened(2, 1, 2, 3)
    recorder.request_completed(0, 1, 1, 4)
    recorder.request_failed("OTHER", 5)
    assert (counters.execution_count, counters.success_count, counters.fail_count) == (1, 1, 1)
