"""Frames between the server's own processes: bytes to values and back, without I/O.

A frame is a header of fixed size, then `meta`, then data. Data of more than `INLINE` bytes is not
in the frame: it is in an unnamed file that is passed along, or that both ends have already mapped.
Front ends use kinds of their own (`headrace.plugins.frontends.link_infer`); the rest is for
workers.

A worker has slots, each for one batch in progress. A slot has a few files per direction, which are
reused only when nothing refers to their content (`headrace.ipc.memory`). A batch is transferred
as it is computed: per input one block with the concatenated rows of all requests, so that neither
end has to gather them. What repeats from batch to batch (names, datatypes, row shapes) is sent
once, as a form with a number. Requests have numbers, too: those of a batch are consecutive, and
individual messages about one name it. Data that belongs to no slot and is too large for a frame is
in a file of its own.

Both ends belong to one server and rely on having the same version. A worker may be corrupted by its
model, though: malformed bytes raise `BrokenFrame`.
"""

import json
from collections import namedtuple
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache, partial
from struct import Struct
from struct import error as _StructError
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headrace.ipc.elements import Buffer

INLINE = 64 << 10  # bytes of data up to which it is in the frame
ALIGNMENT = 64  # alignment of blocks, and so of arrays
SLOTS = 2  # concurrent batches of a worker that runs one after the other
KEEPING = 4  # slots that keep their files for the next batch, which bounds the memory
MAX_SLOTS = 1024  # slots of a worker that runs several batches at a time
MAX_TOLD = 4 << 20  # maximum bytes of meta from a worker


K = TypeVar("K", bound=IntEnum)
_HEADER = Struct("<BBxxIIQ")  # kind, flags, number, size of meta, size of data
HEADER_SIZE = _HEADER.size
pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
IN_FILE = 1  # the flag that data is in a file


class BrokenFrame(Exception):
    """Bytes that are not a valid frame, or a frame that is not expected here."""


if TYPE_CHECKING:

    class Header(NamedTuple, Generic[K]):
        """The fixed part of a frame; `number` is a slot's, or a front end's exchange's."""

        kind: K
        flags: int
        number: int
        meta: int
        data: int

else:  # Python 3.10, possible in a model's environment, has no generic named tuples
    Header = namedtuple("Header", "kind flags number meta data")


# Makes a header from its five fields without a Python-level call.
_new_header: Callable[[tuple[Any, int, int, int, int]], Header[Any]] = partial(
    tuple.__new__, Header
)


class FrameReader(Generic[K]):
    """Assembles frames from received bytes: header, meta, and data within the frame."""

    def __init__(self, kinds: type[K], most_meta: int = 1 << 32, most_number: int = 1 << 32):
        """Accept frames of `kinds`, with meta and numbers below these limits."""
        self._kinds = {kind.value: kind for kind in kinds}
        self._most_meta, self._most_number = most_meta, most_number
        self._pieces: list[bytes] = []  # pieces of an incomplete frame
        self._missing = 0  # bytes missing until more of it can be parsed

    def feed(self, data: bytes) -> list[tuple[Header[K], bytes, Buffer]]:
        """The frames completed by `data`; raises `BrokenFrame`."""
        if self._pieces:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
        frames: list[tuple[Header[K], bytes, Buffer]] = []
        position = stop = 0
        size = len(data)
        while position < size:
            start = stop = position + HEADER_SIZE
            if stop > size:
                break
            value, flags, number, meta, held = _unpack_header(data, position)
            kind = self._kinds.get(value)
            if kind is None:
                raise BrokenFrame(f"a frame of kind {value}")
            if meta > self._most_meta or number >= self._most_number:
                raise BrokenFrame(f"a frame of number {number} with {meta} bytes of meta")
            stop = middle = start + meta
            if not flags & IN_FILE:
                if held > INLINE:
                    raise BrokenFrame(f"a frame of {held} bytes")
                stop += held
            if stop > size:
                break
            header = _new_header((kind, flags, number, meta, held))
            frames.append((header, data[start:middle], data[middle:stop]))
            position = stop
        if position < size:
            self._pieces.append(data[position:])
            self._missing = stop - size
        return frames


