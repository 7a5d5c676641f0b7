"""A server connection with recording streams, and hand-written client frames."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import pack, unpack

from hpack import Decoder, Encoder

from headrace.protocol.grpc import OK_FIELDS, CallHead
from headrace.protocol.http2.connection import (
    AnswerTrailers,
    ClientConnection,
    ServerConnection,
)
from headrace.protocol.http2.headers import Headers, header_block
from headrace.protocol.http2.keep_alive import KeepAlive
from headrace.protocol.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PREFACE,
    PRIORITISED,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Limits,
    Setting,
)
from headrace.protocol.http2.streams import Stream

REQUEST = [
    (":method", "POST"), (":scheme", "http"), (":path", "/a/b"), (":authority", "test"),
    ("te", "trailers"), ("content-type", "application/grpc"),
]  # fmt: skip
RESPONSE_HEAD = header_block(
    [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-accept-encoding", b"gzip"),
    ]
)
TRAILERS = AnswerTrailers(header_block(OK_FIELDS) + b"\x00\x04note")


@dataclass(frozen=True, slots=True)
class Frame:
    """A sent frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends(self) -> bool:
        """END_STREAM."""
        return self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM)

    @property
    def word(self) -> int:
        """The payload of RST_STREAM and WINDOW_UPDATE."""
        word: int = unpack(">I", self.payload)[0]
        return word


class Kept(Stream):
    """A stream that records its data; with `echo` it is answered with them at its end."""

    def __init__(self, number: int, server: "Server", head: dict[bytes, bytes], echo: bool) -> None:
        super().__init__(number)
        self.server = server
        self.head = head
        self.echo = echo
        self.data = b""
        self.pieces = 0
        self.filled = 0  # bytes received in place
        self.ended = False
        self.gone: ErrorCode | None = None
        self.room = 0  # number of notifications

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        self.data += bytes(view[start:stop])
        self.pieces += 1

    def make_place(self, nbytes: int) -> None:
        self.place = memoryview(bytearray(nbytes))

    def on_filled(self, nbytes: int) -> None:
        assert self.place is not None
        assert 0 < nbytes <= len(self.place)
        self.data += self.place[:nbytes]
        self.filled += nbytes
        self.place = self.place[nbytes:] if nbytes < len(self.place) else None

    def on_end(self) -> None:
        self.ended = True
        if self.echo:
            self.respond(self.data)

    def on_gone(self, code: ErrorCode) -> None:
        assert self.gone is None
        self.gone = code

    def on_sent(self) -> None:
        self.room += 1

    def respond(self, data: bytes) -> None:
        """Send the head, the data and successful trailers."""
        sender = self.server.connection.sender
        sender.head(self, RESPONSE_HEAD)
        if data:
            sender.data(self, [data], len(data))
        sender.finish(self, OK_FIELDS)
        if self.local_closed:
            self.server.connection.streams.sent_all(self)


@dataclass(frozen=True, slots=True)
class _Head:
    server: "Server"
    fields: dict[bytes, bytes]
    length: int

    @staticmethod
    def kind(head: "_Head", number: int) -> Kept:
        stream = head.server.stream(number, head.server, head.fields, head.server.echo)
        stream.expected = head.length
        head.server.streams[number] = stream
        return stream


class Bench:
    """A connection under test, of either role, with its input and output."""

    connection: ServerConnection | ClientConnection

    def __init__(self) -> None:
        self.decoder = Decoder()
        self.encoder = Encoder()
        self.now = 0.0
        self._rest = b""

    @property
    def rest(self) -> int:
        """Unconsumed bytes, to be passed again."""
        return len(self._rest)

    def feed(self, *pieces: bytes) -> None:
        """Receive bytes after the unconsumed ones."""
        data = self._rest + b"".join(pieces)
        used = self.connection.receive(memoryview(data), len(data), self.now)
        assert 0 <= used <= len(data)
        self._rest = data[used:]

    def output(self, limit: int = 1 << 30) -> bytes:
        """Bytes sent since the last call."""
        sender = self.connection.sender
        sender.awake = False
        self.connection.pump(limit)
        return b"".join(sender.take())

    def sent(self, limit: int = 1 << 30) -> list[Frame]:
        """Frames sent since the last call."""
        return parse(self.output(limit))

    def goaway(self) -> ErrorCode:
        """Error of the GOAWAY frame, if one was sent."""
        [frame] = [frame for frame in self.sent() if frame.kind == GOAWAY]
        assert self.connection.closing
        return ErrorCode(unpack(">I", frame.payload[4:8])[0])


