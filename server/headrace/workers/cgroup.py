"""The cgroups that this process is in, of version 2 or 1, and the memory that they allow."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def groups(root: Path = CGROUPS, own: Path = OWN_CGROUP, controller: str = "") -> list[Path]:
    """The cgroup of this process and those around it; each may have a limit.

    Those of version 2, or of version 1's `controller`. `own` says in which cgroup below `root` this
    process is; inside a container that is `root` itself.
    """
    parts: list[str] = []
    for names, path in _entries(own):
        if controller in names:
            parts = [part for part in path.split("/") if part and part != ".."]
    base = root / controller
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Bytes of memory that the narrowest cgroup allows, or that the machine has if that is less."""
    files = [group / "memory.max" for group in groups(root, own)]
    files += [group / "memory.limit_in_bytes" for group in groups(root, own, "memory")]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *filter(None, map(_number, files))])


def _entries(own: Path) -> Iterator[tuple[list[str], str]]:
    """Controllers and path of each hierarchy; version 2's one has the controller ""."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        yield names.split(","), path


def _number(file: Path) -> int:
    """What a file says, 0 if that is no limit."""
    try:
        return max(int(file.read_text()), 0)
    except (OSError, ValueError):  # no such cgroup here, or "max"
        return 0
