"""The load generator's gRPC against h2 as the server."""

import struct
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hpack import Decoder, Encoder

from benchmarks.header_blocks import changes_table
from benchmarks.http2 import GrpcWire, grpc_message
from benchmarks.wire import Answer, ProtocolError

PATH = "/inference.GRPCInferenceService/ModelInfer"
FIELDS = [(":status", "200"), ("content-type", "application/grpc")]


class Server:
    """An echo server with windows as small as `window`, which it updates as it reads."""

    def __init__(self, window: int = 65_535) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.received: dict[int, bytes] = {}
        self.headers: list[dict[str, str]] = []
        self.status = "0"

    def take(self, data: bytes) -> bytes:
        """The server's bytes after `data`."""
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    self.headers.append({str(k): str(v) for k, v in event.headers})
                    self.received[event.stream_id] = b""
                case h2.events.DataReceived():
                    self.received[event.stream_id] += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    self.answer(event.stream_id)
        return self.h2.data_to_send()

    def answer(self, stream: int) -> None:
        """Echo received messages."""
        body = self.received[stream]
        self.h2.send_headers(stream, FIELDS)
        for begin in range(0, len(body), 16_384):
            self.h2.send_data(stream, body[begin : begin + 16_384])
        self.h2.send_headers(stream, [("grpc-status", self.status)], end_stream=True)


def wire(calls: int = 1) -> GrpcWire:
    return GrpcWire("localhost:1", PATH, calls)


def exchange(client: GrpcWire, server: Server, data: bytes, size: int = 1 << 20) -> list[Answer]:
    """Exchange bytes until both sides are idle; the client gets pieces of `size`."""
    answers: list[Answer] = []
    while data:
        said = server.take(data)
        data = b""
        for begin in range(0, len(said), size):
            complete, reply = client.receive(said[begin : begin + size])
            answers += complete
            data += reply
    return answers


@pytest.mark.parametrize("size", [1, 13, 1 << 20])
def test_sequential_calls(size: int) -> None:
    client, server = wire(), Server()
    before = client.ready
    assert exchange(client, server, client.start(), size) == []
    assert (before, client.ready) == (False, True)
    for number in range(4):
        message = b"message %d" % number
        token, data = client.send(grpc_message(message))
        assert exchange(client, server, data, size) == [Answer(token, "", message)]
    assert len(server.headers) == 4
    assert all(headers == server.headers[0] for headers in server.headers)
    assert server.headers[0][":path"] == PATH
    assert server.headers[0]["te"] == "trailers"


def test_concurrent_calls_on_one_connection() -> None:
    client, server = wire(8), Server()
    exchange(client, server, client.start())
    sent = {}
    data = b""
    for number in range(8):
        message = bytes([number]) * 10
        token, begun = client.send(grpc_message(message))
        sent[token] = message
        data += begun
    answers = exchange(client, server, data)
    assert {answer.token: answer.body for answer in answers} == sent


@pytest.mark.parametrize("window", [100, 20_000, 65_535])
def test_large_messages_wait_for_the_window(window: int) -> None:
    client, server = wire(2), Server(window)
    exchange(client, server, client.start())
    large, small = bytes(range(256)) * 400, b"small"
    first, data = client.send(grpc_message(large))
    second, more = client.send(grpc_message(small))
    answers = exchange(client, server, data + more)
    assert {answer.token: answer.body for answer in answers} == {first: large, second: small}


def test_ping_is_answered() -> None:
    client, server = wire(), Server()
    exchange(client, server, client.start())
    server.h2.ping(b"12345678")
    _, reply = client.receive(server.h2.data_to_send())
    events = server.h2.receive_data(reply)
    assert [type(event) for event in events] == [h2.events.PingAckReceived]


def test_calls_that_fail() -> None:
    client, server = wire(), Server()
    server.status = "14"
    exchange(client, server, client.start())
    (answer,) = exchange(client, server, client.send(grpc_message(b"x"))[1])
    assert answer.error.startswith("gRPC 14 (HTTP 200)")
    token, data = client.send(grpc_message(b"x"))
    server.answer = lambda stream: server.h2.reset_stream(stream, 8)  # type: ignore[method-assign]
    assert exchange(client, server, data) == [Answer(token, "stream reset, code 8", b"")]


def close(server: Server) -> None:
    server.h2.close_connection(2)


def limit_streams(server: Server) -> None:
    server.h2.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})


@pytest.mark.parametrize("action", [close, limit_streams])
def test_frames_that_end_a_connection(action: Callable[[Server], None]) -> None:
    client, server = wire(2), Server()
    exchange(client, server, client.start())
    action(server)
    with pytest.raises(ProtocolError):
        client.receive(server.h2.data_to_send())


@pytest.mark.parametrize("frame", [
    struct.pack(">BHBBI", 0, 4, 9, 4, 1) + b"\x88" * 4,  # CONTINUATION of nothing
    struct.pack(">BHBBI", 0, 1, 1, 4, 1) + b"\x7f",  # a header block that is cut off
    struct.pack(">BHBBI", 0, 2, 0, 8, 1) + b"\x05x",  # more padding than content
    struct.pack(">BHBBI", 0, 3, 8, 0, 0) + b"abc",  # WINDOW_UPDATE of three bytes
])  # fmt: skip
def test_refused_frames(frame: bytes) -> None:
    client = wire()
    client.send(grpc_message(b"x"))
    with pytest.raises(ProtocolError):
        client.receive(frame)


def test_header_blocks_that_change_the_table() -> None:
    encoder, decoder = Encoder(), Decoder()
    first, second = encoder.encode(FIELDS), encoder.encode(FIELDS)
    assert changes_table(first)
    assert not changes_table(second)
    literal = b"\x88" + b"\x00\x05abcde\x03xyz" + b"\x0f\x10\x02ab"
    assert not changes_table(literal)
    assert ("abcde", "xyz") in [(str(k), str(v)) for k, v in decoder.decode(literal)]
    assert changes_table(literal + b"\x20")