def frame(
    kind: IntEnum, meta: bytes = b"", number: int = 0, data: bytes = b"", flags: int = 0
) -> bytes:
    """Encode a frame with little or no data."""
    return pack_header(kind, flags, number, len(meta), len(data)) + meta + data


class FrameKind(IntEnum):
    """The kind of a frame to or from a worker."""

    # To the worker.
    LOAD = 1  # JSON: the model to load
    START = 2  # JSON: the completed configuration
    FORM = 3  # JSON: names, datatypes and row shapes under a number
    EXECUTE = 4  # a batch
    STOP = 5  # finish and exit
    CANCEL = 6  # cancel a request
    HOLD = 7  # pause or resume the responses to a request
    REPLY = 8  # JSON: the result of a call, or a part of it
    ASK = 9  # request the model's readiness
    SHARED = 10  # a block of shared memory, under a number, for requests to come
    DROP_SHARED = 11  # its number: no further request is in it
    # To the server.
    LOADED = 16  # JSON: the model's own declarations
    STARTED = 17
    FAILED = 18  # JSON: the reason of a failed load or start
    RESULT = 19  # the outputs of a batch without errors
    RESPONSES = 20  # the outputs or errors of a batch, request by request
    BROKEN = 21  # JSON: the error of a whole batch
    LOG = 22  # JSON: level, logger and text
    RESPONSE = 23  # JSON: a response to one request, or its end
    CALL = 24  # JSON: call another model, or a control operation
    DROP_CALL = 25  # JSON: call off a call, or drop further replies to it
    METRIC = 26  # JSON: an update of one of the model's metrics
    ANSWER = 27  # JSON: the model's readiness
    HOLD_CALL = 28  # JSON: pause or resume the replies to a call
    BACK = 29  # a batch given back, since it cannot be started for now
    KEPT_SHARED = 30  # numbers of blocks that a finished batch was in, and the model refers to


# What is looked up for each batch: in the class that takes as long as a call of a method.
EXECUTE, RESULT, BACK, LOG = FrameKind.EXECUTE, FrameKind.RESULT, FrameKind.BACK, FrameKind.LOG
ANSWERS = frozenset(
    {FrameKind.RESULT, FrameKind.RESPONSES, FrameKind.BROKEN}
)  # frames that end a batch
# Flags beside `IN_FILE`: the file is passed along; its number in the slot is flags // WHICH % 4;
# the other end's files still referred to, each KEPT << number; no other files are.
NEW_FILE, WHICH, KEPT, ALONE = 2, 4, 16, 128
FILES = 3  # files per slot and direction
# The inputs of a batch are where they were received, in blocks of shared memory: see `pack_places`.
PLACED = FILES * WHICH

_BATCH = Struct("<QII")  # number of the first request, sizes of the ids and of the extras
FIRST = 8  # bytes of that number; the rest repeats for plain batches
unpack_first = Struct("<Q").unpack_from
PLAIN = bytes(_BATCH.size - FIRST)  # the sizes of no ids and no extras
_LAYOUT = Struct("<II")  # number of the form, number of requests
_REQUEST = Struct("<QB")  # number of a request, and a flag
_TIMES = Struct("<QQ")  # start and end of the execution, monotonic ns
unpack_times, TIMES = _TIMES.unpack_from, _TIMES.size  # the start of RESULT's meta


SHAPES = "shapes"  # the extra with row shapes by request, of each block without one


