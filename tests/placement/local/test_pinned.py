"""Page-locked memory, on memory of any kind."""

import ctypes
import gc

from headrace.placement.local.gpus import LEAST, PinnedPool


class Memory:
    """Gives memory, and never takes it back."""

    def __init__(self) -> None:
        self.blocks: list[ctypes.Array[ctypes.c_ubyte]] = []
        self.broken = False

    def pin(self, size: int) -> int:
        if self.broken:
            raise OSError("no memory")
        self.blocks.append((ctypes.c_ubyte * size)())
        return ctypes.addressof(self.blocks[-1])

    @property
    def sizes(self) -> list[int]:
        return [len(block) for block in self.blocks]


def test_an_array_has_the_size_that_was_asked_for() -> None:
    memory = Memory()
    array = PinnedPool(memory.pin, 1 << 20).take(LEAST + 5)
    assert array is not None
    assert array.shape == (LEAST + 5,)
    array[:] = 7
    assert bytes(memory.blocks[0])[: LEAST + 6] == b"\7" * (LEAST + 5) + b"\0"
    assert memory.sizes == [2 * LEAST]


def test_a_block_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    memory = Memory()
    pool = PinnedPool(memory.pin, 1 << 20)
    array = pool.take(LEAST)
    assert array is not None
    view = array.view("f4").reshape(2, -1)[1:]
    del array
    gc.collect()
    assert pool.used == pool.allocated == LEAST
    other = pool.take(LEAST)
    assert memory.sizes == [LEAST] * 2
    del view
    gc.collect()
    assert (pool.used, pool.allocated) == (LEAST, 2 * LEAST)
    again = pool.take(LEAST - 0)
    assert memory.sizes == [LEAST] * 2
    assert again is not None
    assert other is not None
    assert again.ctypes.data != other.ctypes.data


def test_what_is_small_or_too_much_gets_nothing() -> None:
    memory = Memory()
    pool = PinnedPool(memory.pin, 4 * LEAST)
    assert pool.take(0) is None
    assert pool.take(LEAST - 1) is None
    assert pool.take(4 * LEAST + 1) is None
    kept = pool.take(3 * LEAST)
    assert kept is not None
    assert pool.take(LEAST) is None
    assert memory.sizes == [4 * LEAST]


def test_a_driver_without_memory_is_no_error() -> None:
    memory = Memory()
    memory.broken = True
    pool = PinnedPool(memory.pin, 1 << 20)
    assert pool.take(LEAST) is None
    assert (pool.used, pool.allocated, pool.limit) == (0, 0, 1 << 20)
