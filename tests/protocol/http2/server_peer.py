"""A client connection with recording calls, and hand-written server frames."""

from collections.abc import Sequence
from math import inf

from headrace.core.tensors import Buffer
from headrace.protocol.grpc import TIMING_FIELD, ClientCall, End, ResponseBlock
from headrace.protocol.http2.connection import ClientConnection
from headrace.protocol.http2.headers import header_block
from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    Limits,
)
from tests.protocol.http2.peer import Bench, Frame, build, settings, settings_ack

SENT_FIELDS = [
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b":authority", b"test"),
    (b"te", b"trailers"), (b"content-type", b"application/grpc"),
]  # fmt: skip
HEAD = header_block(SENT_FIELDS)
GOOD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0"), ("grpc-message", "")]


class KeptCall(ClientCall):
    """A call that records its response."""

    __slots__ = ("ends", "messages")

    def __init__(self, deadline: float = inf) -> None:
        super().__init__(deadline)
        self.messages: list[bytes] = []
        self.ends: list[End | None] = []

    def message(self, data: Buffer) -> None:
        assert not self.ends
        self.messages.append(bytes(data))

    def closed(self, end: End | None) -> None:
        self.ends.append(end)

    @property
    def end(self) -> End:
        """Error of the call."""
        [end] = self.ends
        assert end is not None
        return end


class Client(Bench):
    connection: ClientConnection

    def __init__(self, limits: Limits | None = None, greet: bool = True) -> None:
        super().__init__()
        self.connection = ClientConnection(
            ResponseBlock, lambda: None, limits or Limits(), TIMING_FIELD
        )
        self.connection.start()
        if greet:
            assert self.output().startswith(PREFACE)
            self.feed(settings(), settings_ack())
            self.sent()
            assert self.connection.settled

    def call(self, message: bytes = b"", deadline: float = inf, own: bytes = b"") -> KeptCall:
        """Start a unary call."""
        call = KeptCall(deadline)
        call.begin(self.connection)
        self.connection.sender.request(call, HEAD + own, [message], len(message))
        return call

    def stream(self) -> KeptCall:
        """Start a streaming call."""
        call = KeptCall()
        call.begin(self.connection)
        self.connection.sender.head(call, HEAD)
        return call

    def output(self, limit: int = 1 << 30) -> bytes:
        """Bytes sent since the last call."""
        sent = super().output(limit)
        self.connection.streams.written = self.connection.streams.last
        return sent

    def headers_of(self, frame: Frame) -> list[tuple[str, str]]:
        """Fields of a HEADERS frame; HPACK requires calls in order."""
        return [(str(name), str(value)) for name, value in self.decoder.decode(frame.payload)]

    # --- server frames

    def headers(self, number: int, fields: Sequence[tuple[str, str]], ends: bool = False) -> bytes:
        flags = END_HEADERS | (END_STREAM if ends else 0)
        return build(HEADERS, flags, number, self.encoder.encode(fields))

    def response(
        self,
        number: int,
        *messages: bytes,
        trailers: Sequence[tuple[str, str]] = OK,
        head: Sequence[tuple[str, str]] = GOOD,
    ) -> bytes:
        """All frames of a response."""
        data = b"".join([message_of(message) for message in messages])
        body = build(DATA, 0, number, data) if data else b""
        return self.headers(number, head) + body + self.headers(number, trailers, True)


def message_of(data: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(data).to_bytes(4) + data
