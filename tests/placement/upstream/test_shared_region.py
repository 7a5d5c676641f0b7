"""Memory that another process can open by its name, and what is left of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.placement.upstream.shared_regions import (
    SharedRegion,
    exists,
    is_ours,
    remove_left_behind,
)
from tests.support.shared_memory import SharedFile

SIZE = 1 << 18
FOLDER = Path("/dev/shm")
# Makes a region and is killed.
KILLED = """
import os, signal
from headrace.placement.upstream.shared_regions import SharedRegion
print(SharedRegion(4096).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_there_under_its_name_until_it_is_disposed_of() -> None:
    region = SharedRegion(SIZE)
    path = FOLDER / region.name
    try:
        assert re.fullmatch(rf"/headrace-{os.getpid()}-[0-9a-f]{{24}}", region.key)
        assert is_ours(region.name)
        assert exists(region.name)
        found = path.stat()
        assert (found.st_mode & 0o777, found.st_size) == (0o600, SIZE)
        assert found.st_blocks * 512 >= SIZE
        region.memory[5:8] = b"abc"
        assert path.read_bytes()[5:8] == b"abc"
    finally:
        region.dispose()
    region.dispose()
    assert not exists(region.name)
    assert bytes(region.memory[5:8]) == b"abc"


def test_there_may_be_no_room() -> None:
    before = set(FOLDER.iterdir())
    with pytest.raises(OSError, match=r"space|large|memory"):
        SharedRegion(1 << 62)
    assert not {path for path in set(FOLDER.iterdir()) - before if str(os.getpid()) in path.name}


def test_what_a_killed_process_has_left_is_removed_and_nothing_else() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, check=False
    )
    left = ended.stdout.strip()
    assert is_ours(left), ended.stderr  # another server may have removed it since
    region = SharedRegion(SIZE)
    try:
        with SharedFile(10) as other:
            remove_left_behind()
            assert other.path.exists()
        assert exists(region.name)
        assert not exists(left)
    finally:
        region.dispose()
