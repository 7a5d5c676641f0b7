"""CPU and memory of the machine, and memory of processes."""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from mmap import MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path

import pytest

from headrace.observability.machine import (
    GrowthMeter,
    Machine,
    ProcessUse,
    ProcessUses,
    in_process_estimate,
    memory_of,
    process_use,
)

MEMINFO = """\
MemTotal:       16384000 kB
MemFree:          100000 kB
MemAvailable:   12384000 kB
Buffers:          500000 kB
Cached:         11000000 kB
"""


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tell(proc: Path, busy: int, idle: int, waiting: int = 0) -> None:
    """Set the machine's CPU time, of which guests had one tick."""
    (proc / "stat").write_text(
        f"cpu  {busy - 3} 1 1 {idle} {waiting} 0 1 0 1 0\ncpu0 1 1 1 1 0 0 0 0 0 0\nintr 7\n"
    )


def test_cpu_share_is_of_the_time_since_the_last_reading(tmp_path: Path) -> None:
    clock = Clock()
    tell(tmp_path, 500, 1_500)
    machine = Machine(tmp_path, clock)
    assert machine.cpu_share() == 0.25  # since the machine was started
    tell(tmp_path, 590, 1_505, waiting=5)
    clock.now += 15
    assert machine.cpu_share() == 0.9
    tell(tmp_path, 600, 1_595, waiting=5)
    clock.now += 15
    assert machine.cpu_share() == 0.1


def test_frequent_readings_do_not_change_the_share(tmp_path: Path) -> None:
    clock = Clock()
    tell(tmp_path, 500, 1_500)
    machine = Machine(tmp_path, clock)
    tell(tmp_path, 550, 1_550)
    clock.now += 1
    assert machine.cpu_share() == 0.5
    tell(tmp_path, 560, 1_550)
    clock.now += 0.9
    assert machine.cpu_share() == 0.5
    tell(tmp_path, 560, 1_640)
    clock.now += 0.1
    assert machine.cpu_share() == 0.1


def test_a_stopped_or_backward_clock_gives_no_new_share(tmp_path: Path) -> None:
    clock = Clock()
    tell(tmp_path, 500, 1_500)
    machine = Machine(tmp_path, clock)
    clock.now += 1
    assert machine.cpu_share() == 0.25
    tell(tmp_path, 520, 1_490)
    clock.now += 1
    assert machine.cpu_share() == 1


def test_the_page_cache_is_not_in_use(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert Machine(tmp_path).memory() == (16_384_000 * 1024, 4_000_000 * 1024)


@pytest.mark.parametrize("content", [None, "", "cpu a b c", "MemTotal: many kB\n"])
def test_without_proc_there_are_no_figures(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
        (tmp_path / "meminfo").write_text(content)
    machine = Machine(tmp_path)
    assert (machine.cpu_share(), machine.memory()) == (None, None)


# --- memory of processes


MIB = 1 << 20
LEAST = 100 << 10  # of a session, however small its files


def tell_process(proc: Path, pid: int, pss: int, swapped: int, *children: int) -> None:
    """A process of `kb`, with two threads, the second of which has started others."""
    for thread in (pid, pid + 1):
        folder = proc / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True)
        started = children if thread != pid else ()
        (folder / "children").write_text("".join(f"{child} " for child in started))
    (proc / str(pid) / "smaps_rollup").write_text(
        f"00400000-7ffc [rollup]\nRss: 9999 kB\nPss:  {pss} kB\nPss_Anon: 77 kB\n"
        f"Swap: 9999 kB\nSwapPss:  {swapped} kB\nLocked: 0 kB\n"
    )


def test_a_process_and_its_descendants(tmp_path: Path) -> None:
    tell_process(tmp_path, 10, 100, 5, 20, 30)
    tell_process(tmp_path, 20, 7, 0, 40)
    tell_process(tmp_path, 40, 1, 1)
    assert memory_of(10, tmp_path) == (105 + 7 + 2) * 1024
    assert memory_of(20, tmp_path) == 9 * 1024
    assert memory_of(30, tmp_path) == 0


def test_kernels_with_fewer_figures(tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "statm").write_text("900 50 20 1 0 300 0\n")
    assert memory_of(10, tmp_path) == 50 * os.sysconf("SC_PAGESIZE")


def test_real_processes() -> None:
    source = "import subprocess, sys\n"
    inner = "x = bytearray(%d); print(1, flush=True); input()"
    source += f"p = subprocess.Popen([sys.executable, '-c', {inner % (64 * MIB)!r}])\np.wait()"
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert 64 * MIB < memory_of(process.pid) < 160 * MIB
        process.communicate(b"\n")
    assert memory_of(process.pid) == 0


@pytest.mark.parametrize(("files", "growth", "expected"), [
    (100 * MIB, 140 * MIB, 140 * MIB),
    (100 * MIB, 20 * MIB, 100 * MIB + LEAST),  # in memory already in use
    (100 * MIB, 999 * MIB, 364 * MIB),  # concurrent requests
    (100 * MIB, None, 150 * MIB + LEAST), (0, 30 * MIB, 30 * MIB), (0, -MIB, 0), (0, None, 0),
])  # fmt: skip
def test_growth_is_compared_with_file_sizes(files: int, growth: int | None, expected: int) -> None:
    assert in_process_estimate(files, growth) == expected


def test_growth_is_attributed_only_to_a_single_load() -> None:
    resident = 100
    meter = GrowthMeter(lambda: resident)
    with meter.measuring() as grown:
        resident = 150
        assert grown() == 50
    with meter.measuring() as outer, meter.measuring() as inner:
        resident = 200
        assert (inner(), outer()) == (None, None)
    with ExitStack() as later:
        with meter.measuring():
            late = later.enter_context(meter.measuring())
        resident = 201
        assert late() is None
    with meter.measuring() as grown:
        assert grown() == 0
    # Not on the heap, which may have as much that was freed.
    with GrowthMeter().measuring() as grown, mmap(-1, 8 * MIB, MAP_PRIVATE) as fresh:
        fresh[::4096] = bytes([1]) * (8 * MIB // 4096)
        assert (grown() or 0) > MIB


def test_the_use_of_a_process(tmp_path: Path) -> None:
    used = process_use(os.getpid())
    assert used.resident_bytes > 1 << 20
    assert used.threads >= 1
    (tmp_path / "7").mkdir()
    fields = ["S", *(["0"] * 10), "150", "50", *(["0"] * 4), "3", *(["0"] * 3), "2"]
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) {' '.join(fields)} 0")
    ticks = os.sysconf("SC_CLK_TCK")
    assert process_use(7, tmp_path) == (2 * PAGESIZE, 3, 200 / ticks)
    assert process_use(8, tmp_path) == (0, 0, 0)


async def test_the_use_of_processes_is_shared_by_those_who_ask() -> None:
    read: list[int] = []

    def use(pid: int) -> ProcessUse:
        read.append(pid)
        return ProcessUse(pid, 1, len(read))

    uses = ProcessUses(60, use)
    found = await asyncio.gather(*(uses.of([1, 2]) for _ in range(50)), uses.of([2, 3]))
    assert read == [1, 2, 3]
    assert found[0] == found[49] == [(1, 1, 1), (2, 1, 2)]
    assert found[50] == [(2, 1, 2), (3, 1, 3)]
    stale = ProcessUses(0, use)
    assert await stale.of([4]) != await stale.of([4])
