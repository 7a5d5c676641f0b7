"""Files without a name that two processes have mapped: one writes, the other reads.

They are gone with the last process that has them open, however it ends.

A long frame has one that is written and mapped once. A slot of a worker has several in each
direction. A batch's data are in use for longer than the batch
where a model keeps an array, or a client is slow to read its answer, and memory that is new costs
many times what a copy does: while one file is in use the next is written. With every frame about a
batch each end tells which of the other's files it still refers to; frames of a slot take turns, so
that this is true when the other end writes the next.
"""

import fcntl
import mmap
import os
import sys
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from headrace.workers.elements import Array, Buffer
from headrace.workers.frames import (
    ALONE,
    FILES,
    IN_FILE,
    KEEPING,
    KEPT,
    NEW_FILE,
    WHICH,
    BrokenFrame,
    Header,
    Kind,
)

_AT_ONCE = 1000  # buffers that one system call takes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GRAIN = 1 << 20  # bytes; files grow by multiples of it
_BLOCK = 512  # bytes that a file's number of blocks is counted in
_KEPT = 64 << 20  # bytes up to which a file is kept for the next batch


def write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write `pieces` to a file, from its beginning on; raises `OSError`."""
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
    """A file of `size` bytes, which cannot change: its descriptor; raises `OSError`."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_file(pieces: Sequence[Buffer], size: int) -> int:
    """A file for one frame, with `size` bytes of `pieces`: its descriptor; raises `OSError`."""
    descriptor = new_file(size)
    try:
        write_all(descriptor, pieces)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int, populate: bool = False) -> mmap.mmap:
    """Map the first `size` bytes of a frame's file, read-only, and close the descriptor.

    They are there until nothing refers to them any more. `populate` maps all pages at once, which
    is quicker for what is read right away. Raises `OSError` or `BrokenFrame`.
    """
    try:
        if _sealed_size(descriptor) < size or not size:
            raise BrokenFrame(f"a file that has not {size} bytes")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(descriptor, size, flags, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _sealed_size(descriptor: int) -> int:
    # Otherwise whoever writes it could make reading it fatal.
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise BrokenFrame("a file that may change its size")
    return os.fstat(descriptor).st_size


class OutFile:
    """The file that this end writes. It is replaced when it is too small, or still referred to.

    What has been written once has its memory: it is written again through a mapping, which is
    several times as fast as by a system call. The first time goes by a system call, which is faster
    for memory that is new, and fails in good order if there is none. Either end may have freed the
    memory since, so the file itself is asked whether it has any.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._size = 0
        self._mapped: mmap.mmap | None = None
        self.retired = False  # the other end still refers to what is in it

    def write(self, pieces: Sequence[Buffer], size: int) -> int:
        """Write `pieces`, `size` bytes; the descriptor of the file if it is a new one, else -1."""
        new = self._descriptor < 0 or self.retired or size > self._size
        if not new and self._size > _KEPT and size <= _KEPT:
            new = True  # what one large batch took is given back
        if new:
            self.close()
            room = -(-size // _GRAIN) * _GRAIN
            self._descriptor = new_file(room)
            self._size = room
            self.retired = False
        try:
            self._fill(pieces, size)
        except OSError:
            self.close()  # what is in it is nobody's, and whether the other end has it, too
            raise
        return self._descriptor if new else -1

    def _fill(self, pieces: Sequence[Buffer], size: int) -> None:
        # What has memory is a stretch from the beginning on.
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
        """Give the file's memory back; False if the other end still refers to it."""
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
    """The file that the other end writes, read-only."""

    def __init__(self) -> None:
        self._bytes: Array | None = None
        self._pages: mmap.mmap | None = None  # the same, as one may free it
        self._idle = 0  # references to the bytes that are our own

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
        """All of it; arrays that are made of it keep it."""
        return self._bytes

    @property
    def in_use(self) -> bool:
        """True while an array made of the file is referred to."""
        return self._bytes is not None and sys.getrefcount(self._bytes) > self._idle

    def free(self) -> bool:
        """Give the file's memory back; False if something still refers to it."""
        if self._pages is not None and not self.in_use:
            self._pages.madvise(mmap.MADV_REMOVE)
        return not self.in_use


_LONG = 256  # writes without need for a second file, after which there is but one again


class SlotFiles:
    """Owned by the one thread that sends and receives batches at this end."""

    def __init__(self) -> None:
        self._in: dict[int, InFile] = {}
        self._out: list[OutFile] = []
        self._single = 0  # writes to the first file in a row
        self._lent = False  # the other end may read and write files: a batch is under way
        self._touched = False  # since the last `rest`

    def put(self, pieces: Sequence[Buffer], size: int) -> tuple[int, int]:
        """Write data; the flags that tell where they are, and a new file's descriptor or -1.

        The descriptor is to be closed once it was sent. Raises `OSError`.
        """
        self._touched = True
        number = next((n for n, file in enumerate(self._out) if not file.retired), len(self._out))
        if number == FILES:
            number = 0  # it is replaced
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
            return flags | NEW_FILE, os.dup(descriptor)  # which may be replaced before it was sent
        except OSError:
            file.close()  # the other end does not get it
            raise

    def used(self) -> int:
        """Which of the other end's files are still referred to here, as flags."""
        return sum([KEPT << number for number, file in self._in.items() if file.in_use])

    def lend(self) -> None:
        """A frame about a batch goes out: until one comes back, files are the other end's."""
        self._lent = True

    def heed(self, flags: int) -> None:
        """Note from a frame's flags which files the other end still refers to."""
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
        """Free the memory of files that nobody has used or refers to; whether to come again.

        Only at the end that lends: it knows when the other one does nothing with them.
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
    """The files at one end of a worker's socket: those of its slots, and those of single frames.

    Of few slots files are kept for the next batch; those of many would add up.
    """

    def __init__(self, batches: Collection[Kind]) -> None:
        """Frames of the kinds `batches` that come are about the batch of a slot."""
        self.slots: dict[int, SlotFiles] = {}  # whose batches are large
        self._batches = batches

    def put(self, slot: int, pieces: Sequence[Buffer], size: int) -> tuple[int, int]:
        """As `SlotFiles.put`, for any slot."""
        if slot >= KEEPING:
            return IN_FILE | NEW_FILE, write_file(pieces, size)
        return self._of(slot).put(pieces, size)

    def take(self, header: Header[Kind], data: Buffer, files: deque[int]) -> Buffer:
        """The data of a frame that has come, of which `files` may be those that came along.

        Those of a batch in kept files are left there, for `data`. Raises `OSError`, `IndexError` or
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

    def data(self, header: Header[Kind], data: Buffer) -> Buffer:
        """The data of a frame; `data` is what `take` has given. Raises `BrokenFrame`."""
        if header.flags & IN_FILE and self._keeps(header):
            return self._of(header.number).data(header.flags, header.data)
        return data

    def _keeps(self, header: Header[Kind]) -> bool:
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


def _number(flags: int) -> int:
    return flags // WHICH % 4
