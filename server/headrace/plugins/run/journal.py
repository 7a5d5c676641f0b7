"""The log of a run: an entry for each finished block, appended before the block counts.

An entry has a checksum, and ends where the next begins. A process that was killed leaves at most
one that is incomplete, which the next process cuts off; so there is no flush to the disk: after a
loss of power the log is as valid, and shorter. The first entry says what the run is.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import orjson

from headrace.plugins.run.rows import Position
from headrace.plugins.run.sources import TableFailed

_LENGTHS = struct.Struct("<IIQQ")  # checksum; lengths of head, bad rows and table
_MOST = 1 << 40  # bytes of a part; more is damage


class ResumeRefused(Exception):
    """A log that is not of this run, or that another process is writing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished block: its end, its rows, and what is written for it.

    `table` is a stream of Arrow, empty for no rows, and `bad` has a line for each of `failed` rows.
    """

    end: Position
    rows: int
    failed: int
    table: bytes | memoryview
    bad: bytes


class Journal:
    """An open log; one process at a time has it."""

    def __init__(self, path: str, identity: Mapping[str, Any], resume: bool) -> None:
        """Begin a log, or with `resume` continue the one at `path`, if there is one.

        Raises `ResumeRefused` and `TableFailed`.
        """
        self._path = path
        self.finished = False  # if it has a block
        self._file: IO[bytes] = _opened(path)
        try:
            self._begin(orjson.loads(orjson.dumps(dict(identity))), resume)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, identity: Mapping[str, Any], resume: bool) -> None:
        self._lock()
        self._file.seek(0)
        first = _read(self._file)
        if first is None:
            self._file.truncate(0)
            self._append(orjson.dumps(identity), b"", b"")
            return
        self._compare(orjson.loads(first[0]), identity)
        if not resume:
            raise ResumeRefused(
                f"{self._path} is of an unfinished run: --resume continues it; remove it to begin"
                " again"
            )

    def replayed(self) -> Iterator[Finished]:
        """The finished blocks, in order; then the log is ready for more."""
        while True:
            at = self._file.tell()
            entry = _read(self._file)
            if entry is None:
                self._file.truncate(at)
                return
            head, bad, table = entry
            end, rows, failed = orjson.loads(head)
            self.finished = True
            yield Finished(Position(*end), rows, failed, table, bad)

    def append(self, done: Finished) -> None:
        """Add a finished block; raises `TableFailed`."""
        head = orjson.dumps([list(done.end), done.rows, done.failed])
        self._append(head, done.bad, done.table)
        self.finished = True

    def close(self, remove: bool) -> None:
        """Close the log, and remove it if the run is complete or has nothing to continue."""
        if remove:
            os.unlink(self._path)
        self._file.close()

    def _append(self, head: bytes, bad: bytes, table: bytes | memoryview) -> None:
        checksum = zlib.crc32(table, zlib.crc32(bad, zlib.crc32(head)))
        lengths = _LENGTHS.pack(checksum, len(head), len(bad), len(table))
        try:
            self._file.write(lengths + head + bad)
            self._file.write(table)
            self._file.flush()
        except OSError as error:
            raise TableFailed(f"{self._path}: cannot be written: {error}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeRefused(f"{self._path}: another process is writing it") from None

    def _compare(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*was, *now]):
            if was.get(name) != now.get(name):
                raise ResumeRefused(
                    f"{self._path} is of another run: its {name} was {was.get(name)!r}, not"
                    f" {now.get(name)!r}; remove it to begin again"
                )


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "a+b")
    except OSError as error:
        raise TableFailed(f"{path}: cannot be written: {error}") from error


def _read(file: IO[bytes]) -> tuple[bytes, bytes, bytes] | None:
    """The parts of the next entry; None at the end, and for one that is incomplete."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    checksum, *sizes = _LENGTHS.unpack(lengths)
    if max(sizes) > _MOST or sum(sizes) > os.fstat(file.fileno()).st_size:
        return None
    head, bad, table = (file.read(size) for size in sizes)
    if zlib.crc32(table, zlib.crc32(bad, zlib.crc32(head))) != checksum:
        return None
    return head, bad, table
