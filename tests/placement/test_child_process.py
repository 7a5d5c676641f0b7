"""Child processes: output, end and restart."""

import asyncio
import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from headrace.placement.child_process import (
    Backoff,
    ChildProcess,
    ProcessOutput,
    Reaping,
    RestartPolicy,
)
from tests.support.scrape import until

REAPED = pytest.mark.parametrize("reaping", [None, Reaping()], ids=["alone", "reaped"])


def start(script: str, output: ProcessOutput | None = None, *, reaping: Reaping | None = None,
          folder: Path | None = None) -> ChildProcess:  # fmt: skip
    """A process that runs a shell script."""
    path = {"PATH": os.environ["PATH"]}
    return ChildProcess(["sh", "-c", script], path, output, reaping=reaping, folder=folder)


async def ended(child: ChildProcess) -> None:
    """Watch a process until its end."""
    exited = asyncio.Event()
    child.attach(asyncio.get_running_loop(), exited.set)
    await asyncio.wait_for(exited.wait(), 30)


def until_gone(file: Path) -> None:
    """Wait until the process whose id is in a file has ended."""

    def gone() -> bool:
        try:
            return psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(gone, "a process to end")


@REAPED
@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("exit 3", "ended with status 3"),
        ("kill -9 $$", "was ended by SIGKILL"),
        ("exit 0", "ended with status 0"),
    ],
)
def test_exit_status_of_a_process(script: str, end: str, reaping: Reaping | None) -> None:
    child = start(script, reaping=reaping)
    asyncio.run(ended(child))
    assert child.ended
    assert child.end == end


@REAPED
def test_output_is_logged_to_the_last_line(
    caplog: pytest.LogCaptureFixture, reaping: Reaping | None
) -> None:
    caplog.set_level(logging.INFO)
    output = ProcessOutput("m", {"model": "m"})
    asyncio.run(ended(start("echo one; echo >&2 two; printf rest", output, reaping=reaping)))
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.model"]
    assert lines == ["m: one", "m: two", "m: rest"]


def test_many_lines_are_logged_in_portions(caplog: pytest.LogCaptureFixture) -> None:
    """Other work of the event loop is done between them; none is lost, also at the end."""
    caplog.set_level(logging.INFO)

    async def portions() -> list[int]:
        loop, found = asyncio.get_running_loop(), list[int]()

        def look() -> None:
            found.append(len(caplog.records))
            loop.call_soon(look)

        look()
        await ended(start("seq 1500; sleep 0.2", ProcessOutput("m")))
        return found

    counts = asyncio.run(portions())
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.model"]
    assert lines == [f"m: {n}" for n in range(1, 1501)]
    assert max(after - before for before, after in pairwise(counts)) < 200


@REAPED
def test_descendants_end_with_their_process(tmp_path: Path, reaping: Reaping | None) -> None:
    script = "sleep 600 & echo $! > other; exit 1"
    asyncio.run(ended(start(script, reaping=reaping, folder=tmp_path)))
    until_gone(tmp_path / "other")


@REAPED
async def test_a_process_is_killed_with_its_descendants(
    tmp_path: Path, reaping: Reaping | None
) -> None:
    script = "trap '' TERM; sleep 600 & echo $! > new; mv new other; wait"
    child = start(script, reaping=reaping, folder=tmp_path)
    until(lambda: (tmp_path / "other").exists(), "its child")
    exited = asyncio.Event()
    child.attach(asyncio.get_running_loop(), exited.set)
    child.kill_after(0.001)
    await asyncio.wait_for(exited.wait(), 30)
    assert child.end == "was ended by SIGKILL"
    until_gone(tmp_path / "other")


@REAPED
def test_without_an_event_loop_a_process_is_killed_at_once(reaping: Reaping | None) -> None:
    child = start("sleep 600", reaping=reaping)
    child.kill()
    assert child.ended
    assert child.end == "was ended by SIGKILL"
    child.kill()  # which changes nothing


def test_a_reaped_process_can_be_terminated(tmp_path: Path) -> None:
    child = start(
        "trap 'echo bye > told; exit 5' TERM; touch ready; while :; do sleep 0.01; done",
        reaping=Reaping(), folder=tmp_path,
    )  # fmt: skip
    until(lambda: (tmp_path / "ready").exists(), "it to run")
    child.terminate()
    asyncio.run(ended(child))
    assert child.status == 5
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("early_ends", "seconds"),
    [(0, 0), (1, 0), (2, 0.1), (3, 0.2), (4, 0.4), (5, 30), (6, 30), (10**3, 30)],
)
def test_times_of_restarts(early_ends: int, seconds: float) -> None:
    policy = RestartPolicy()
    for _ in range(early_ends):
        policy.ended()
    assert policy.delay == pytest.approx(seconds)
    assert policy.looping is (early_ends >= 5)
    policy.steady()
    policy.ended()
    assert policy.delay == 0


def test_blameless_exits_do_not_count_as_a_crash_loop() -> None:
    policy = RestartPolicy()
    for _ in range(100):
        policy.ended(to_blame=False)
    assert not policy.looping
    assert policy.delay == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("first", "longest", "delays"),
    [(5, 60, [5, 10, 20, 40, 60, 60]), (0.1, 0.3, [0.1, 0.2, 0.3, 0.3])],
)
def test_restart_delays_grow(first: float, longest: float, delays: Sequence[float]) -> None:
    backoff = Backoff(first, longest)
    assert backoff.delay == 0
    assert [backoff.failed() for _ in delays] == pytest.approx(delays)
    for _ in range(2000):
        assert backoff.failed() == longest
    backoff.succeeded()
    assert backoff.failed() == first
