"""Frames between the server and a worker: bytes to values and back, without I/O.

A frame is a header of fixed size, then `meta`, then data. Data of more than `INLINE` bytes is not
in the frame: it lies in a file without a name, which both ends have mapped and of which each slot
has a few per direction. A slot is a batch that may be under way; its files are written again only
when nobody refers to what was in them.

A batch travels as it is computed: per input one block with the rows of all requests behind one
another, so that neither end has to put them together. What repeats from batch to batch (names,
datatypes, row shapes) is sent once, as a form with a number. Requests have numbers, too: those of a
batch are consecutive, and what comes for one of them by itself names it. Data that belong to no
slot and are too many for a frame lie in a file of their own.

Both ends belong to one server and count on each other to be of the same version. A worker may be
broken by its model, though: what makes no sense raises `BrokenFrame`.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from struct import error as _StructError
from typing import NamedTuple

INLINE = 64 << 10  # bytes of data up to which they travel in the frame
ALIGNMENT = 64  # blocks begin at multiples of it, so that arrays are aligned
SLOTS = 2  # batches that a worker has, which takes one after the other
KEEPING = 4  # slots that keep their files for the next batch; those of many would add up
MAX_SLOTS = 1024  # that one may have which runs several at a time
MAX_TOLD = 4 << 20  # bytes of meta that a worker may send

Buffer = bytes | bytearray | memoryview


class BrokenFrame(Exception):
    """What came is no frame, or not one that belongs here."""


class Kind(IntEnum):
    """What a frame is about."""

    # To the worker.
    LOAD = 1  # JSON: what to load
    START = 2  # JSON: the completed configuration
    FORM = 3  # JSON: names, datatypes and row shapes under a number
    EXECUTE = 4  # a batch
    STOP = 5  # finish and end
    CANCEL = 6  # nobody waits for a request any more
    HOLD = 7  # pause, or go on with, the responses to a request
    REPLY = 8  # JSON: something that the worker has called for, or a part of it
    ASK = 9  # whether the model is ready
    # To the server.
    LOADED = 16  # JSON: what the model says of itself
    STARTED = 17
    FAILED = 18  # JSON: why it could not be loaded or started
    RESULT = 19  # the outputs of a batch, all of them as they should be
    RESPONSES = 20  # the outputs or errors of a batch, request by request
    BROKEN = 21  # JSON: the error of a whole batch
    LOG = 22  # JSON: level, logger and text
    RESPONSE = 23  # JSON: a response to one request, or its end
    CALL = 24  # JSON: have another model run, or something else done
    DROP_CALL = 25  # JSON: its replies are not wanted any more
    METRIC = 26  # JSON: a change of one of the model's own metrics
    ANSWER = 27  # JSON: whether the model is ready
    HOLD_CALL = 28  # JSON: pause the replies to a call, or go on
    BACK = 29  # a batch that has not been begun, and cannot be for now


LOOSE = frozenset({Kind.RESPONSE, Kind.CALL, Kind.REPLY})  # their data belong to no slot
ANSWERS = frozenset({Kind.RESULT, Kind.RESPONSES, Kind.BROKEN})  # to a batch
# Flags: data is in a file of the slot, of the number flags // WHICH % 4; it comes along; the other
# end's files that are still referred to, each by KEPT << number; there are no files but this one.
IN_FILE, NEW_FILE, WHICH, KEPT, ALONE = 1, 2, 4, 16, 128
FILES = 3  # of a slot, per direction

_HEADER = Struct("<BBHIQ")  # kind, flags, slot, size of meta, size of data
HEADER_SIZE = _HEADER.size
pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from

# Number of the first request, how many, number of the form, sizes of the ids and of the extras.
_BATCH = Struct("<QIIII")
_REQUEST = Struct("<QB")  # number of a request, and whether it is held
_RESULT = Struct("<IQQ")  # number of the form; when the model began and ended, monotonic ns


class Header(NamedTuple):
    """The fixed part of a frame."""

    kind: Kind
    flags: int
    slot: int
    meta: int
    data: int


class Block(NamedTuple):
    """One tensor of a whole batch: what it is called, and the shape of a row (or of all of it)."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class BatchMeta(NamedTuple):
    """What is said of a batch beside its data. `extras` is JSON, "" if there is nothing special."""

    first: int
    form: int
    rows: list[int]
    ids: list[str]
    extras: bytes
    sizes: list[int]


_KINDS = {kind.value: kind for kind in Kind}


def read_header(data: Buffer, position: int = 0, most: int = 1 << 32) -> Header:
    """The header at `position`, of a frame with at most so much meta; raises `BrokenFrame`."""
    number, flags, slot, meta, size = _unpack_header(data, position)
    kind = _KINDS.get(number)
    if kind is None:
        raise BrokenFrame(f"a frame of kind {number}")
    if meta > most or slot >= MAX_SLOTS or (size > INLINE and not flags & IN_FILE):
        raise BrokenFrame(f"a frame of {meta} and {size} bytes")
    return Header(kind, flags, slot, meta, size)


