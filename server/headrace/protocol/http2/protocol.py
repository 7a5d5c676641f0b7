"""HTTP/2 constants and frames (RFC 9113), errors, settings, and the limits of one connection.

Each of the known attacks (CVE-2019-9511 to 9518, CVE-2023-44487, CVE-2024-27316, CVE-2025-8671)
sends many frames that are cheap for the peer and expensive for the receiver. Such frames are
charged to a `Budget` that refills with time, and with real work on the connection.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_SIZE = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535  # of a connection and its streams by default, section 6.9.2
DEFAULT_FRAME = 16_384  # the payload that every peer must accept, section 4.2
DEFAULT_TABLE = 4_096  # bytes of HPACK's dynamic table, section 6.5.2

# Frame types, section 6. Plain integers: they are compared for every frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20


class ErrorCode(IntEnum):
    """Error codes, section 7."""

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
    """Settings, section 6.5.2, and RFC 9218's."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6
    NO_RFC7540_PRIORITIES = 9


class ConnectionFailure(Exception):
    """A connection error: the connection cannot go on, section 5.4.1."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailure(Exception):
    """A stream error: the peer broke the protocol within one stream, section 5.4.2."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


_HEAD = Struct(">IBI")  # the length and the type share the first word
_SETTING = Struct(">HI")
_WORD = Struct(">I")
unpack_head = Struct(">HBBBI").unpack_from  # the 24-bit length is in two parts
unpack_word = _WORD.unpack_from
unpack_setting = _SETTING.unpack_from
pack_head = _HEAD.pack


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    pairs = [_SETTING.pack(name, value) for name, value in values.items()]
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def window_update(stream: int, increment: int) -> bytes:
    """Encode WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(increment))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """Encode GOAWAY; `text` is debug data for the peer's log."""
    return frame(GOAWAY, 0, 0, Struct(">II").pack(last_stream, code) + text.encode())


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection. Sizes in bytes, rates per second.

    `streams` is the maximum of open streams. `header_block` bounds a header block as sent,
    `header_list` the decoded one by HPACK's count. `control` limits frames without payload of
    their own: PING, SETTINGS, PRIORITY, empty DATA, small WINDOW_UPDATEs; `resets` limits streams
    that were reset, by either side.
    """

    streams: int = 1024
    stream_window: int = (1 << 20) + (64 << 10)  # a tensor of 1 MiB, and what is around it
    connection_window: int = 64 << 20
    frame: int = 1 << 20
    header_block: int = 16 << 10
    header_list: int = 16 << 10
    control: int = 2_000
    control_rate: int = 500
    resets: int = 1_000
    resets_rate: int = 200


class Budget:
    """A token bucket that refills at `rate` per second up to `size`."""

    __slots__ = ("_at", "_rate", "_size", "_tokens")

    def __init__(self, size: int, rate: int) -> None:
        self._size = size
        self._rate = rate
        self._tokens = float(size)
        self._at = 0.0

    def spend(self, cost: int, now: float, earned: int = 0) -> bool:
        """Take `cost` tokens at the time `now`, in seconds; False if there are too few.

        `earned` tokens are added first, for work done since the last call.
        """
        gained = (now - self._at) * self._rate + earned
        self._at = now
        self._tokens = min(self._tokens + gained, self._size) - cost
        return self._tokens >= 0