class Server(Bench):
    """A server connection; `streams` holds every stream that was opened."""

    connection: ServerConnection

    def __init__(
        self,
        limits: Limits | None = None,
        echo: bool = False,
        greet: bool = True,
        keep_alive: KeepAlive | None = None,
        stream: type[Kept] = Kept,
        reserve: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__()
        self.echo = echo
        self.stream = stream
        self.streams: dict[int, Kept] = {}
        self.interpreted = 0
        self.connection = ServerConnection(
            self._interpret, RESPONSE_HEAD, TRAILERS, lambda: None, limits or Limits(), keep_alive,
            reserve,
        )  # fmt: skip
        self.connection.start()
        if greet:
            self.feed(PREFACE, settings())
            assert [frame.kind for frame in self.sent()] == [SETTINGS, WINDOW_UPDATE, SETTINGS]

    def _interpret(self, headers: Headers) -> _Head:
        self.interpreted += 1
        return _Head(self, dict(headers), CallHead(headers).content_length)

    def headers(self, frame: Frame) -> list[tuple[str, str]]:
        """Fields of a HEADERS frame; HPACK requires calls in order."""
        assert frame.kind == HEADERS
        assert frame.flags & END_HEADERS
        return [(str(name), str(value)) for name, value in self.decoder.decode(frame.payload)]

    def request(
        self, number: int, data: bytes = b"", fields: Sequence[tuple[str, str]] = REQUEST
    ) -> bytes:
        """All frames of a request."""
        block = self.encoder.encode(fields)
        head = build(HEADERS, END_HEADERS | (0 if data else END_STREAM), number, block)
        return head + (build(DATA, END_STREAM, number, data) if data else b"")

    def reset(self) -> tuple[int, ErrorCode]:
        """The only reset stream and its error; asserts that the connection goes on."""
        [frame] = [frame for frame in self.sent() if frame.kind == RST_STREAM]
        assert not self.connection.closing
        return frame.stream, ErrorCode(frame.word)


def build(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return pack(">I", len(payload))[1:] + bytes((kind, flags)) + pack(">I", stream) + payload


def settings(*values: tuple[Setting | int, int]) -> bytes:
    return build(SETTINGS, 0, 0, b"".join(pack(">HI", name, value) for name, value in values))


def settings_ack() -> bytes:
    return build(SETTINGS, ACK, 0)


def window_update(stream: int, increment: int) -> bytes:
    return build(WINDOW_UPDATE, 0, stream, pack(">I", increment))


def rst(stream: int, code: int = ErrorCode.CANCEL) -> bytes:
    return build(RST_STREAM, 0, stream, pack(">I", code))


def padded(kind: int, flags: int, stream: int, payload: bytes, padding: int) -> bytes:
    """A frame with `padding` bytes after its payload."""
    return build(kind, flags | PADDED, stream, bytes((padding,)) + payload + bytes(padding))


def split_headers(stream: int, block: bytes, *sizes: int, flags: int = 0) -> list[bytes]:
    """HEADERS and CONTINUATION frames of the given sizes; the last takes the rest."""
    frames = []
    kind = HEADERS
    for size in sizes:
        frames.append(build(kind, flags, stream, block[:size]))
        block, kind, flags = block[size:], CONTINUATION, 0
    return [*frames, build(kind, flags | END_HEADERS, stream, block)]


def prioritised(stream: int, block: bytes, flags: int = 0) -> bytes:
    return build(HEADERS, END_HEADERS | PRIORITISED | flags, stream, bytes(5) + block)


def parse(data: bytes) -> list[Frame]:
    """Parse complete frames."""
    frames = []
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 3])
        kind, flags = data[position + 3 : position + 5]
        stream = int.from_bytes(data[position + 5 : position + 9])
        payload = data[position + 9 : position + 9 + length]
        assert len(payload) == length
        frames.append(Frame(kind, flags, stream, payload))
        position += 9 + length
    return frames


@dataclass(slots=True)
class Received:
    """One response as the client received it."""

    headers: list[tuple[str, str]] = field(default_factory=list)
    data: bytes = b""
    trailers: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False
