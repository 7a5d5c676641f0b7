"""Sampling of workers' memory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from headrace.engine.report import VersionReport
from headrace.engine.sampling import MemoryWatch
from headrace.engine.version import ModelVersion
from headrace.observability.statistics import VersionStatistics


class Report(VersionReport):
    """The report of a version with workers."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__(VersionStatistics())
        self.pids = pids
        self.known: list[dict[str, int]] = []
        self.told = asyncio.Event()

    def worker_pids(self) -> dict[str, int]:
        return self.pids

    def note_memory(self, found: Mapping[str, int]) -> None:
        self.known.append(dict(found))
        self.told.set()


def versions(*reports: Report) -> Callable[[], Sequence[ModelVersion]]:
    """The versions with these reports."""
    found = [ModelVersion("m", number) for number, _ in enumerate(reports, 1)]
    for version, report in zip(found, reports, strict=True):
        version.report = report
    return lambda: found


async def test_every_worker_of_every_version_is_sampled() -> None:
    two, none, gone = Report({"a": 7, "b": 8}), Report({}), Report({"c": 0})
    watch = MemoryWatch(versions(two, none, gone), 60.0, lambda pid: pid * 100)
    assert await watch.once() >= 0
    assert two.known == [{"a": 700, "b": 800}]
    assert (none.known, gone.known) == ([], [{}])


async def test_sampling_repeats_until_stopped() -> None:
    report = Report({"a": 7})
    watch = MemoryWatch(versions(report), 0.001, lambda pid: pid)
    watch.start()
    for _ in range(3):
        await report.told.wait()
        report.told.clear()
    watch.stop()
    watch.stop()
    assert report.known == [{"a": 7}] * 3


async def test_an_error_is_logged_and_sampling_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report, failures = Report({"a": 7}), [OSError("once")]

    def look(pid: int) -> int:
        if failures:
            raise failures.pop()
        return pid

    watch = MemoryWatch(versions(report), 0.001, look)
    watch.start()
    await report.told.wait()
    watch.stop()
    assert "bug while looking at the memory of models" in caplog.text
