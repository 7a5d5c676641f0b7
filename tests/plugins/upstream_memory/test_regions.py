"""Shared memory for calls: permissions, reuse and removal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plugins.upstream_memory.regions import (
    GRACE_SECS,
    SMALLEST,
    RegionLease,
    RegionPool,
    SharedRegion,
    exists,
    is_ours,
    remove_left_behind,
    size_class,
)
from tests.support.shared_memory import SharedFile

SIZE = 1 << 18
FOLDER = Path("/dev/shm")
# Makes a region and is killed.
KILLED = """
import os, signal
from headrace.plugins.upstream_memory.regions import SharedRegion
print(SharedRegion(4096).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_region_exists_under_its_name_until_disposal() -> None:
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


def test_full_shared_memory() -> None:
    before = set(FOLDER.iterdir())
    with pytest.raises(OSError, match=r"space|large|memory"):
        SharedRegion(1 << 62)
    added = {path.name for path in set(FOLDER.iterdir()) - before}
    assert not {name for name in added if name.startswith(f"headrace-{os.getpid()}-")}


def test_only_leftovers_of_killed_processes_are_removed() -> None:
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


class Piece(SharedRegion):
    """A region without memory."""

    def __init__(self, size: int) -> None:
        self.size = size


class User:
    """The user of a region."""


def make(pool: RegionPool) -> Piece:
    """Create the wanted region."""
    piece = Piece(pool.wanted.popleft())
    pool.made(piece.size, piece, pool.epoch, 0.0)
    return piece


def taken(pool: RegionPool, nbytes: int = SMALLEST, now: float = 0.0) -> RegionLease:
    """A region, created if needed."""
    lease = pool.take(nbytes, now)
    if lease is None:
        make(pool)
        lease = pool.take(nbytes, now)
    assert lease is not None
    return lease


@pytest.fixture
def pool() -> RegionPool:
    """A pool with room for four small regions."""
    return RegionPool(4 * SMALLEST)


@given(st.integers(1, 1 << 40))
def test_sizes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert size == SMALLEST or size < 2 * nbytes


def test_one_region_is_wanted_at_a_time(pool: RegionPool) -> None:
    assert pool.take(1, 0.0) is None
    assert pool.take(1, 0.0) is None
    assert list(pool.wanted) == [SMALLEST]
    piece = make(pool)
    lease = pool.take(1, 0.0)
    assert lease is not None
    assert lease.region is piece
    assert pool.take(1, 0.0) is None  # the other call has it
    pool.give_back(lease, 0.0)
    again = pool.take(1, 0.0)
    assert again is not None
    assert again.region is piece


def test_free_regions_are_reused(pool: RegionPool) -> None:
    lease, user = taken(pool), User()
    pool.hold(lease, user)
    assert pool.take(1, 0.0) is None
    del user
    again = pool.take(1, 0.0)
    assert again is not None
    assert again.region is lease.region


def test_retired_regions_count_until_due(
    pool: RegionPool,
) -> None:
    leases = [taken(pool) for _ in range(4)]
    for lease in leases:
        pool.retire(lease, 1.0)
    assert pool.take(1, 1.0) is None
    assert not pool.wanted
    assert pool.due(GRACE_SECS) is None
    piece = pool.due(1.0 + GRACE_SECS)
    assert piece is leases[0].region
    pool.gone(piece)
    assert pool.take(1, 1.0) is None
    assert list(pool.wanted) == [SMALLEST]


def test_after_a_lost_connection_no_region_is_reused(pool: RegionPool) -> None:
    idle, lent, held = (taken(pool) for _ in range(3))
    user = User()
    pool.hold(held, user)
    pool.give_back(idle, 0.0)
    pool.renew(1.0)
    pool.give_back(lent, 2.0)
    del user
    assert pool.take(1, 3.0) is None
    found = [pool.due(3.0) for _ in range(4)]
    assert found == [idle.region, lent.region, held.region, None]


def test_room_is_made_for_another_size(pool: RegionPool) -> None:
    leases = [taken(pool) for _ in range(4)]
    assert pool.take(2 * SMALLEST, 0.0) is None  # all are in use
    for lease in leases:
        pool.give_back(lease, 0.0)
    assert pool.take(2 * SMALLEST, 0.0) is None
    while piece := pool.due(0.0):
        pool.gone(piece)
    assert taken(pool, 2 * SMALLEST).region.size == 2 * SMALLEST
    assert pool.take(8 * SMALLEST, 0.0) is None
    assert not pool.wanted  # this never fits


def test_a_refusing_server_is_asked_again_after_a_new_connection(
    pool: RegionPool,
) -> None:
    pool.grows = False
    assert pool.take(1, 0.0) is None
    assert not pool.wanted
    pool.renew(0.0)
    assert taken(pool).region.size == SMALLEST
    pool.take(1, 0.0)
    pool.renew(0.0)
    piece = Piece(pool.wanted.popleft())
    pool.made(piece.size, piece, 0, 1.0)
    assert pool.due(1.0) is piece


def test_failed_regions_do_not_count(pool: RegionPool) -> None:
    for _ in range(9):
        assert pool.take(1, 0.0) is None
        pool.made(pool.wanted.popleft(), None, 0, 0.0)
    assert taken(pool).region.size == SMALLEST


def test_unsent_unregistrations_are_due_later(pool: RegionPool) -> None:
    pool.give_back(taken(pool), 0.0)
    pool.renew(1.0)
    pool.postpone(6.0)
    assert pool.due(5.0) is None
    assert pool.due(6.0) is not None


def test_at_the_end_regions_are_unregistered(pool: RegionPool) -> None:
    idle, lent, held, retired = (taken(pool) for _ in range(4))
    user = User()
    pool.give_back(idle, 0.0)
    pool.hold(held, user)
    pool.retire(retired, 0.0)
    assert pool.empty() == [idle.region, held.region]
    del user
    pool.give_back(lent, 0.0)
    assert pool.empty() == [lent.region]
