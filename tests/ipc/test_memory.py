"""Reuse of memory-mapped files: never while in use."""

import fcntl
import os
import resource
import signal

import numpy as np
import pytest

from headrace.ipc.elements import Array, Buffer
from headrace.ipc.frames import ALONE, FILES, IN_FILE, NEW_FILE, BrokenFrame
from headrace.ipc.memory import InFile, OutFile, SharedIn, SlotFiles, map_file, write_file


def sent(out: OutFile, file: InFile, *pieces: Buffer) -> bool:
    """Write, and map a new file; whether the file is new."""
    descriptor = out.write(pieces, sum(map(len, pieces)))
    if descriptor >= 0:
        file.map(os.dup(descriptor))
    return descriptor >= 0


def content(file: InFile, size: int) -> bytes:
    assert file.bytes is not None
    return file.bytes[:size].tobytes()


def test_a_file_is_reused() -> None:
    out, file = OutFile(), InFile()
    assert sent(out, file, b"first", b"", b" one")
    assert content(file, 9) == b"first one"
    assert not sent(out, file, b"second")
    assert content(file, 6) == b"second"
    assert sent(out, file, bytes(3 << 20), b"end")  # it was too small
    assert content(file, (3 << 20) + 3).endswith(b"\0end")
    out.close()
    # It is extended.
    out, file = OutFile(), InFile()
    for size in (10, 10, 100_000, 20, 100_001):
        sent(out, file, bytes(size), b"end")
        assert content(file, size + 3) == bytes(size) + b"end"
    out.close()


def test_many_pieces() -> None:
    out, file = OutFile(), InFile()
    for first in (0, 3, 7):  # to new memory, then twice to used memory
        pieces = [b"%d," % n for n in range(first, 5000)]
        assert sent(out, file, *pieces[:4000], memoryview(b"".join(pieces[4000:]))) == (not first)
        assert content(file, sum(map(len, pieces))) == b"".join(pieces)
    out.close()


def test_a_file_freed_by_either_end_is_reused() -> None:
    out, file = OutFile(), InFile()
    sent(out, file, bytes(5000), b"end")
    for free in (out.free, file.free):
        assert free()
        assert content(file, 5003) == bytes(5003)
        assert not sent(out, file, bytes(5000), b"end")
        assert content(file, 5003) == bytes(5000) + b"end"
    out.close()


def test_a_referenced_file_is_not_freed() -> None:
    out, file = OutFile(), InFile()
    sent(out, file, b"12345678")
    assert file.bytes is not None
    array = file.bytes[:8]
    assert not file.free()
    out.retired = True
    assert not out.free()
    assert array.tobytes() == b"12345678"
    out.close()
    # A retired one stays unchanged.
    out, file = OutFile(), InFile()
    sent(out, file, b"kept")
    assert file.bytes is not None
    kept = file.bytes[:4]
    out.retired = True
    assert sent(out, file, b"new!")
    assert kept.tobytes() == b"kept"
    assert content(file, 4) == b"new!"
    out.close()


def test_references_are_detected() -> None:
    out, file = OutFile(), InFile()
    sent(out, file, b"12345678" * 100)
    assert file.bytes is not None
    unused = not file.in_use
    assert unused
    array = np.ndarray((2, 3), np.uint8, file.bytes.data, 8)
    part = array[1:]
    del array
    used = file.in_use
    assert used
    with pytest.raises(ValueError, match="read-only"):
        part[0, 0] = 1
    del part
    unused = not file.in_use
    assert unused
    out.close()


