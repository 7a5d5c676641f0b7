"""Memory blocks: reused, within a bound, never while in use."""

import gc
from collections.abc import Callable

import numpy as np
import pytest

from headrace.core.blocks import Blocks
from headrace.core.tensors import Array

MIB = 1 << 20
ARRAYS: list[Callable[[memoryview], Array]] = [
    lambda view: np.frombuffer(view[MIB:], np.float32)[8:].reshape(-1, 2),
    lambda view: np.ndarray((MIB, 2), np.float32, view, 64),
    lambda view: np.ndarray((MIB,), np.float32, np.asarray(view)[32:]),
]


def place(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_block_is_reused() -> None:
    blocks = Blocks(64 * MIB)
    first = blocks.block(16 * MIB)
    assert len(first) == first.nbytes == 16 * MIB
    first[:5] = b"first"
    where = place(first)
    del first
    shorter = blocks.block(9 * MIB)
    assert (len(shorter), place(shorter), bytes(shorter[:5])) == (9 * MIB, where, b"first")


@pytest.mark.parametrize("read", ARRAYS, ids=["frombuffer", "ndarray", "ndarray of an array"])
def test_a_block_in_use_is_not_reused(read: Callable[[memoryview], Array]) -> None:
    blocks = Blocks(64 * MIB)
    view = blocks.block(16 * MIB)
    view[:] = bytes(16 * MIB)
    where, array = place(view), read(view)
    del view
    gc.collect()
    other = blocks.block(16 * MIB)
    other[:] = b"\1" * (16 * MIB)
    assert place(other) != where
    assert not array.any()
    del array
    assert place(blocks.block(16 * MIB)) == where


@pytest.mark.parametrize("nbytes", [MIB - 1, 33 * MIB])
def test_short_and_very_long_blocks_are_not_kept(nbytes: int) -> None:
    blocks = Blocks(64 * MIB)
    del (block := [blocks.block(nbytes)])[:]
    block.append(blocks.block(32 * MIB))
    block.append(blocks.block(32 * MIB))  # there is room for both
    where = {place(one) for one in block}
    block.clear()
    assert {place(blocks.block(32 * MIB))} < where


def test_the_number_of_kept_blocks_is_bounded() -> None:
    blocks = Blocks(40 * MIB)
    held = [blocks.block(16 * MIB) for _ in range(3)]
    owned = {place(one) for one in held[:2]}
    held.clear()
    assert {place(one) for one in (blocks.block(16 * MIB), blocks.block(16 * MIB))} <= owned


def test_a_short_message_does_not_hold_a_long_block() -> None:
    blocks = Blocks(64 * MIB)
    long = blocks.block(16 * MIB)
    where = place(long)
    del long
    short = blocks.block(7 * MIB)
    assert place(blocks.block(16 * MIB)) == where
    assert len(short) == 7 * MIB


def test_less_is_kept_while_others_hold_memory() -> None:
    blocks = Blocks(32 * MIB)
    first, second = blocks.block(16 * MIB), blocks.block(16 * MIB)
    where = place(first), place(second)
    del first, second
    blocks.spare(16 * MIB)
    now = [blocks.block(16 * MIB) for _ in range(2)]
    assert place(now[0]) in where
    now.clear()
    blocks.spare(0)
    now = [blocks.block(16 * MIB) for _ in range(2)]
    assert place(now[0]) in where


def test_a_block_referenced_past_its_view_is_not_reused() -> None:
    blocks = Blocks(64 * MIB)
    view = blocks.block(16 * MIB)
    owner = np.frombuffer(view, np.uint8).base.obj.base  # type: ignore[union-attr]
    where = place(view)
    del view
    assert place(blocks.block(16 * MIB)) != where
    assert len(owner) == 16 * MIB
