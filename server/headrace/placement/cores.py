"""The cores of this process, and their division over a model's instances."""

import os
from pathlib import Path

from headrace.ipc.allocation import CGROUPS, OWN_CGROUP, groups


def core_limit(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Whole cores by the cgroup's CPU limit (version 2 or 1) or the affinity mask, if lower.

    At least 1. A container's limit is a share of time, not a set of cores: `os.cpu_count()` still
    shows the whole host, and threads planned by it get throttled. `own` is the file that names the
    cgroup of this process below `root`; inside a container that is `root` itself.
    """
    available = len(os.sched_getaffinity(0))
    limits = [_quota_v2(group / "cpu.max") for group in groups(root, own)]
    limit = min(filter(None, limits), default=0.0) or _quota_v1(root / "cpu")
    return max(1, min(available, int(limit))) if limit else available


def core_share() -> int:
    """Whole cores for an engine in a program: `OMP_NUM_THREADS`, and `core_limit` at most.

    By that Ray, Spark and Dask tell a process which share of the machine it has; without a number
    there, an engine in each of four executors would start as many threads as there are cores.
    """
    limit = core_limit()
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(int(text), limit) if text.isdecimal() and int(text) else limit


def threads_for(instances: int, cores: int) -> int:
    """The number of threads for each instance of a model."""
    return max(1, cores // max(instances, 1))


def _quota_v2(file: Path) -> float:
    try:
        quota, period = file.read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return 0.0


def _quota_v1(directory: Path) -> float:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return 0.0
    return max(quota, 0) / period