def test_after_a_failed_write_the_other_end_gets_a_new_file() -> None:
    out, file = OutFile(), InFile()
    assert sent(out, file, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="large"):
            out.write([bytes(8192)], 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sent(out, file, b"after!")
    assert content(file, 6) == b"after!"
    out.close()


def test_a_large_file_is_released() -> None:
    out, file = OutFile(), InFile()
    sent(out, file, bytes(65 << 20))
    assert sent(out, file, b"small")
    assert file.bytes is not None
    assert len(file.bytes) == 1 << 20
    out.close()


def test_a_file_that_may_shrink_is_refused() -> None:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(BrokenFrame, match="may change its size"):
        map_file(os.dup(descriptor), 4096)
    with pytest.raises(BrokenFrame, match="may change its size"):
        InFile().map(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("size", [1, 10, 4096, 3_000_000])
def test_the_file_of_a_frame(size: int) -> None:
    data = os.urandom(size)
    descriptor = write_file([data[:7], b"", memoryview(data)[7:]], size)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)
    with pytest.raises(BrokenFrame, match="a file that has not"):
        map_file(os.dup(descriptor), size + 1)
    assert map_file(descriptor, size)[:] == data
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


class Pair:
    """Two ends of shared memory files."""

    def __init__(self) -> None:
        self.here, self.there = SlotFiles(), SlotFiles()
        self.new = 0
        self.flags = 0

    def send(self, value: int, size: int = 8) -> Array:
        """The received array, after the other end has reported its references."""
        self.here.heed(self.there.used())
        self.flags, descriptor = self.here.put([bytes([value]) * size], size)
        assert self.flags & IN_FILE
        assert bool(self.flags & NEW_FILE) == (descriptor >= 0)
        if descriptor >= 0:
            self.new += 1
            self.there.take(self.flags, descriptor)
        return np.ndarray((size,), np.uint8, self.there.data(self.flags, size))


def test_one_file_is_enough_without_references() -> None:
    pair = Pair()
    for value in range(10):
        assert set(pair.send(value).tolist()) == {value}
    assert pair.new == 1


@pytest.mark.parametrize("kept", [1, 2, FILES, FILES + 3])
def test_referenced_data_stays_unchanged(kept: int) -> None:
    pair = Pair()
    arrays: list[Array] = []
    for value in range(30):
        arrays.append(pair.send(value))
        del arrays[: max(len(arrays) - kept, 0)]
        assert [int(array[0]) for array in arrays] == list(range(value + 1))[-kept:]
    assert pair.new == kept + 1 if kept < FILES else pair.new > FILES


def test_unused_files_are_released() -> None:
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


def test_missing_data() -> None:
    pair = Pair()
    with pytest.raises(BrokenFrame, match="beyond its file"):
        pair.there.data(IN_FILE, 1)
    pair.send(1)
    with pytest.raises(BrokenFrame, match="beyond its file"):
        pair.there.data(pair.flags, 2 << 20)


def test_an_unsent_file_is_not_reused() -> None:
    pair = Pair()
    last = os.dup(0)
    os.close(last)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))  # for one descriptor, not two
    try:
        with pytest.raises(OSError, match="open files"):
            pair.here.put([b"lost"], 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pair.send(2)[0] == 2
    assert pair.new == 1


def test_unused_files_release_their_memory() -> None:
    pair = Pair()
    pair.send(1, 100_000)
    assert pair.here.rest()  # it was used a moment ago
    assert not pair.here.rest()
    assert pair.there.data(pair.flags, 100_000)[:3] == bytes(3)
    assert set(pair.send(2, 100_000).tolist()) == {2}
    assert pair.new == 1
    # They stay while a batch is running or something is referenced.
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


def test_blocks_that_a_model_keeps_are_told_of_with_their_last_batch() -> None:
    shared = SharedIn()
    for number in (1, 2):
        shared.add(number, memoryview(bytes(1000)))
    kept = np.frombuffer(shared.borrow(0, [1, 2, 0])[1], np.uint8)
    assert sorted(shared.borrow(1, [1])) == [1]
    assert shared.kept(0) == []  # another batch is in it, too
    assert shared.kept(1) == [1]
    assert shared.kept(1) == []
    del kept
    shared.borrow(0, [1, 2])
    assert shared.kept(0) == []
    shared.drop([1, 7])
    with pytest.raises(KeyError):
        shared.borrow(0, [1])
