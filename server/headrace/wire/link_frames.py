"""Frames between a front end and the engine: bytes to frames and back, without I/O.

A frame is a header of fixed size, a part `meta` that says what repeats from one frame to the next,
so that a reader can know it by its bytes, and a part `rest` that differs. A frame whose parts are
long has none of them here: they lie in a file without a name that comes along with the bytes.

Either end counts on the other to be of the same version, and on nothing else: what makes no sense
raises `BrokenLink`, after which the link is given up.
"""

from enum import IntEnum, IntFlag, unique
from struct import Struct
from typing import NamedTuple

INLINE = 64 << 10  # bytes of both parts up to which they travel in the frame
MAX_SIZE = 1 << 40  # bytes of a file that a frame may announce


class BrokenLink(Exception):
    """The other end sent what is no frame."""


@unique
class Kind(IntEnum):
    """What a frame is about. Those of one exchange have the same number."""

    # To the engine.
    READY = 1  # the doors are open
    INFER = 2  # a request; flags say of which door
    CANCEL = 3  # nobody waits for the answer to a request, or to a call
    CALL = 4  # something else than an infer request, to be answered whole
    HELD = 6  # what the front end holds, and has refused, and the engine has not
    PAUSE = 7  # the responses to a request are not read for now ...
    GO_ON = 8  # ... or are read again
    UNLOGGED = 9  # so many lines of the front end's log could not be written: the number
    BODY = 10  # the next piece of a call's body, flagged if it is the last
    ANSWERS = 11  # what the front end has answered since the last time
    TAKEN = 12  # a file from the engine is the front end's from now on: its size
    # To the front end.
    SETUP = 16  # what to be: the first frame
    RESPONSE = 17
    FAIL = 18  # the error that ends a request or call
    ANSWER = 19  # to a call
    DRAIN = 20  # admit nothing new, finish, and end
    FINISH = 21  # a request ends without a further response
    DECOUPLED = 22  # a request is for a model that answers as often, and whenever, it likes
    LOGS = 23  # the settings of the log from now on
    HEADERS = 24  # which headers' values requests are to bring along, as parameters
    BACKEND = 25  # which backend answers a request, of a model that has several
    MORE = 26  # the next piece of a call's body is wanted
    READINESS = 27  # whether the server is ready from now on: the number, 1 or 0
    ELSEWHERE = 28  # what other processes hold of what this one may hold: bytes


class Flag(IntFlag):
    """What is special about a frame."""

    SHARED = 1  # its parts are in a file
    FINAL = 2  # the last response to its request, or piece of its body
    REFUSE = 4  # the error is one that kept the request from being queued
    RAW = 8  # the request is the bytes of a model's only input
    HTTP = 16  # the request came by a door with one answer, ...
    UNARY = 32  # ... HTTP or a unary call
    GENERATE = 64  # the bytes of a raw request are flat JSON


_KINDS = {kind.value: kind for kind in Kind}
_HEADER = Struct("<BBxxIIQ")  # kind, flags, number, size of meta, size of rest
HEADER_SIZE = _HEADER.size
_pack = _HEADER.pack
_unpack = _HEADER.unpack_from


class Frame(NamedTuple):
    """A frame as read: `rest` is `buffer` from `start` to `stop`.

    If it is `shared`, there is no buffer yet: a file of `stop` bytes has meta in front.
    """

    kind: Kind
    flags: int
    number: int
    meta: bytes
    buffer: bytes
    start: int
    stop: int
    shared: bool


def header(kind: int, flags: int, number: int, meta_size: int, rest_size: int) -> bytes:
    """What stands before the two parts of a frame."""
    return _pack(kind, flags, number, meta_size, rest_size)


def number_of(head: bytes) -> int:
    """The number of a frame."""
    return int.from_bytes(head[4:8], "little")


def frame(
    kind: int, number: int = 0, meta: bytes = b"", rest: bytes = b"", flags: int = 0
) -> bytes:
    """A whole frame with short parts."""
    return _pack(kind, flags, number, len(meta), len(rest)) + meta + rest


class FrameReader:
    """Takes bytes as they come and gives whole frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with `data`; raises `BrokenLink`."""
        if self._rest:
            data = self._rest + data
        frames: list[Frame] = []
        position, size = 0, len(data)
        while size - position >= HEADER_SIZE:
            number_of_kind, flags, number, meta_size, rest_size = _unpack(data, position)
            kind = _KINDS.get(number_of_kind)
            if kind is None:
                raise BrokenLink(f"a frame of kind {number_of_kind}")
            start = position + HEADER_SIZE
            if flags & 1:
                if meta_size + rest_size > MAX_SIZE:
                    raise BrokenLink(f"a file of {meta_size + rest_size} bytes")
                stop = meta_size + rest_size
                frames.append(Frame(kind, flags, number, b"", b"", meta_size, stop, True))
                position = start
                continue
            if meta_size + rest_size > INLINE:
                raise BrokenLink(f"a frame of {meta_size + rest_size} bytes")
            middle = start + meta_size
            stop = middle + rest_size
            if stop > size:
                break
            frames.append(Frame(kind, flags, number, data[start:middle], data, middle, stop, False))
            position = stop
        self._rest = data[position:]
        return frames
