"""The machine's CPU and memory, from files as Linux writes them."""

from pathlib import Path

import pytest

from headrace.observability.machine import Machine

MEMINFO = """\
MemTotal:       16384000 kB
MemFree:          100000 kB
MemAvailable:   12384000 kB
Buffers:          500000 kB
Cached:         11000000 kB
"""


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tell(proc: Path, busy: int, idle: int, waiting: int = 0) -> None:
    """Have the machine spent so much time so far, of which guests had one tick."""
    (proc / "stat").write_text(
        f"cpu  {busy - 3} 1 1 {idle} {waiting} 0 1 0 1 0\ncpu0 1 1 1 1 0 0 0 0 0 0\nintr 7\n"
    )


def test_the_share_is_that_of_the_time_since_the_last_look(tmp_path: Path) -> None:
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


def test_who_asks_in_between_changes_nothing(tmp_path: Path) -> None:
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


def test_a_clock_that_has_not_ticked_or_runs_back_is_no_share_of_its_own(tmp_path: Path) -> None:
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
def test_nothing_is_told_where_linux_does_not(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stat").write_text(content)
        (tmp_path / "meminfo").write_text(content)
    machine = Machine(tmp_path)
    assert (machine.cpu_share(), machine.memory()) == (None, None)
