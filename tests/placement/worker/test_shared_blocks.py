"""Memory that requests are received in and workers map: when it is used, reused and dropped."""

import asyncio
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.core.blocks import Blocks
from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor
from headrace.ipc.frames import unpack_places
from headrace.placement.worker.shared_blocks import Placed, SharedBlocks

MIB = 1 << 20
SIZE = 300_000
_BEGIN = 52  # position of a message's first tensor


class Loop:
    """The timers of an event loop, which the test runs."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> "Loop":
        self.timers.append(callback)
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def run(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class FakeSocket:
    """A worker's socket: the blocks that it has been given."""

    def __init__(self, fails: bool = False) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self.refused: list[str] = []
        self._fails = fails

    def share(self, number: int, descriptor: int, size: int) -> None:
        if self._fails:
            raise OSError("no descriptors")
        self.mapped[number] = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        try:
            mmap.mmap(descriptor, size)
        except PermissionError:
            self.refused.append("to write")

    def unshare(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.mapped[number]


def worker_socket(fails: bool = False) -> Any:
    return FakeSocket(fails)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def pool() -> Blocks:
    return Blocks(96 * MIB)


@pytest.fixture
def blocks(loop: Loop, pool: Blocks) -> Iterator[SharedBlocks]:
    fake: Any = loop
    found = SharedBlocks(fake, pool)
    yield found
    found.close()


def received(blocks: SharedBlocks, fill: int = 1, size: int = SIZE) -> Array:
    """The tensor of a message that was received in a block."""
    view = blocks.memory(size, _BEGIN)
    assert view is not None
    view[:] = bytes([fill]) * size
    return np.ndarray(((size - _BEGIN) // 4,), np.int32, view, _BEGIN)


def call(**inputs: Array | BytesArray) -> Call:
    tensors = {name: Tensor(name, Datatype.INT32, given) for name, given in inputs.items()}
    return Call("model", "", "", tensors)


def place(blocks: SharedBlocks, *arrays: Array) -> Placed:
    placed = blocks.place([call(x=array) for array in arrays], [("x", True)], 0)
    assert placed is not None
    return placed


def test_a_message_is_read_where_it_was_received(blocks: SharedBlocks) -> None:
    array, worker = received(blocks, 7), worker_socket()
    assert array.ctypes.data % 64 == 0
    placed = place(blocks, array)
    assert blocks.lend(placed, worker)
    ((number, start),), beside, size, rest = unpack_places(placed.meta + b"rest")
    seen = np.ndarray(array.shape, np.int32, worker.mapped[number], start)
    assert seen.tolist() == array.tolist()
    assert (beside, size, rest) == (b"", 0, b"rest")


def test_a_worker_cannot_write(blocks: SharedBlocks) -> None:
    worker = worker_socket()
    blocks.lend(place(blocks, received(blocks)), worker)
    assert worker.refused == ["to write"]


@pytest.mark.parametrize("size", [1000, 40 * MIB])
def test_other_messages_are_received_elsewhere(blocks: SharedBlocks, size: int) -> None:
    assert blocks.memory(size, 0) is None


def test_memory_is_used_again_once_nothing_refers_to_it(blocks: SharedBlocks) -> None:
    first = received(blocks, 1)
    address = first.ctypes.data
    part = first[5:9]
    del first
    second = received(blocks, 2)
    assert second.ctypes.data != address
    assert part.tolist() == [0x01010101] * 4
    del part
    assert received(blocks, 3).ctypes.data == address


def test_memory_of_a_batch_under_way_is_not_used(blocks: SharedBlocks) -> None:
    worker = worker_socket()
    array = received(blocks, 1)
    placed = place(blocks, array)
    blocks.lend(placed, worker)
    del array  # the call was cancelled
    received(blocks, 2)
    (mapped,) = worker.mapped.values()
    assert mapped[100:104] == b"\1\1\1\1"
    blocks.give_back(placed)
    received(blocks, 3)
    assert mapped[100:104] == b"\3\3\3\3"


def test_memory_that_a_model_keeps_is_not_used(blocks: SharedBlocks) -> None:
    worker = worker_socket()
    placed = place(blocks, received(blocks, 1))
    blocks.lend(placed, worker)
    (mapped,) = worker.mapped.values()
    blocks.keep([number for (number, _) in unpack_places(placed.meta)[0]])
    blocks.keep([99])
    blocks.give_back(placed)
    assert worker.mapped == {}
    received(blocks, 2)
    assert mapped[100:104] == b"\1\1\1\1"


def test_inputs_of_a_model_that_keeps_them_are_copied(blocks: SharedBlocks, loop: Loop) -> None:
    for _ in range(4):
        placed = place(blocks, received(blocks))
        blocks.lend(placed, worker_socket())
        blocks.keep([placed.blocks[0].number])
        blocks.give_back(placed)
    assert blocks.memory(SIZE, 0) is None
    loop.run()
    assert blocks.memory(SIZE, 0) is not None  # tried again


def test_a_block_of_several_batches_is_dropped_after_the_last(blocks: SharedBlocks) -> None:
    array, worker = received(blocks), worker_socket()
    parts = [place(blocks, array[:1000]), place(blocks, array[1000:])]
    for part in parts:
        blocks.lend(part, worker)
    blocks.keep([parts[0].blocks[0].number])
    blocks.give_back(parts[0])
    assert len(worker.mapped) == 1
    blocks.give_back(parts[1])
    assert worker.mapped == {}


def test_small_inputs_are_sent_beside(blocks: SharedBlocks) -> None:
    x, scale = received(blocks), np.array([3, 4], np.int32)
    placed = blocks.place([call(x=x, scale=scale)] * 2, [("x", True), ("scale", True)], 77)
    assert placed is not None
    places, beside, size, _ = unpack_places(placed.meta)
    assert [number > 0 for number, _ in places] == [True, True, False, False]
    assert size == 77
    for _, start in places[2:]:
        assert np.frombuffer(beside, np.int32, 2, start).tolist() == [3, 4]


@pytest.mark.parametrize(
    "beside", [np.zeros(40_000, np.int32), BytesArray(b"\1\0\0\0a", (1,))], ids=["large", "BYTES"]
)
def test_batches_with_other_inputs_are_copied(blocks: SharedBlocks, beside: Any) -> None:
    named = [("x", True), ("y", not isinstance(beside, BytesArray))]
    assert blocks.place([call(x=received(blocks), y=beside)], named, 0) is None


@pytest.mark.parametrize("begin", [1, 2])
def test_an_input_that_is_not_aligned_is_copied(blocks: SharedBlocks, begin: int) -> None:
    view = blocks.memory(SIZE, 0)
    array: Array = np.ndarray((60_000,), np.int32, view, begin)
    assert blocks.place([call(x=array)], [("x", True)], 0) is None


def test_an_array_with_gaps_is_copied(blocks: SharedBlocks) -> None:
    assert blocks.place([call(x=received(blocks)[::2])], [("x", True)], 0) is None


def test_memory_is_bounded(blocks: SharedBlocks) -> None:
    held = [received(blocks, size=30 * MIB) for _ in range(2)]
    assert blocks.memory(30 * MIB, 0) is None
    held.pop()
    assert blocks.memory(30 * MIB, 0) is not None


def test_the_number_of_blocks_is_bounded(blocks: SharedBlocks) -> None:
    held = [received(blocks) for _ in range(16)]
    assert blocks.memory(SIZE, 0) is None
    held.pop()
    assert blocks.memory(SIZE, 0) is not None


def test_unused_memory_of_another_size_makes_room(blocks: SharedBlocks) -> None:
    for _ in range(2):
        received(blocks, size=30 * MIB)
    assert blocks.memory(SIZE, 0) is not None


def test_memory_counts_against_that_of_all_messages(blocks: SharedBlocks, pool: Blocks) -> None:
    assert pool.reserve(96 * MIB)
    assert blocks.memory(SIZE, 0) is None
    pool.release(MIB)
    assert blocks.memory(SIZE, 0) is not None
    assert not pool.reserve(MIB)
    blocks.close()
    assert pool.reserve(MIB)


def test_unused_memory_is_dropped_after_a_while(blocks: SharedBlocks, loop: Loop) -> None:
    array, worker = received(blocks), worker_socket()
    blocks.lend(place(blocks, array), worker)
    blocks.give_back(place(blocks, array))
    loop.run()
    loop.run()
    assert len(worker.mapped) == 1  # it is in use
    del array
    loop.run()
    assert worker.mapped == {}
    assert not loop.timers


def test_blocks_are_dropped_although_others_are_used(blocks: SharedBlocks, loop: Loop) -> None:
    both = [received(blocks), received(blocks)]
    worker = worker_socket()
    for placed in [place(blocks, array) for array in both]:
        blocks.lend(placed, worker)
        blocks.give_back(placed)
    both.clear()
    loop.run()
    received(blocks)
    loop.run()
    assert len(worker.mapped) == 1


def test_a_worker_without_descriptors_gets_a_copy(blocks: SharedBlocks) -> None:
    assert not blocks.lend(place(blocks, received(blocks)), worker_socket(fails=True))


def test_a_worker_that_has_ended_is_told_nothing(blocks: SharedBlocks) -> None:
    worker, other = worker_socket(), worker_socket()
    placed = place(blocks, received(blocks))
    for one in (worker, other):
        blocks.lend(placed, one)
        blocks.give_back(placed)
    blocks.forget(worker)
    blocks.close()
    assert (len(worker.mapped), len(other.mapped)) == (1, 0)


def test_closed_blocks_take_no_messages() -> None:
    async def work() -> memoryview | None:
        blocks = SharedBlocks(asyncio.get_running_loop(), Blocks(MIB))
        assert blocks.memory(SIZE, 0) is not None
        blocks.close()
        return blocks.memory(SIZE, 0)

    assert asyncio.run(work()) is None
