"""Whether a process keeps the memory of large tensors, in processes of their own."""

import json
import os
import platform
import subprocess
import sys

import pytest

_TELL = """
import json, resource
import numpy as np
from headrace.workers.allocation import keep_memory
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
_PAGES = 10 * 3 * (4 << 20) // 4096  # that are written to, all of them new or none


def told(**environment: str) -> tuple[bool, int]:
    found = subprocess.run(
        [sys.executable, "-c", _TELL], capture_output=True, check=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    kept, faults = json.loads(found.stdout)
    return bool(kept), int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_memory_is_used_again() -> None:
    kept, faults = told()
    assert kept
    assert faults < _PAGES // 20


@pytest.mark.parametrize(
    "said", [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}]
)
def test_what_an_operator_has_said_stands(said: dict[str, str]) -> None:
    kept, _ = told(**said)
    assert not kept
