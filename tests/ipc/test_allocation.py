"""Memory limits and reuse, in fresh processes."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.ipc.allocation import kept_bytes, memory_limit

_TELL = """
import json, resource
import numpy as np
from headrace.ipc.allocation import keep_memory
kept = keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    held = [np.ones(4 << 20, np.uint8) for _ in range(3)]
    del held
use()
before = faults()
for _ in range(10):
    use()
print(json.dumps([kept, faults() - before]))
"""
_HELD_BACK = """
import ctypes, json
import numpy as np
from headrace.ipc.allocation import Heap
heap = Heap(ctypes.CDLL(None), 8 << 20)
heap.keep()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
used = [np.ones(1 << 20, np.uint8) for _ in range(64)]
behind = np.ones(100_000, np.uint8)
before = resident()
del used
held = resident()
given = heap.give_back()
after = resident()
few = [np.ones(1 << 20, np.uint8) for _ in range(60)]
print(json.dumps([before - held, given, before - after, heap.give_back()]))
"""
_PAGES = 10 * 3 * (4 << 20) // 4096  # pages that are written, all of them new or none


def told(**environment: str) -> tuple[bool, int]:
    found = subprocess.run(
        [sys.executable, "-c", _TELL], capture_output=True, check=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    kept, faults = json.loads(found.stdout)
    return bool(kept), int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_freed_memory_is_reused() -> None:
    kept, faults = told()
    assert kept
    assert faults < _PAGES // 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_memory_below_a_live_array_is_released() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _HELD_BACK], capture_output=True, check=True, text=True
    )
    held_back, given, given_back, with_little = json.loads(found.stdout)
    assert held_back < 8 << 20
    assert given
    assert given_back > 56 << 20
    assert not with_little


@pytest.mark.parametrize(
    ("memory", "kept"), [(64 << 30, 128 << 20), (2 << 30, 128 << 20), (400 << 20, 25 << 20)]
)
def test_smaller_machines_keep_less(memory: int, kept: int) -> None:
    assert kept_bytes(memory) == kept


@pytest.mark.parametrize(
    "said", [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}]
)
def test_settings_of_the_operator_are_kept(said: dict[str, str]) -> None:
    kept, _ = told(**said)
    assert not kept


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
NOWHERE = Path("/nonexistent")
MIB = 1 << 20


def limited(group: Path, text: str, name: str = "memory.max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(text)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (f"{400 * MIB}\n", 400 * MIB), ("max\n", MACHINE), (f"{MACHINE + MIB}\n", MACHINE),
        ("", MACHINE), ("what", MACHINE),
    ],
)  # fmt: skip
def test_version_2(tmp_path: Path, text: str, limit: int) -> None:
    limited(tmp_path, text)
    assert memory_limit(tmp_path, NOWHERE) == limit


@pytest.mark.parametrize(
    ("text", "limit"), [(f"{MIB}\n", MIB), ("9223372036854771712\n", MACHINE), ("-1\n", MACHINE)]
)
def test_version_1(tmp_path: Path, text: str, limit: int) -> None:
    limited(tmp_path / "memory", text, "memory.limit_in_bytes")
    assert memory_limit(tmp_path, NOWHERE) == limit


def test_the_narrowest_limit_of_all_parent_cgroups_counts(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, NOWHERE) == MACHINE
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
