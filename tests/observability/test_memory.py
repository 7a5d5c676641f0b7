"""How much memory processes take, and what is loaded into this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.observability.machine import GrowthMeter, in_process_estimate, memory_of

MIB = 1 << 20
LEAST = 100 << 10  # of a session, however small its files


def tell(proc: Path, pid: int, pss: int, swapped: int, *children: int) -> None:
    """A process of so many kB, with two threads, the second of which has started others."""
    for thread in (pid, pid + 1):
        folder = proc / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True)
        started = children if thread != pid else ()
        (folder / "children").write_text("".join(f"{child} " for child in started))
    (proc / str(pid) / "smaps_rollup").write_text(
        f"00400000-7ffc [rollup]\nRss: 9999 kB\nPss:  {pss} kB\nPss_Anon: 77 kB\n"
        f"Swap: 9999 kB\nSwapPss:  {swapped} kB\nLocked: 0 kB\n"
    )


def test_a_process_and_what_descends_from_it(tmp_path: Path) -> None:
    tell(tmp_path, 10, 100, 5, 20, 30)
    tell(tmp_path, 20, 7, 0, 40)
    tell(tmp_path, 40, 1, 1)
    assert memory_of(10, tmp_path) == (105 + 7 + 2) * 1024
    assert memory_of(20, tmp_path) == 9 * 1024
    assert memory_of(30, tmp_path) == 0


def test_where_the_kernel_tells_less(tmp_path: Path) -> None:
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
    (100 * MIB, 20 * MIB, 100 * MIB + LEAST),  # in memory that was there already
    (100 * MIB, 999 * MIB, 364 * MIB),  # requests that came meanwhile
    (100 * MIB, None, 150 * MIB + LEAST), (0, 30 * MIB, 30 * MIB), (0, -MIB, 0), (0, None, 0),
])  # fmt: skip
def test_growth_is_held_to_what_files_make_likely(
    files: int, growth: int | None, expected: int
) -> None:
    assert in_process_estimate(files, growth) == expected


def test_growth_is_known_only_of_what_is_loaded_alone() -> None:
    resident = 100
    meter = GrowthMeter(lambda: resident)
    first = meter.begin()
    resident = 150
    assert meter.end(first) == 50
    outer = meter.begin()
    inner = meter.begin()
    resident = 200
    assert meter.end(inner) is None
    assert meter.end(outer) is None
    early = meter.begin()
    late = meter.begin()
    assert meter.end(early) is None
    resident = 201
    assert meter.end(late) is None
    last = meter.begin()
    assert meter.end(last) == 0
    assert GrowthMeter().begin().resident > MIB
