"""Unnamed files mapped by two processes: one writes, the other reads.

They disappear with the last process that has them open, however it ends.

The file of a long frame is written and mapped once. A slot of a worker has several files in each
direction. A batch's data outlives the batch if a model keeps an array, or a client reads its answer
slowly, and new memory costs many times as much as a copy: while one file is in use the next is
written. With every frame about a batch each end reports which of the other's files it still refers
to; frames of a slot alternate, so that this is accurate when the other end writes the next.
"""

import fcntl
import mmap
import os
import sys
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from headrace.ipc.elements import Array, Buffer
from headrace.ipc.frames import (
    ALONE,
    FILES,
    IN_FILE,
    KEEPING,
    KEPT,
    NEW_FILE,
    WHICH,
    BrokenFrame,
    FrameKind,
    Header,
)

_AT_ONCE = 1000  # buffers per system call
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GRAIN = 1 << 20  # bytes; file sizes are multiples of it
_BLOCK = 512  # unit of a file's block count, in bytes
_KEPT = 64 << 20  # bytes up to which a file is kept for the next batch


def write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write `pieces` to a file, from its start; raises `OSError`."""
    position = 0
    waiting = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while waiting:
        written = os.pwritev(descriptor, waiting[:_AT_ONCE], position)
        position += written
        done = 0
        while done < len(waiting) and written >= len(waiting[done]):
            written -= len(waiting[done])
            done += 1
        waiting = waiting[done:]
        if written:
            waiting[0] = waiting[0][written:]


def new_file(size: int) -> int:
    """Create a file of fixed `size`; returns its descriptor; raises `OSError`."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_file(pieces: Sequence[Buffer], size: int) -> int:
    """Create a file for one frame, with `size` bytes of `pieces`; returns its descriptor."""
    descriptor = new_file(size)
    try:
        write_all(descriptor, pieces)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int, populate: bool = False) -> mmap.mmap:
    """Map the first `size` bytes of a frame's file, read-only, and close the descriptor.

    The mapping lasts while it is referenced. `populate` maps all pages at once, which is faster for
    data that is read immediately. Raises `OSError` or `BrokenFrame`.
    """
    try:
        if _sealed_size(descriptor) < size or not size:
            raise BrokenFrame(f"a file that has not {size} bytes")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(descriptor, size, flags, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _sealed_size(descriptor: int) -> int:
    # Otherwise its writer could make reading crash.
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise BrokenFrame("a file that may change its size")
    return os.fstat(descriptor).st_size


class OutFile:
    """The file that this end writes. It is replaced if too small, or still referenced.

    Once written, its memory exists: it is written again through a mapping, which is several times
    as fast as a system call. The first write is a system call, which is faster for new memory, and
    fails cleanly without enough memory. Either end may have freed the memory since, so the file
    itself is asked whether it has any.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._size = 0
        self._mapped: mmap.mmap | None = None
        self.retired = False  # the other end still refers to its content

    def write(self, pieces: Sequence[Buffer], size: int) -> int:
        """Write `pieces`, `size` bytes; returns the descriptor of a new file, else -1."""
        new = self._descriptor < 0 or self.retired or size > self._size
        if not new and self._size > _KEPT and size <= _KEPT:
            new = True  # release the memory of a single large batch
        if new:
            self.close()
            room = -(-size // _GRAIN) * _GRAIN
            self._descriptor = new_file(room)
            self._size = room
            self.retired = False
        try:
            self._fill(pieces, size)
        except OSError:
            self.close()  # its content is undefined, and possibly unknown to the other end
            raise
        return self._descriptor if new else -1

    def _fill(self, pieces: Sequence[Buffer], size: int) -> None:
        # The allocated part is at the beginning.
        if size > os.fstat(self._descriptor).st_blocks * _BLOCK:
            write_all(self._descriptor, pieces)
            return
        if self._mapped is None:
            self._mapped = mmap.mmap(self._descriptor, self._size)
        with memoryview(self._mapped) as target:
            position = 0
            for piece in pieces:
                end = position + len(piece)
                target[position:end] = piece
                position = end

    def free(self) -> bool:
        """Release the file's memory; False if the other end still refers to it."""
        if self._descriptor >= 0 and not self.retired:
            if self._mapped is None:
                self._mapped = mmap.mmap(self._descriptor, self._size)
            self._mapped.madvise(mmap.MADV_REMOVE)
        return not self.retired

    def close(self) -> None:
        """Close the file."""
        self._mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._size = 0


class InFile:
    """The file written by the other end, read-only."""

    def __init__(self) -> None:
        self._bytes: Array | None = None
        self._pages: mmap.mmap | None = None  # the mapping, for releasing its memory
        self._idle = 0  # this object's own references to the bytes

    def map(self, descriptor: int) -> None:
        """Map a new file, and close its descriptor; raises `OSError` or `BrokenFrame`."""
        try:
            size = _sealed_size(descriptor)
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._pages = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._idle = sys.getrefcount(self._bytes)

    @property
    def bytes(self) -> Array | None:
        """The whole content; arrays made from it keep it alive."""
        return self._bytes

    @property
    def in_use(self) -> bool:
        """True while an array made from the file is referenced."""
        return self._bytes is not None and sys.getrefcount(self._bytes) > self._idle

    def free(self) -> bool:
        """Release the file's memory; False if something still refers to it."""
        if self._pages is not None and not self.in_use:
            self._pages.madvise(mmap.MADV_REMOVE)
        return not self.in_use


_LONG = 256  # consecutive writes to the first file after which the others are dropped


class SlotFiles:
    """The files of a slot. Owned by the thread that sends and receives batches at this end."""

    def __init__(self) -> None:
        self._in: dict[int, InFile] = {}
        self._out: list[OutFile] = []
        self._single = 0  # consecutive writes to the first file
        self._lent = False  # a batch is in progress: the other end may use the files
        self._touched = False  # used since the last `rest`

    def put(self, pieces: Sequence[Buffer], size: int) -> tuple[int, int]:
        """Write data; returns the flags that locate it, and a new file's descriptor or -1.

        Close the descriptor once it was sent. Raises `OSError`.
        """
        self._touched = True
        number = next((n for n, file in enumerate(self._out) if not file.retired), len(self._out))
        if number == FILES:
            number = 0  # replace the file
        elif number == len(self._out):
            self._out.append(OutFile())
        flags = IN_FILE | number * WHICH
        self._single = 0 if number else self._single + 1
        if self._single >= _LONG:
            self._single = 0
            for file in self._out[1:]:
                file.close()
            del self._out[1:]
            flags |= ALONE
        file = self._out[number]
        if (descriptor := file.write(pieces, size)) < 0:
            return flags, -1
        try:
            # The file may be replaced before it was sent.
            return flags | NEW_FILE, os.dup(descriptor)
        except OSError:
            file.close()  # the other end does not receive it
            raise

    def used(self) -> int:
        """The other end's files still referenced here, as flags."""
        return sum([KEPT << number for number, file in self._in.items() if file.in_use])

    def lend(self) -> None:
        """Hand the files to the other end until its next frame about the batch."""
        self._lent = True

    def heed(self, flags: int) -> None:
        """Update from a frame's flags which files the other end still refers to."""
        self._lent = False
        for number, file in enumerate(self._out):
            file.retired = bool(flags & KEPT << number)

    def take(self, flags: int, descriptor: int) -> None:
        """Map a new file of the other end; raises `OSError` or `BrokenFrame`."""
        file = self._in[_number(flags)] = InFile()
        file.map(descriptor)

    def data(self, flags: int, size: int) -> memoryview:
        """The data of a frame; raises `BrokenFrame`."""
        self._touched = True
        number = _number(flags)
        if flags & ALONE:
            self._in = {n: file for n, file in self._in.items() if n == number}
        found = self._in[number].bytes if number in self._in else None
        if found is None or len(found) < size:
            raise BrokenFrame("data beyond its file")
        return found.data

    def rest(self) -> bool:
        """Release the memory of unused files; returns True to be called again.

        Only at the end that lends: it knows when the other one does not use them.
        """
        if self._touched or self._lent:
            self._touched = False
            return True
        files: list[OutFile | InFile] = [*self._out, *self._in.values()]
        return not all([file.free() for file in files])

    def close(self) -> None:
        """Close all files."""
        for file in self._out:
            file.close()
        self._out.clear()
        self._in.clear()


class BatchFiles:
    """The files at one end of a worker's socket: those of slots, and those of single frames.

    Only with few slots are their files kept for the next batch, which bounds the memory.
    """

    def __init__(self, batches: Collection[FrameKind]) -> None:
        """Received frames of the kinds `batches` concern the batch of a slot."""
        self.slots: dict[int, SlotFiles] = {}  # slots with large batches
        self._batches = batches

    def put(self, slot: int, pieces: Sequence[Buffer], size: int) -> tuple[int, int]:
        """`SlotFiles.put` for a slot."""
        if slot >= KEEPING:
            return IN_FILE | NEW_FILE, write_file(pieces, size)
        return self._of(slot).put(pieces, size)

    def take(self, header: Header[FrameKind], data: Buffer, files: deque[int]) -> Buffer:
        """The data of a received frame, whose files are the first of `files`.

        Data of a batch in kept files stays there, for `data`. Raises `OSError`, `IndexError` or
        `BrokenFrame`.
        """
        flags = header.flags
        if not self._keeps(header):
            return memoryview(map_file(files.popleft(), header.data)) if flags & IN_FILE else data
        if flags or header.number in self.slots:
            kept = self._of(header.number)
            kept.heed(flags)
            if flags & NEW_FILE:
                kept.take(flags, files.popleft())
        return data

    def data(self, header: Header[FrameKind], data: Buffer) -> Buffer:
        """The data of a frame; `data` is the result of `take`. Raises `BrokenFrame`."""
        if header.flags & IN_FILE and self._keeps(header):
            return self._of(header.number).data(header.flags, header.data)
        return data

    def _keeps(self, header: Header[FrameKind]) -> bool:
        return header.number < KEEPING and header.kind in self._batches

    def _of(self, slot: int) -> SlotFiles:
        found = self.slots.get(slot)
        if found is None:
            found = self.slots[slot] = SlotFiles()
        return found

    def rest(self) -> bool:
        """`SlotFiles.rest` of all slots."""
        return any([files.rest() for files in self.slots.values()])

    def close(self) -> None:
        """Close all files."""
        for files in self.slots.values():
            files.close()
        self.slots.clear()


class SharedIn:
    """Blocks of shared memory with inputs of requests, which the server writes."""

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}
        self._lent: dict[int, list[int]] = {}  # numbers of blocks, by the slot whose batch has them

    def add(self, number: int, data: Buffer) -> None:
        """Add a block, mapped as `data`."""
        self._blocks[number] = np.frombuffer(data, np.uint8)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget blocks; arrays in them keep their memory."""
        for number in numbers:
            self._blocks.pop(number, None)

    def borrow(self, slot: int, numbers: Sequence[int]) -> dict[int, Buffer]:
        """The blocks with these numbers, for the batch of a slot; raises `KeyError`."""
        self._lent[slot] = [number for number in numbers if number]
        return {number: self._blocks[number].data for number in self._lent[slot]}

    def kept(self, slot: int) -> list[int]:
        """Numbers of the blocks of a slot's finished batch that the model still refers to.

        Those that other batches are in are told of with the last of these.
        """
        if slot not in self._lent:  # as mostly
            return []
        numbers = set(self._lent.pop(slot))
        for others in list(self._lent.values()):
            numbers.difference_update(others)
        blocks = self._blocks
        return [n for n in numbers if n in blocks and _references(blocks, n) > _ALONE]


def _references(arrays: dict[int, Array], number: int) -> int:
    return sys.getrefcount(arrays[number])


_ALONE = _references({0: np.empty(1, np.uint8)}, 0)  # if only the dictionary holds it


def _number(flags: int) -> int:
    return flags // WHICH % 4