class FrameReader:
    """Takes bytes as they come and gives whole frames: header, meta, data that are in the frame."""

    def __init__(self, most: int = 1 << 32) -> None:
        """`most` bytes of meta are taken."""
        self._rest = b""
        self._most = most

    def feed(self, data: bytes) -> list[tuple[Header, bytes, bytes]]:
        """The frames that are complete with `data`; raises `BrokenFrame`."""
        if self._rest:
            data = self._rest + data
        frames: list[tuple[Header, bytes, bytes]] = []
        position, size = 0, len(data)
        while size - position >= HEADER_SIZE:
            header = read_header(data, position, self._most)
            start = position + HEADER_SIZE
            middle = start + header.meta
            stop = middle if header.flags & IN_FILE else middle + header.data
            if stop > size:
                break
            frames.append((header, data[start:middle], data[middle:stop]))
            position = stop
        self._rest = data[position:]
        return frames


def frame(kind: Kind, meta: bytes = b"", slot: int = 0) -> bytes:
    """A frame without data."""
    return pack_header(kind, 0, slot, len(meta), 0) + meta


def aligned(size: int) -> int:
    """Where the next block may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(blocks: Sequence[Sequence[Buffer]]) -> tuple[list[int], list[Buffer], int]:
    """The sizes of blocks, their pieces with padding between, and the bytes of all of that."""
    sizes: list[int] = []
    pieces: list[Buffer] = []
    total = 0
    for block in blocks:
        if pad := aligned(total) - total:
            pieces.append(bytes(pad))
            total += pad
        size = sum(map(len, block))
        sizes.append(size)
        pieces += block
        total += size
    return sizes, pieces, total


def offsets(sizes: Sequence[int], total: int) -> list[int]:
    """Where blocks of these sizes begin; raises `BrokenFrame` unless they fill `total` bytes."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(aligned(end))
        end = starts[-1] + size
    if end != total:
        raise BrokenFrame(f"{total} bytes for blocks of {end}")
    return starts


@lru_cache(maxsize=1024)
def _numbers(rows: int, sizes: int) -> Struct:
    """So many row counts, then so many sizes. Making a `Struct` costs more than to use it."""
    return Struct(f"<{rows}I{sizes}Q")


def pack_batch(meta: BatchMeta) -> bytes:
    """The meta of EXECUTE; `meta.sizes` are of the blocks of its data."""
    count = len(meta.rows)
    ids = [id.encode() for id in meta.ids] if any(meta.ids) else []
    packed = b"".join(ids)
    lengths = Struct(f"<{len(ids)}I").pack(*map(len, ids)) + packed if ids else b""
    sizes = _numbers(count, len(meta.sizes)).pack(*meta.rows, *meta.sizes)
    head = _BATCH.pack(meta.first, count, meta.form, len(lengths), len(meta.extras))
    return b"".join([head, lengths, meta.extras, sizes])


def unpack_batch(data: bytes) -> BatchMeta:
    """What `pack_batch` was given; raises `BrokenFrame`."""
    try:
        first, count, form, ids_size, extras_size = _BATCH.unpack_from(data)
        position = _BATCH.size
        if 4 * count > len(data):
            raise BrokenFrame(f"a batch of {count} requests in {len(data)} bytes")
        ids = [""] * count
        if ids_size:
            lengths = Struct(f"<{count}I").unpack_from(data, position)
            start = position + 4 * count
            for index, length in enumerate(lengths):
                ids[index] = data[start : start + length].decode()
                start += length
        position += ids_size
        extras = data[position : position + extras_size]
        position += extras_size
        blocks = max(len(data) - position - 4 * count, 0) // 8
        numbers = _numbers(count, blocks).unpack_from(data, position)
        rows, sizes = list(numbers[:count]), list(numbers[count:])
    except (ValueError, _StructError) as error:
        raise BrokenFrame(f"a batch that cannot be read: {error}") from None
    return BatchMeta(first, form, rows, ids, extras, sizes)


def pack_result(form: int, began: int, ended: int, sizes: Sequence[int]) -> bytes:
    """The meta of RESULT."""
    return _RESULT.pack(form, began, ended) + _numbers(0, len(sizes)).pack(*sizes)


def unpack_result(data: bytes) -> tuple[int, int, int, list[int]]:
    """What `pack_result` was given; raises `BrokenFrame`."""
    if len(data) < _RESULT.size or (len(data) - _RESULT.size) % 8:
        raise BrokenFrame("a result that cannot be read")
    form, began, ended = _RESULT.unpack_from(data)
    count = (len(data) - _RESULT.size) // 8
    return form, began, ended, list(_numbers(0, count).unpack_from(data, _RESULT.size))


def pack_request(number: int, held: bool = False) -> bytes:
    """The meta of CANCEL and HOLD."""
    return _REQUEST.pack(number, held)


def unpack_request(data: bytes) -> tuple[int, bool]:
    """What `pack_request` was given; raises `BrokenFrame`."""
    try:
        number, held = _REQUEST.unpack(data)
    except _StructError as error:
        raise BrokenFrame(f"a request that cannot be read: {error}") from None
    return number, bool(held)