class Block(NamedTuple):
    """A tensor of a whole batch: its name, datatype, and the shape of a row (or of all of it).

    Without a shape, rows have one of their own in each request: it is among the extras, `SHAPES`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None


class BatchMeta(NamedTuple):
    """The meta of a batch's frame.

    `layout` is for `unpack_layout`, and repeats: it can be cached by its bytes. `ids` is empty if
    no request has one, `extras` is JSON, "" for none.
    """

    first: int
    layout: bytes
    ids: list[str]
    extras: bytes


# Made once: `json.dumps` takes twice as long, since it looks for circles.
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


def as_json(document: object) -> bytes:
    """A document in the JSON of Python, which has NaN and infinities."""
    return _encode(document).encode()


def told_frame(
    kind: IntEnum, document: dict[str, Any], blocks: Sequence[Sequence[Buffer]],
    most: int = 1 << 32, encode: Callable[[object], bytes] = as_json,
) -> tuple[bytes, Sequence[Buffer], int]:  # fmt: skip
    """A frame with `document` and the sizes of data that belongs to no slot.

    Returns it with the pieces for a file, and the file's size. Raises `ValueError` if the meta
    exceeds `most` bytes.
    """
    document["sizes"], pieces, size = lay_out(blocks)
    meta = encode(document)
    if len(meta) > most:
        raise ValueError(f"{len(meta)} bytes beside the data")
    if size <= INLINE:
        return b"".join([pack_header(kind, 0, 0, len(meta), size), meta, *pieces]), (), 0
    return pack_header(kind, IN_FILE | NEW_FILE, 0, len(meta), size) + meta, pieces, size


def aligned(size: int) -> int:
    """The next aligned position."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(blocks: Sequence[Sequence[Buffer]]) -> tuple[list[int], list[Buffer], int]:
    """The sizes of blocks, their pieces with padding in between, and the total size."""
    sizes: list[int] = []
    pieces: list[Buffer] = []
    total = 0
    for block in blocks:
        if pad := -total % ALIGNMENT:
            pieces.append(bytes(pad))
            total += pad
        size = sum(map(len, block))
        sizes.append(size)
        pieces += block
        total += size
    return sizes, pieces, total


def offsets(sizes: Sequence[int], total: int) -> list[int]:
    """The positions of blocks of these sizes; raises `BrokenFrame` unless they fill `total`."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(aligned(end))
        end = starts[-1] + size
    if end != total:
        raise BrokenFrame(f"{total} bytes for blocks of {end}")
    return starts


@lru_cache(maxsize=1024)
def _struct(fixed: str, rows: int, sizes: int) -> Struct:
    """Fixed fields, row counts, sizes; cached, since making a `Struct` costs more than its use."""
    return Struct(f"<{fixed}{rows}I{sizes}Q")


# The meta of EXECUTE, for a number of requests and one of blocks: the number of the first request,
# the sizes of the ids and of the extras behind it, the form, the number of requests, the rows of
# each, the sizes of the blocks. It is called without a Python-level call.
batch_struct: Callable[[int, int], Struct] = partial(_struct, "QIIII")


def pack_ids(ids: Sequence[str]) -> bytes:
    """Encode the ids in EXECUTE's meta, one per request."""
    texts = [id.encode() for id in ids]
    return Struct(f"<{len(ids)}I").pack(*map(len, texts)) + b"".join(texts)


def unpack_batch(data: bytes) -> BatchMeta:
    """Decode the meta of EXECUTE; raises `BrokenFrame`."""
    try:
        first, ids_size, extras_size = _BATCH.unpack_from(data)
        start = len(data) - ids_size - extras_size
        if start < _BATCH.size:
            raise BrokenFrame(f"{ids_size} and {extras_size} bytes of {len(data)}")
        layout = data[_BATCH.size : start]
        ids: list[str] = []
        if ids_size:
            _, count = _LAYOUT.unpack_from(layout)
            if 4 * count > ids_size:
                raise BrokenFrame(f"{count} ids in {ids_size} bytes")
            lengths = Struct(f"<{count}I").unpack_from(data, start)
            start += 4 * count
            for length in lengths:
                ids.append(data[start : start + length].decode())
                start += length
    except (ValueError, _StructError) as error:
        raise BrokenFrame(f"a batch that cannot be read: {error}") from None
    return BatchMeta(first, layout, ids, data[len(data) - extras_size :])


