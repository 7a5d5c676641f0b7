"""Two ends of a slot, which take turns: what is in use stays, and what is free is written again."""

import os
import resource

import numpy as np
import pytest

from headrace.workers.elements import Array
from headrace.workers.frames import ALONE, FILES, IN_FILE, NEW_FILE, BrokenFrame
from headrace.workers.memory import SlotFiles


class Pair:
    """What one end writes, as the other end sees it."""

    def __init__(self) -> None:
        self.here, self.there = SlotFiles(), SlotFiles()
        self.new = 0
        self.flags = 0

    def send(self, value: int, size: int = 8) -> Array:
        """The array that arrives, after the other end has told what it still refers to."""
        self.here.heed(self.there.used())
        self.flags, descriptor = self.here.put([bytes([value]) * size], size)
        assert self.flags & IN_FILE
        assert bool(self.flags & NEW_FILE) == (descriptor >= 0)
        if descriptor >= 0:
            self.new += 1
            self.there.take(self.flags, descriptor)
        return np.ndarray((size,), np.uint8, self.there.data(self.flags, size))


def test_one_file_is_enough_if_nothing_is_kept() -> None:
    pair = Pair()
    for value in range(10):
        assert set(pair.send(value).tolist()) == {value}
    assert pair.new == 1


@pytest.mark.parametrize("kept", [1, 2, FILES, FILES + 3])
def test_what_is_kept_stays_as_it_is(kept: int) -> None:
    pair = Pair()
    arrays: list[Array] = []
    for value in range(30):
        arrays.append(pair.send(value))
        del arrays[: max(len(arrays) - kept, 0)]
        assert [int(array[0]) for array in arrays] == list(range(value + 1))[-kept:]
    assert pair.new == kept + 1 if kept < FILES else pair.new > FILES


def test_files_that_are_not_needed_for_long_are_given_back() -> None:
    pair = Pair()
    kept = pair.send(1)
    pair.send(2)
    del kept
    told = []
    for _ in range(300):
        pair.send(3)
        told.append(bool(pair.flags & ALONE))
    assert told.count(True) == 1
    kept = pair.send(4)
    assert pair.new == 2
    assert pair.send(5)[0] == 5
    assert pair.new == 3
    assert kept[0] == 4


def test_data_that_are_not_there() -> None:
    pair = Pair()
    with pytest.raises(BrokenFrame, match="beyond its file"):
        pair.there.data(IN_FILE, 1)
    pair.send(1)
    with pytest.raises(BrokenFrame, match="beyond its file"):
        pair.there.data(pair.flags, 2 << 20)


def test_what_cannot_be_sent_is_not_counted_on() -> None:
    pair = Pair()
    last = os.dup(0)
    os.close(last)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))  # for the file, and not for two
    try:
        with pytest.raises(OSError, match="open files"):
            pair.here.put([b"lost"], 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pair.send(2)[0] == 2
    assert pair.new == 1


def test_files_that_nobody_uses_give_back_their_memory() -> None:
    pair = Pair()
    pair.send(1, 100_000)
    assert pair.here.rest()  # it was used a moment ago
    assert not pair.here.rest()
    assert pair.there.data(pair.flags, 100_000)[:3] == bytes(3)
    assert set(pair.send(2, 100_000).tolist()) == {2}
    assert pair.new == 1


def test_files_stay_while_a_batch_is_under_way_or_something_is_kept() -> None:
    pair = Pair()
    kept = pair.send(1, 100_000)
    pair.here.lend()
    for _ in range(3):
        assert pair.here.rest()
    pair.here.heed(pair.there.used())
    for _ in range(3):
        assert pair.here.rest()
    assert set(kept.tolist()) == {1}
    del kept
    pair.here.heed(pair.there.used())
    assert not pair.here.rest()
