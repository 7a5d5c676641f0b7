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
    """A connection for sequential calls."""

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
        self._h2.initiate_connection()
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, fields: list[tuple[str, str]], *pieces: bytes, end: bool = True) -> Answer:
        """Make a call with these pieces of DATA and wait for its end."""
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, fields)
        for piece in pieces:
            self._h2.send_data(number, piece)
        if end:
            self._h2.end_stream(number)
        self._flush()
        answer = Answer()
        while True:
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("closed")
            for event in self._h2.receive_data(data):
                if getattr(event, "stream_id", None) != number:
                    continue
                if isinstance(event, h2.events.ResponseReceived):
                    answer.headers = {str(n): str(v) for n, v in event.headers}
                elif isinstance(event, h2.events.DataReceived):
                    answer.data += event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, number)
                elif isinstance(event, h2.events.TrailersReceived):
                    answer.trailers = {str(n): str(v) for n, v in event.headers}
                elif isinstance(event, h2.events.StreamEnded):
                    self._flush()
                    return answer
                elif isinstance(event, h2.events.StreamReset):
                    answer.reset = int(event.error_code)
                    return answer
            self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())


def prefixed(message: bytes) -> bytes:
    """A message with gRPC's prefix."""
    return struct.pack(">BI", 0, len(message)) + message
