"""A client's connection with calls that keep what comes, and a server's frames written by hand."""

from collections.abc import Sequence
from math import inf

from headrace.core.tensors import Buffer
from headrace.protocol.grpc import ClientCall, End, ResponseBlock
from headrace.protocol.http2.connection import ClientConnection
from headrace.protocol.http2.headers import RepeatedFields
from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    Limits,
)
from tests.protocol.http2.peer import Bench, Frame, build, settings, settings_ack

HEAD = RepeatedFields(
    [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b":authority", b"test"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    ]
)  # fmt: skip
GOOD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0"), ("grpc-message", "")]


class KeptCall(ClientCall):
    """A call that keeps what comes."""

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
        """How it has failed."""
        [end] = self.ends
        assert end is not None
        return end


class Client(Bench):
    connection: ClientConnection

    def __init__(self, limits: Limits | None = None, greet: bool = True) -> None:
        super().__init__()
        self.connection = ClientConnection(ResponseBlock, lambda: None, limits or Limits())
        self.connection.start()
        if greet:
            assert self.output().startswith(PREFACE)
            self.feed(settings(), settings_ack())
            self.sent()
            assert self.connection.settled

    def call(self, message: bytes = b"", deadline: float = inf, own: bytes = b"") -> KeptCall:
        """Begin a call with one message."""
        call = KeptCall(deadline)
        call.begin(self.connection)
        self.connection.sender.request(call, HEAD, own, [message], len(message))
        return call

    def stream(self) -> KeptCall:
        """Begin a call with any number of messages."""
        call = KeptCall()
        call.begin(self.connection)
        self.connection.sender.head(call, HEAD)
        return call

    def output(self, limit: int = 1 << 30) -> bytes:
        """The bytes that were sent since the last time."""
        sent = super().output(limit)
        self.connection.streams.written = self.connection.streams.last
        return sent

    def headers_of(self, frame: Frame) -> list[tuple[str, str]]:
        """The fields of a HEADERS frame; frames have to be asked for in order."""
        return [(str(name), str(value)) for name, value in self.decoder.decode(frame.payload)]

    # --- the server's frames

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
        """A whole response."""
        data = b"".join([message_of(message) for message in messages])
        body = build(DATA, 0, number, data) if data else b""
        return self.headers(number, head) + body + self.headers(number, trailers, True)


def message_of(data: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(data).to_bytes(4) + data
