"""HTTP/2 in numbers: frames, errors and settings of RFC 9113, and the limits of one connection.

Each of the known attacks (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2024-27316, CVE-2025-8671)
sends many frames that are cheap for the peer and make us work. Such frames are paid for from a
`Budget` that comes back with time, and with work that the connection has really brought.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_SIZE = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535  # of a connection and its streams until told otherwise, section 6.9.2
DEFAULT_FRAME = 16_384  # the payload that every peer takes, section 4.2
DEFAULT_TABLE = 4_096  # bytes of HPACK's dynamic table, section 6.5.2

# Frame types, section 6. Plain integers: they are compared for every frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20

# How a field of trailers begins in HPACK's form, up to the length of its value: a literal that
# changes no table, since its value differs from one response to the next.
TIMING_FIELD = b"\x00\x0dserver-timing"


class ErrorCode(IntEnum):
    """Section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(IntEnum):
    """Section 6.5.2, and RFC 9218's."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6
    NO_RFC7540_PRIORITIES = 9


class ConnectionFailure(Exception):
    """The peer broke the protocol such that the connection cannot go on, section 5.4.1."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailure(Exception):
    """The peer broke the protocol within one stream, section 5.4.2."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


_HEAD = Struct(">IBI")  # the length and the type share the first word
_SETTING = Struct(">HI")
_WORD = Struct(">I")
unpack_head = Struct(">HBBBI").unpack_from  # the length is in two parts
unpack_word = _WORD.unpack_from
unpack_setting = _SETTING.unpack_from
pack_head = _HEAD.pack


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    """SETTINGS."""
    pairs = [_SETTING.pack(name, value) for name, value in values.items()]
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def window_update(stream: int, increment: int) -> bytes:
    """WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(increment))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """GOAWAY; `text` is for whoever reads the peer's log."""
    return frame(GOAWAY, 0, 0, Struct(">II").pack(last_stream, code) + text.encode())


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection. Sizes in bytes, rates a second.

    `streams` may be open at once. `header_block` bounds a header block as sent, `header_list` the
    decoded one as HPACK counts it. `control` frames mean nothing by themselves: PING, SETTINGS,
    PRIORITY, empty DATA, small WINDOW_UPDATEs; `resets` are streams opened in vain, whoever ended
    them.
    """

    streams: int = 1024
    stream_window: int = 1 << 20
    connection_window: int = 64 << 20
    frame: int = 1 << 20
    header_block: int = 16 << 10
    header_list: int = 16 << 10
    control: int = 2_000
    control_rate: int = 500
    resets: int = 1_000
    resets_rate: int = 200


class Budget:
    """Tokens that come back at `rate` a second up to `size`."""

    __slots__ = ("_at", "_rate", "_size", "_tokens")

    def __init__(self, size: int, rate: int) -> None:
        self._size = size
        self._rate = rate
        self._tokens = float(size)
        self._at = 0.0

    def spend(self, cost: int, now: float, earned: int = 0) -> bool:
        """Take `cost` tokens at the time `now`, in seconds; False if there are not so many.

        `earned` tokens are added first, for work that was done since the last time.
        """
        gained = (now - self._at) * self._rate + earned
        self._at = now
        self._tokens = min(self._tokens + gained, self._size) - cost
        return self._tokens >= 0