def unpack_layout(layout: bytes) -> tuple[int, Sequence[int], Sequence[int]]:
    """Form, rows of each request, sizes of blocks; raises `BrokenFrame`."""
    try:
        form, count = _LAYOUT.unpack_from(layout)
        blocks, rest = divmod(len(layout) - _LAYOUT.size - 4 * count, 8)
        if blocks < 0 or rest:
            raise BrokenFrame(f"a layout of {count} requests in {len(layout)} bytes")
        numbers = _struct("", count, blocks).unpack_from(layout, _LAYOUT.size)
    except _StructError as error:
        raise BrokenFrame(f"a layout that cannot be read: {error}") from None
    return form, numbers[:count], numbers[count:]


# The numbers of places, of bytes beside the blocks, and of bytes as if the inputs were in a file.
_PLACES = Struct("<IIQ")
Place = tuple[int, int]  # the number of a block, and the position of a request's input


def pack_places(places: Sequence[Place], beside: bytes, size: int) -> bytes:
    """The start of the meta of EXECUTE for requests whose inputs are in shared memory.

    For each input the place of each request's; number 0 is `beside`, for small ones. `size` is that
    of the data if it were in one file.
    """
    numbers = [number for place in places for number in place]
    packed = Struct(f"<{2 * len(places)}Q").pack(*numbers)
    return _PLACES.pack(len(places), len(beside), size) + packed + beside


def unpack_places(meta: bytes) -> tuple[list[Place], bytes, int, bytes]:
    """The arguments of `pack_places`, and the rest of the meta."""
    count, beside, size = _PLACES.unpack_from(meta)
    numbers = Struct(f"<{2 * count}Q").unpack_from(meta, _PLACES.size)
    start = _PLACES.size + 16 * count
    stop = start + beside
    return list(zip(numbers[::2], numbers[1::2], strict=True)), meta[start:stop], size, meta[stop:]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Encode the meta of DROP_SHARED and KEPT_SHARED."""
    return Struct(f"<{len(numbers)}I").pack(*numbers)


def unpack_numbers(meta: bytes) -> Sequence[int]:
    """Decode the meta of DROP_SHARED and KEPT_SHARED; raises `BrokenFrame`."""
    count, rest = divmod(len(meta), 4)
    if rest:
        raise BrokenFrame(f"numbers in {len(meta)} bytes")
    return Struct(f"<{count}I").unpack(meta)


def result_struct(blocks: int) -> Struct:
    """The meta of RESULT: execution times, the form, and the sizes of `blocks` blocks."""
    return _struct("QQI", 0, blocks)


def unpack_sizes(meta: bytes) -> tuple[int, Sequence[int]]:
    """The form of a result, and the sizes of its blocks; raises `BrokenFrame`."""
    count, rest = divmod(len(meta) - TIMES - 4, 8)
    if count < 0 or rest:
        raise BrokenFrame("a result that cannot be read")
    form, *sizes = _struct("I", 0, count).unpack_from(meta, TIMES)
    return form, sizes


def pack_request(number: int, flag: bool = False) -> bytes:
    """Encode the meta of HOLD, with true to pause, and CANCEL, with true to go on responding."""
    return _REQUEST.pack(number, flag)


def unpack_request(data: bytes) -> tuple[int, bool]:
    """Decode the meta of CANCEL and HOLD; raises `BrokenFrame`."""
    try:
        number, flag = _REQUEST.unpack(data)
    except _StructError as error:
        raise BrokenFrame(f"a request that cannot be read: {error}") from None
    return number, bool(flag)
