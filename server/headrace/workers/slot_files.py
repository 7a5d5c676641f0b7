"""The files of one slot, as one end sees them: those that it writes, and those of the other end.

A batch's data are in use for longer than the batch where a model keeps an array, or a client is
slow to read its answer. Memory that is new costs many times what a copy does, so that each
direction has several files: while one is in use the next is written. With every frame about a
batch each end tells which of the other's files it still refers to; frames of a slot take turns, so
that this is true when the other end writes the next.
"""

from collections.abc import Sequence

from headrace.workers.elements import Buffer
from headrace.workers.frames import (
    ALONE,
    FILES,
    IN_FILE,
    KEPT,
    NEW_FILE,
    WHICH,
    BrokenFrame,
)
from headrace.workers.memory import InFile, OutFile

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
