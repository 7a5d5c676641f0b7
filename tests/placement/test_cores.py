"""Cores by the limits of cgroups, and their division over instances."""

import os
from pathlib import Path

import pytest

from headrace.placement.cores import core_limit, core_share, threads_for

AVAILABLE = len(os.sched_getaffinity(0))
NOWHERE = Path("/nonexistent")


def v2(root: Path, text: str) -> Path:
    (root / "cpu.max").write_text(text)
    return root


def v1(root: Path, quota: str, period: str = "100000\n") -> Path:
    (root / "cpu").mkdir()
    (root / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (root / "cpu" / "cpu.cfs_period_us").write_text(period)
    return root


@pytest.mark.parametrize(("text", "cores"), [
    ("1", 1), ("1,2", 1), (" 1 ", 1), ("1000000", core_limit()), ("", core_limit()),
    ("0", core_limit()), ("-1", core_limit()), ("many", core_limit()),
])  # fmt: skip
def test_core_share(text: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert core_share() == cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("100000 100000\n", 1),
        ("10000 100000\n", 1),  # at least one
        ("max 100000\n", AVAILABLE),
        ("100000000 100000\n", AVAILABLE),  # more than there is
        ("", AVAILABLE),
        ("what 100000", AVAILABLE),
        ("50000 50000\n", 1),
    ],
)
def test_version_2(tmp_path: Path, text: str, cores: int) -> None:
    assert core_limit(v2(tmp_path, text), NOWHERE) == cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("100000\n", 1), ("-1\n", AVAILABLE), ("30000\n", 1), ("x", AVAILABLE)],
)
def test_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    assert core_limit(v1(tmp_path, quota), NOWHERE) == cores


def test_core_limits_without_a_cgroup(tmp_path: Path) -> None:
    assert core_limit(tmp_path, NOWHERE) == AVAILABLE
    assert 1 <= core_limit() <= AVAILABLE


@pytest.mark.skipif(AVAILABLE < 2, reason="needs two cores to tell a limit from the machine")
def test_a_limit_between_one_core_and_all(tmp_path: Path) -> None:
    assert core_limit(v2(tmp_path, "299000 100000"), NOWHERE) == 2


@pytest.mark.parametrize(
    ("instances", "cores", "threads"),
    [(1, 8, 8), (2, 8, 4), (3, 8, 2), (16, 8, 1), (0, 8, 8), (1, 1, 1)],
)
def test_cores_are_divided_over_instances(instances: int, cores: int, threads: int) -> None:
    assert threads_for(instances, cores) == threads


def test_the_narrowest_limit_of_all_parent_cgroups_counts(tmp_path: Path) -> None:
    service = tmp_path / "system.slice" / "some.service"
    service.mkdir(parents=True)
    v2(tmp_path, "max 100000")
    v2(tmp_path / "system.slice", "100000 100000")
    v2(service, "5000000 100000")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/ignored\n0::/system.slice/some.service\n")
    assert core_limit(tmp_path, own) == 1
    own.write_text("0::/elsewhere\n")
    assert core_limit(tmp_path, own) == AVAILABLE
