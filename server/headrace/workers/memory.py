"""Files without a name that two processes have mapped: one writes, the other reads.

They are gone with the last process that has them open, however it ends.

A slot has several of them in each direction. A batch's data are in use for longer than the batch
where a model keeps an array, or a client is slow to read its answer, and memory that is new costs
many times what a copy does: while one file is in use the next is written. With every frame about a
batch each end tells which of the other's files it still refers to; frames of a slot take turns, so
that this is true when the other end writes the next.
"""

import array
import fcntl
import mmap
import os
import socket
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from headrace.workers.elements import Array, Buffer
from headrace.workers.frames import ALONE, FILES, IN_FILE, KEPT, NEW_FILE, WHICH, BrokenFrame

_AT_ONCE = 1000  # buffers that one system call takes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GRAIN = 1 << 20  # bytes; files grow by multiples of it
_BLOCK = 512  # bytes that a file's number of blocks is counted in
_KEPT = 64 << 20  # bytes up to which a file is kept for the next batch


def descriptors(control: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The open files that came along with a message."""
    found: list[int] = []
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += array.array("i", payload[: len(payload) // 4 * 4])
    return found


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
            self._descriptor = os.memfd_create(
                "headrace-batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            try:
                os.ftruncate(self._descriptor, room)
            except OSError:
                self.close()
                raise
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
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
        """Let go of the file."""
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
        """Have a new file, and close its descriptor; raises `OSError` or `BrokenFrame`."""
        try:
            # Otherwise whoever writes it could make reading it fatal.
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise BrokenFrame("a file that may change its size")
            size = os.fstat(descriptor).st_size
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
        """Whether anything made of it is still referred to."""
        return self._bytes is not None and sys.getrefcount(self._bytes) > self._idle

    def free(self) -> bool:
        """Give the file's memory back; False if something still refers to it."""
        if self._pages is not None and not self.in_use:
            self._pages.madvise(mmap.MADV_REMOVE)
        return not self.in_use


_LONG = 256  # writes without need for a second file, after which there is but one again


class SlotFiles:
    """Owned by the one thread that sends and receives batches at this end."""

    def __init__(self, kept: bool = True) -> None:
        """Files that are not `kept` are let go of once they have been sent, and taken."""
        self._kept = kept
        self._in: dict[int, InFile] = {}
        self._out: list[OutFile] = []
        self._single = 0  # writes to the first file in a row
        self._lent = False  # the other end may read and write files: a batch is under way
        self._touched = False  # since the last `rest`

    def put(self, pieces: Sequence[Buffer], size: int) -> tuple[int, int]:
        """Write data; the flags that tell where they are, and a new file's descriptor or -1.

        Raises `OSError`.
        """
        self._touched = True
        if not self._kept:
            self._out[:] = [OutFile()]
            return IN_FILE | NEW_FILE, self._out[0].write(pieces, size)
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
        descriptor = self._out[number].write(pieces, size)
        return flags | (NEW_FILE if descriptor >= 0 else 0), descriptor

    def sent(self) -> None:
        """What `put` has written is on its way."""
        if not self._kept:
            for file in self._out:
                file.close()
            self._out.clear()

    def spoil(self, flags: int) -> None:
        """What `put` has said did not reach the other end."""
        if self._out:
            self._out[_number(flags)].close()

    def used(self) -> int:
        """Which of the other end's files are still referred to here, as flags."""
        return sum([KEPT << number for number, file in self._in.items() if file.in_use])

    def lend(self) -> None:
        """A frame about a batch goes out: until one comes back, files are the other end's."""
        self._lent = True

    def heed(self, flags: int) -> None:
        """Know from a frame's flags which of the files are still referred to there."""
        self._lent = False
        for number, file in enumerate(self._out):
            file.retired = bool(flags & KEPT << number)

    def take(self, flags: int, descriptor: int) -> None:
        """Have a new file of the other end; raises `OSError` or `BrokenFrame`."""
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
        if not self._kept:
            del self._in[number]
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
        """Let go of all files."""
        for file in self._out:
            file.close()
        self._out.clear()
        self._in.clear()


def _number(flags: int) -> int:
    return flags // WHICH % 4
