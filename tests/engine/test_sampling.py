"""Sampling of workers' memory."""

import asyncio
from collections.abc import Mapping

import pytest

from headrace.engine.model import ModelVersion
from headrace.engine.sampling import MemoryWatch


class Version(ModelVersion):
    """A version with workers."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__("m", 1)
        self.pids = pids
        self.known: list[dict[str, int]] = []
        self.told = asyncio.Event()

    def worker_pids(self) -> dict[str, int]:
        return self.pids

    def note_memory(self, found: Mapping[str, int]) -> None:
        self.known.append(dict(found))
        self.told.set()


async def test_every_worker_of_every_version_is_sampled() -> None:
    two, none, gone = Version({"a": 7, "b": 8}), Version({}), Version({"c": 0})
    watch = MemoryWatch(lambda: [two, none, gone], 60.0, lambda pid: pid * 100)
    assert await watch.once() >= 0
    assert two.known == [{"a": 700, "b": 800}]
    assert (none.known, gone.known) == ([], [{}])


async def test_sampling_repeats_until_stopped() -> None:
    version = Version({"a": 7})
    watch = MemoryWatch(lambda: [version], 0.001, lambda pid: pid)
    watch.start()
    for _ in range(3):
        await version.told.wait()
        version.told.clear()
    watch.stop()
    watch.stop()
    assert version.known == [{"a": 7}] * 3


async def test_an_error_is_logged_and_sampling_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    version, failures = Version({"a": 7}), [OSError("once")]

    def look(pid: int) -> int:
        if failures:
            raise failures.pop()
        return pid

    watch = MemoryWatch(lambda: [version], 0.001, look)
    watch.start()
    await version.told.wait()
    watch.stop()
    assert "bug while looking at the memory of models" in caplog.text
