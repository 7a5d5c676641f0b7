"""Memory in which long requests for a version are received, and which its workers read.

A long message would otherwise be copied, in the server's thread, from where it was received to a
file that a worker maps. Here it is received in a block that every worker of the version maps
read-only, before its first batch in it; workers of other versions never do. The batch's frame then
says where the inputs of each request are (`headrace.ipc.frames.pack_places`).

A block is written again once nothing in this process refers to it, no batch in it is under way, and
no model has kept an array in it: one that a model has kept is dropped, as are blocks unused for a
while. Seals see to it that a worker can neither write to a block nor shrink it. Owned by the
event-loop thread; any thread may hold, and drop, memory in a block.
"""

import asyncio
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from itertools import count
from sys import getrefcount
from typing import NamedTuple

import numpy as np

from headrace.core.blocks import BLOCKS, Blocks
from headrace.core.bytes_array import BytesArray
from headrace.core.call import Call
from headrace.core.tensors import Array, raw_bytes
from headrace.ipc.elements import Buffer
from headrace.ipc.frames import ALIGNMENT, INLINE, Place, pack_places
from headrace.ipc.memory import new_file
from headrace.placement.worker.worker_process import WorkerSocket

_LEAST, _LARGEST = 256 << 10, 32 << 20  # sizes in bytes of messages that are received in blocks
# Bytes and number of a version's blocks, in use or free: each takes a descriptor of each worker.
_MOST, _COUNT = 64 << 20, 16
_GRAIN = 64 << 10  # bytes; sizes of blocks are multiples of it
_REST_SECS = 10.0  # after which unused blocks are dropped
_KEEPS = 4  # blocks in a row that a model has kept, after which it gets copies for a while
_FOR_GOOD = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})  # errors of older systems
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, since Linux 5.1


class SharedBlock:
    """One block; `lent` counts batches under way in it, `readers` are those that have mapped it."""

    def __init__(self, number: int, nbytes: int) -> None:
        """Allocate `nbytes`; raises `OSError`."""
        self.number = number
        self.nbytes = nbytes
        self.lent = 0
        self.kept = False  # a model refers to an array in it
        self.touched = True  # used since the last look for unused ones
        self.readers: set[WorkerSocket] = set()
        self.descriptor = new_file(nbytes)
        try:
            self.array: Array = np.frombuffer(mmap.mmap(self.descriptor, nbytes), np.uint8)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.descriptor)
            raise
        self.address: int = self.array.__array_interface__["data"][0]
        self._idle = getrefcount(self.array)

    @property
    def in_use(self) -> bool:
        """True while a batch in it is under way, or anything in this process refers to it."""
        return self.lent > 0 or getrefcount(self.array) > self._idle


class Placed(NamedTuple):
    """The inputs of a batch in `blocks`: the start of its frame's meta."""

    blocks: list[SharedBlock]
    meta: bytes


