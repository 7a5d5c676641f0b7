"""A gRPC client over a bare socket, on h2, for calls that no library makes."""

import socket
import ssl
import struct
from dataclasses import dataclass, field
from typing import Self

import h2.connection
import h2.events
from h2.config import H2Configuration

REQUEST = [
    (":method", "POST"), (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"), (":authority", "test"),
    ("te", "trailers"), ("content-type", "application/grpc"),
]  # fmt: skip
_SECONDS = 30


@dataclass(slots=True)
class Answer:
    """A response; one without a message has its trailers among the headers."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None


class Http2Socket:
    """A connection for calls, one after the other or at once."""

    def __init__(self, address: str, context: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = (
            plain if context is None else context.wrap_socket(plain, server_hostname=host)
        )
        self._h2 = h2.connection.H2Connection(
            H2Configuration(
                client_side=True, header_encoding="utf-8", validate_outbound_headers=False
            )
        )
        self._answers: dict[int, Answer] = {}
        self._ended: set[int] = set()
        self._h2.initiate_connection()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def most_streams(self) -> int:
        """The most calls at once, as the server has said; known after an answer."""
        return self._h2.remote_settings.max_concurrent_streams

    def call(self, fields: list[tuple[str, str]], *pieces: bytes, end: bool = True) -> Answer:
        """Make a call with these pieces of DATA and wait for its end."""
        return self.answer(self.begin(fields, *pieces, end=end))

    def begin(
        self, fields: list[tuple[str, str]], *pieces: bytes, end: bool = True, whole: bool = False
    ) -> int:
        """Begin a call with these pieces of DATA; its number.

        If it is `whole`, the last frame of its data is its end, as libraries send a unary call, and
        `flush` sends it; otherwise an empty frame is the end, and it is sent at once.
        """
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, fields)
        for place, piece in enumerate(pieces, 1):
            self._h2.send_data(number, piece, end_stream=whole and place == len(pieces))
        if end and not whole:
            self._h2.end_stream(number)
        self._answers[number] = Answer()
        if not whole:
            self.flush()
        return number

    def answer(self, number: int) -> Answer:
        """Wait for the end of a call."""
        while number not in self._ended:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("closed")
            for event in self._h2.receive_data(data):
                self._note(event)
            self.flush()
        self._ended.remove(number)
        return self._answers.pop(number)

    def _note(self, event: h2.events.Event) -> None:
        """Add what an event says to its call's answer."""
        if isinstance(event, h2.events.ResponseReceived):
            answer = self._answers[event.stream_id]
            answer.headers = {str(n): str(v) for n, v in event.headers}
        elif isinstance(event, h2.events.DataReceived):
            self._answers[event.stream_id].data += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            trailers = {str(n): str(v) for n, v in event.headers}
            self._answers[event.stream_id].trailers = trailers
        elif isinstance(event, h2.events.StreamReset):
            self._answers[event.stream_id].reset = int(event.error_code)
            self._ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self._ended.add(event.stream_id)

    def flush(self) -> None:
        """Send the frames of calls that have begun."""
        self._socket.sendall(self._h2.data_to_send())


def prefixed(message: bytes) -> bytes:
    """A message with gRPC's prefix."""
    return struct.pack(">BI", 0, len(message)) + message
