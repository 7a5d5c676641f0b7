"""The memory that the cgroups of this process allow, in files of their form."""

import os
from pathlib import Path

import pytest

from headrace.workers.allocation import memory_limit

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
NOWHERE = Path("/nonexistent")
MIB = 1 << 20


def limited(group: Path, text: str, name: str = "memory.max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(text)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (f"{400 * MIB}\n", 400 * MIB),
        ("max\n", MACHINE),
        (f"{MACHINE + MIB}\n", MACHINE),
        ("", MACHINE),
        ("what", MACHINE),
    ],
)
def test_version_2(tmp_path: Path, text: str, limit: int) -> None:
    limited(tmp_path, text)
    assert memory_limit(tmp_path, NOWHERE) == limit


@pytest.mark.parametrize(
    ("text", "limit"), [(f"{MIB}\n", MIB), ("9223372036854771712\n", MACHINE), ("-1\n", MACHINE)]
)
def test_version_1(tmp_path: Path, text: str, limit: int) -> None:
    limited(tmp_path / "memory", text, "memory.limit_in_bytes")
    assert memory_limit(tmp_path, NOWHERE) == limit


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, NOWHERE) == MACHINE


def test_the_narrowest_limit_on_the_way_to_the_own_cgroup_counts(tmp_path: Path) -> None:
    limited(tmp_path, "max")
    limited(tmp_path / "pods", f"{300 * MIB}")
    limited(tmp_path / "pods" / "some", f"{500 * MIB}")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/ignored\n0::/pods/some\n")
    assert memory_limit(tmp_path, own) == 300 * MIB
    own.write_text("0::/elsewhere\n")
    assert memory_limit(tmp_path, own) == MACHINE


def test_each_hierarchy_of_version_1_has_paths_of_its_own(tmp_path: Path) -> None:
    limited(tmp_path / "memory" / "pods" / "a", f"{7 * MIB}", "memory.limit_in_bytes")
    limited(tmp_path / "memory" / "b", f"{MIB}", "memory.limit_in_bytes")
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/b\n3:memory:/pods/a\n0::/\n")
    assert memory_limit(tmp_path, own) == 7 * MIB