class SharedBlocks:
    """The blocks of one version."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Blocks = BLOCKS) -> None:
        """All blocks count against the limit of `pool`."""
        self._loop = loop
        self._pool = pool
        self._blocks: dict[int, SharedBlock] = {}
        self._numbers = count(1)
        self._owned = 0  # bytes of all blocks
        self._kept = 0  # blocks in a row that the model has kept
        self._refused = False  # the system has no such memory
        self._timer: asyncio.TimerHandle | None = None

    def memory(self, nbytes: int, begin: int) -> memoryview | None:
        """Memory for a message of `nbytes` in which the tensor that begins at `begin` is aligned.

        None if it is to be received elsewhere.
        """
        skew = -begin % ALIGNMENT
        size = nbytes + skew
        if not _LEAST <= size <= _LARGEST or self._kept >= _KEEPS or self._refused:
            return None
        block = self._unused(size) or self._new(size)
        if block is None:
            return None
        block.touched = True
        if self._timer is None:
            self._timer = self._loop.call_later(_REST_SECS, self._rest)
        # The memoryview holds a reference to the array, for as long as any array made from it.
        return np.frombuffer(block.array.data, np.uint8, nbytes, skew).data

    def place(
        self, calls: Sequence[Call], inputs: Sequence[tuple[str, bool]], size: int
    ) -> Placed | None:
        """The places of `inputs` (names, true for numbers) of a batch; None if it is to be copied.

        `size` is that of the data, if it were copied.
        """
        if not self._blocks:
            return None
        places: list[Place] = []
        used: list[SharedBlock] = []
        beside: list[Buffer] = []
        length = 0
        for name, numbers in inputs:
            for call in calls:
                array = call.inputs[name].array
                if not numbers or isinstance(array, BytesArray):
                    return None
                found = self._find(array)
                if found is not None:
                    used.append(found[0])
                    places.append((found[0].number, found[1]))
                    continue
                pad = -length % ALIGNMENT
                places.append((0, length + pad))
                length += pad + array.nbytes
                if length > INLINE:
                    return None
                beside += [bytes(pad), raw_bytes(array)]
        return Placed(used, pack_places(places, b"".join(beside), size)) if used else None

    def lend(self, placed: Placed, reader: WorkerSocket) -> bool:
        """Give a batch to a worker, which maps blocks that are new to it.

        False if it cannot, for want of descriptors.
        """
        try:
            for block in placed.blocks:
                if reader not in block.readers:
                    reader.share(block.number, block.descriptor, block.nbytes)
                    block.readers.add(reader)
        except OSError:
            return False
        for block in placed.blocks:
            block.lent += 1
        return True

    def keep(self, numbers: Sequence[int]) -> None:
        """Note that a model has kept arrays in blocks; unknown numbers are ignored."""
        for number in numbers:
            block = self._blocks.get(number)
            if block is not None and not block.kept:
                block.kept = True
                self._kept += 1

    def give_back(self, placed: Placed) -> None:
        """Note that a batch has ended."""
        if not any(block.kept for block in placed.blocks):
            self._kept = 0
        for block in placed.blocks:
            block.lent -= 1
            if block.kept and not block.lent:
                self._drop(block)

    def forget(self, reader: WorkerSocket) -> None:
        """Forget a worker that has ended."""
        for block in self._blocks.values():
            block.readers.discard(reader)

    def close(self) -> None:
        """Drop all blocks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._refused = True
        for block in list(self._blocks.values()):
            self._drop(block)

    def _find(self, array: Array) -> tuple[SharedBlock, int] | None:
        """The block that has the elements of `array`, one after the other, and their position."""
        address = array.__array_interface__["data"][0]
        for block in self._blocks.values():
            if 0 <= address - block.address < block.nbytes:
                usable = array.flags.c_contiguous and array.flags.aligned
                return (block, address - block.address) if usable else None
        return None

    def _unused(self, size: int) -> SharedBlock | None:
        for block in self._blocks.values():
            if size <= block.nbytes <= 2 * size + _GRAIN and not (block.kept or block.in_use):
                return block
        return None

    def _new(self, size: int) -> SharedBlock | None:
        """Another block, for which unused ones may be dropped; None if there is no room."""
        nbytes = -(-size // _GRAIN) * _GRAIN
        for block in list(self._blocks.values()):
            if self._owned + nbytes <= _MOST and len(self._blocks) < _COUNT:
                break
            if not block.in_use:
                self._drop(block)
        else:
            if self._owned + nbytes > _MOST or len(self._blocks) >= _COUNT:
                return None
        if not self._pool.reserve(nbytes):
            return None
        try:
            block = SharedBlock(next(self._numbers), nbytes)
        except OSError as error:  # no descriptors, or an older system: requests are copied
            self._pool.release(nbytes)
            self._refused = error.errno in _FOR_GOOD
            return None
        self._owned += nbytes
        self._blocks[block.number] = block
        return block

    def _drop(self, block: SharedBlock) -> None:
        """Forget a block; memory that is still referred to goes with its last array."""
        if self._blocks.pop(block.number, None) is None:
            return
        self._owned -= block.nbytes
        self._pool.release(block.nbytes)
        os.close(block.descriptor)
        for reader in block.readers:
            reader.unshare([block.number])

    def _rest(self) -> None:
        """Drop blocks that were not used lately, and try a model again that keeps its inputs."""
        self._timer = None
        self._kept = max(self._kept - 1, 0)
        for block in list(self._blocks.values()):
            if not (block.touched or block.in_use):
                self._drop(block)
            block.touched = False
        if self._blocks or self._kept:
            self._timer = self._loop.call_later(_REST_SECS, self._rest)
