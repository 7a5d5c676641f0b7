"""Server connections: frames and streams by sections of RFC 9113."""

from struct import pack

import pytest

from headrace.protocol.grpc import OK_FIELDS
from headrace.protocol.http2.headers import header_block
from headrace.protocol.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Limits,
    Setting,
)
from tests.protocol.http2.peer import (
    REQUEST,
    RESPONSE_HEAD,
    Kept,
    Server,
    build,
    padded,
    prioritised,
    rst,
    settings,
    settings_ack,
    split_headers,
    window_update,
)

BIG = (1 << 31) - 1


def started() -> Server:
    """A server with stream 1 open and half of its request received."""
    server = Server()
    block = server.encoder.encode(REQUEST)
    server.feed(build(HEADERS, END_HEADERS, 1, block), build(DATA, 0, 1, b"ab"))
    assert server.streams[1].data == b"ab"
    assert server.sent() == []
    return server


@pytest.fixture
def server() -> Server:
    return Server()


# --- 3.4 preface


def test_the_server_sends_settings_first() -> None:
    server = Server(greet=False)
    first, second = server.sent()
    assert (first.kind, first.flags, first.stream) == (SETTINGS, 0, 0)
    assert (second.kind, second.stream) == (WINDOW_UPDATE, 0)
    server.feed(b"P")  # of which more may follow
    assert server.sent() == []
    assert not server.connection.closing


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\n\r\n", PREFACE[:-1] + b"x", b"\x16\x03\x01",
    # SETTINGS come first.
    PREFACE + build(PING, 0, 0, bytes(8)), PREFACE + build(HEADERS, END_HEADERS, 1, b"\x82"),
    PREFACE + build(DATA, 0, 1, b"x"), PREFACE + build(99, 0, 0, b"x"), PREFACE + settings_ack(),
    PREFACE + build(GOAWAY, 0, 0, bytes(8)),
])  # fmt: skip
def test_bytes_that_are_not_http2(data: bytes) -> None:
    server = Server(greet=False)
    server.sent()
    server.feed(data)
    assert server.goaway() is ErrorCode.PROTOCOL_ERROR


def test_nothing_is_read_after_an_error(server: Server) -> None:
    server.feed(build(DATA, 0, 1, b"x"))
    assert server.goaway() is ErrorCode.PROTOCOL_ERROR
    server.feed(server.request(1))
    assert server.streams == {}
    assert server.sent() == []


# --- 4 frames


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_bytes_come_in_pieces_of_any_size(size: int) -> None:
    server = Server(echo=True, greet=False)
    data = PREFACE + settings() + server.request(1, b"hello" * 20) + server.request(3, b"!")
    for start in range(0, len(data), size):
        server.feed(data[start : start + size])
    assert server.streams[1].data == b"hello" * 20
    assert server.streams[3].data == b"!"
    assert server.rest == 0
    assert [frame.payload for frame in server.sent() if frame.kind == DATA] == [b"hello" * 20, b"!"]


def test_errors_are_found_in_the_head_of_a_frame() -> None:
    for frame in (build(DATA, 0, 1, bytes(16_385)), build(PING, 0, 0, bytes(1000))):
        server = Server(Limits(frame=16_384))
        server.feed(frame[:9])
        assert server.goaway() is ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(("frame", "code"), [
    (build(PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    (build(PING, 0, 0, bytes(9)), ErrorCode.FRAME_SIZE_ERROR),
    (build(PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    (build(RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
    (build(RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    (build(RST_STREAM, 0, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    (build(RST_STREAM, 0, 2, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    (build(PRIORITY, 0, 3, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    (build(PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    (build(WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
    (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    (window_update(3, 10), ErrorCode.PROTOCOL_ERROR),
    (window_update(0, BIG), ErrorCode.FLOW_CONTROL_ERROR),
    (build(SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    (build(SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
    (build(SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    (settings((Setting.ENABLE_PUSH, 2)), ErrorCode.PROTOCOL_ERROR),
    (settings((Setting.INITIAL_WINDOW_SIZE, 1 << 31)), ErrorCode.FLOW_CONTROL_ERROR),
    (settings((Setting.MAX_FRAME_SIZE, 16_383)), ErrorCode.PROTOCOL_ERROR),
    (settings((Setting.MAX_FRAME_SIZE, 1 << 24)), ErrorCode.PROTOCOL_ERROR),
    (build(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    (build(CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
    (build(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 3, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, 0, 2, b"x"), ErrorCode.PROTOCOL_ERROR),
    (build(DATA, PADDED, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
    (build(DATA, PADDED, 1, b"\x01"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 0, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS | PADDED, 3, b""), ErrorCode.FRAME_SIZE_ERROR),
    (build(HEADERS, END_HEADERS | PADDED, 3, b"\x05\x82"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS | PRIORITISED, 3, b"\0\0"), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, END_HEADERS, 3, b"\x80"), ErrorCode.COMPRESSION_ERROR),
    (build(HEADERS, END_HEADERS, 3, b"\x40"), ErrorCode.COMPRESSION_ERROR),
    (build(HEADERS, END_HEADERS, 3, b"\x20\x20\x20\x82"), ErrorCode.COMPRESSION_ERROR),
    (build(HEADERS, 0, 3, b"\x82") + build(PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    (build(HEADERS, 0, 3, b"\x82") + build(CONTINUATION, END_HEADERS, 5, b""),
     ErrorCode.PROTOCOL_ERROR),
])  # fmt: skip
def test_errors_of_the_connection(frame: bytes, code: ErrorCode) -> None:
    server = started()
    server.feed(frame)
    assert server.goaway() is code
    assert server.streams[1].gone is ErrorCode.CANCEL


def test_unknown_frames_and_priorities_are_ignored() -> None:
    server = Server(echo=True)
    server.feed(build(0xFA, 0xFF, 7, b"x" * 50_000)[:20_000])
    assert server.rest == 0
    server.feed(b"x" * (50_009 - 20_000), build(0xFB, 0, 0), server.request(1))
    assert server.streams[1].ended
    server.feed(build(PRIORITY, 0, 9, bytes(5)))
    server.feed(prioritised(3, server.encoder.encode(REQUEST), END_STREAM))
    assert server.streams[3].ended


def test_settings_and_pings_are_answered(server: Server) -> None:
    server.feed(settings((77, 1), (Setting.MAX_FRAME_SIZE, 20_000)), build(PING, 0, 0, b"12345678"))
    acknowledged, answered = server.sent()
    assert (acknowledged.kind, acknowledged.flags, acknowledged.payload) == (SETTINGS, ACK, b"")
    assert (answered.kind, answered.flags, answered.payload) == (PING, ACK, b"12345678")
    server.feed(settings_ack(), build(PING, ACK, 0, bytes(8)))
    assert server.sent() == []


# --- 5 streams


def test_a_complete_request_and_its_answer() -> None:
    server = Server(echo=True)
    server.feed(server.request(1, b"data"))
    head, data, trailers = server.sent()
    assert server.headers(head) == [
        (":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "gzip"),
    ]  # fmt: skip
    assert data.payload == b"data"
    assert trailers.ends
    assert server.headers(trailers) == [("grpc-status", "0")]
    assert server.connection.streams.open == {}


def test_an_answer_in_one_step_is_like_one_in_several() -> None:
    server = Server()
    server.feed(server.request(1, b"x"))
    assert server.connection.answer(server.streams[1], [b"da", b"ta"], b"n" * 126)
    head, data, trailers = server.sent()
    assert (head.payload, data.payload) == (RESPONSE_HEAD, b"\0\0\0\0\4data")
    assert trailers.ends
    assert server.headers(head)[0] == (":status", "200")
    assert server.headers(trailers) == [("grpc-status", "0"), ("note", "n" * 126)]
    assert server.connection.streams.open == {}


def test_response_headers_are_the_same_bytes_each_time() -> None:
    server = Server(echo=True)
    for number in (1, 3, 5):
        server.feed(server.request(number, b"x"))
        frames = server.sent()
        assert server.headers(frames[0])[0] == (":status", "200")
        assert server.headers(frames[2]) == [("grpc-status", "0")]
        assert (frames[0].payload, frames[2].payload) == (RESPONSE_HEAD, header_block(OK_FIELDS))


def test_a_stream_that_the_peer_has_reset() -> None:
    server = started()
    server.feed(rst(1, ErrorCode.REFUSED_STREAM))
    assert server.streams[1].gone is ErrorCode.REFUSED_STREAM
    server.feed(rst(1), window_update(1, 5), build(PRIORITY, 0, 1, bytes(5)))
    assert server.sent() == []
    server = started()
    server.feed(rst(1, 0xDEAD))  # unknown
    assert server.streams[1].gone is ErrorCode.CANCEL


@pytest.mark.parametrize(("frame", "code"), [
    (window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    (window_update(1, BIG), ErrorCode.FLOW_CONTROL_ERROR),
])  # fmt: skip
def test_errors_of_a_stream(frame: bytes, code: ErrorCode) -> None:
    server = started()
    server.feed(frame)
    assert server.reset() == (1, code)
    assert server.streams[1].gone is code
    # Frames sent before the peer knew of the end are no error.
    server.feed(build(DATA, 0, 1, b"late"), build(HEADERS, END_HEADERS | END_STREAM, 1, b"\x82"))
    assert server.sent() == []
    assert server.streams[1].data == b"ab"


@pytest.mark.parametrize("echo", [False, True])
def test_data_after_the_end(echo: bool) -> None:
    """The stream is already closed by its response."""
    server = Server(echo=echo)
    server.feed(server.request(1, b"x"))
    server.sent()
    server.feed(build(DATA, 0, 1, b"more"))
    assert server.reset() == (1, ErrorCode.STREAM_CLOSED)
    assert server.streams[1].data == b"x"


def test_stream_numbers_only_grow() -> None:
    for first, second in ((1, 1), (5, 3)):
        server = Server(echo=True)
        server.feed(server.request(first, b"x"))
        server.sent()
        server.feed(server.request(second, b"x"))
        assert server.goaway() is ErrorCode.STREAM_CLOSED


def test_an_answer_before_the_request_has_ended() -> None:
    """RFC 9113, section 8.1: the rest of the request is not needed."""
    server = started()
    server.streams[1].respond(b"")
    frames = server.sent()
    assert [frame.kind for frame in frames] == [HEADERS, HEADERS, RST_STREAM]
    assert frames[2].word == ErrorCode.NO_ERROR
    assert server.connection.streams.open == {}
    server.feed(build(DATA, END_STREAM, 1, b"rest"))
    assert server.sent() == []


def test_a_lost_connection_ends_its_streams() -> None:
    server = started()
    server.feed(server.request(3))
    server.connection.lost()
    assert [stream.gone for stream in server.streams.values()] == [ErrorCode.CANCEL] * 2
    assert server.connection.closing


# --- 6.8 drain


def test_drain() -> None:
    server = started()
    server.connection.drain()
    first, ping = server.sent()
    assert (first.kind, first.payload) == (GOAWAY, pack(">II", BIG, ErrorCode.NO_ERROR))
    server.feed(server.request(3, b"in time"))
    server.feed(build(PING, ACK, 0, ping.payload))
    [last] = server.sent()
    assert (last.kind, last.payload) == (GOAWAY, pack(">II", 3, ErrorCode.NO_ERROR))
    server.feed(server.request(5, b"late"), window_update(5, 1), rst(5))
    assert 5 not in server.streams
    server.feed(build(DATA, END_STREAM, 1))
    for number in (1, 3):
        assert not server.connection.closing
        server.streams[number].respond(b"x")
        server.sent()
    assert server.connection.closing


def test_a_drain_without_streams_ends_at_once(server: Server) -> None:
    server.connection.drain()
    assert not server.connection.closing
    server.connection.finish_drain()
    assert server.connection.closing


# --- header blocks


@pytest.mark.parametrize("sizes", [(0,), (5,), (1, 1, 1), (0, 0, 10)])
def test_continuation(sizes: tuple[int, ...], server: Server) -> None:
    block = server.encoder.encode(REQUEST)
    for piece in split_headers(1, block, *sizes, flags=END_STREAM):
        server.feed(piece)
    assert server.streams[1].ended
    assert server.streams[1].head[b":path"] == b"/a/b"
    block = server.encoder.encode(REQUEST)
    server.feed(padded(HEADERS, END_HEADERS | END_STREAM, 3, block, 100))
    assert server.streams[3].ended


@pytest.mark.parametrize("padding", [0, 1, 255])
@pytest.mark.parametrize("size", [1, 3, 500])
def test_padded_data(padding: int, size: int, server: Server) -> None:
    head = build(HEADERS, END_HEADERS, 1, server.encoder.encode(REQUEST))
    data = head + padded(DATA, 0, 1, b"abc", padding) + padded(DATA, END_STREAM, 1, b"", padding)
    for start in range(0, len(data), size):
        server.feed(data[start : start + size])
    assert server.streams[1].data == b"abc"
    assert server.streams[1].ended
    assert server.connection.streams.open == {1: server.streams[1]}


def test_trailers_end_a_request() -> None:
    server = started()
    block = server.encoder.encode([("x-checksum", "1")])
    server.feed(build(HEADERS, END_HEADERS | END_STREAM, 1, block))
    assert server.streams[1].ended


@pytest.mark.parametrize(("fields", "flags"), [
    ([("x", "1")], END_HEADERS), ([(":path", "/")], END_HEADERS | END_STREAM),
    ([("X-Upper", "1")], END_HEADERS | END_STREAM),
])  # fmt: skip
def test_trailers_that_are_malformed(fields: list[tuple[str, str]], flags: int) -> None:
    server = started()
    server.feed(build(HEADERS, flags, 1, server.encoder.encode(fields)))
    assert server.reset() == (1, ErrorCode.PROTOCOL_ERROR)


def without(name: str) -> list[tuple[str, str]]:
    """A request without one of its fields."""
    return [pair for pair in REQUEST if pair[0] != name]


@pytest.mark.parametrize(
    "fields",
    [
        without(":method"), without(":path"), without(":scheme"),
        [*REQUEST, (":path", "/again")], [("te", "trailers"), *without("te")],
        [(":status", "200"), *REQUEST], [(":method", "POST"), *REQUEST],
        [*REQUEST, ("Upper", "x")], [*REQUEST, ("with space", "x")], [*REQUEST, ("", "x")],
        [*REQUEST, ("connection", "close")], [*REQUEST, ("transfer-encoding", "chunked")],
        [*REQUEST, ("upgrade", "h2c")], [*without("te"), ("te", "gzip")],
        [*REQUEST, ("x", "a\r\nb")], [*REQUEST, ("x", "a\0b")],
        [*without(":path"), (":path", "/ ")], [(":path", " /"), *without(":path")],
    ],
)  # fmt: skip
def test_malformed_requests(fields: list[tuple[str, str]], server: Server) -> None:
    """RFC 9113, section 8.1.1: a stream error; the next request is served."""
    server.feed(server.request(1, fields=fields))
    assert server.reset() == (1, ErrorCode.PROTOCOL_ERROR)
    assert server.streams == {}
    server.feed(server.request(3))
    assert server.streams[3].ended


def test_whitespace_around_a_value(server: Server) -> None:
    for number, value in ((1, " a"), (3, "a\t"), (5, " "), (7, "  a b ")):
        server.feed(server.request(number, fields=[*REQUEST, ("x", value)]))
        assert server.streams[number].ended


@pytest.mark.parametrize(
    ("length", "data", "good"),
    [("3", b"abc", True), ("2", b"abc", False), ("4", b"abc", False), ("1", b"", False)],
)
def test_content_length(length: str, data: bytes, good: bool, server: Server) -> None:
    server.feed(server.request(1, data, [*REQUEST, ("content-length", length)]))
    if good:
        assert server.streams[1].ended
    else:
        assert server.reset() == (1, ErrorCode.PROTOCOL_ERROR)
        assert not server.streams[1].ended


def test_blocks_that_repeat_are_decoded_once(server: Server) -> None:
    for number in range(1, 20, 2):
        server.feed(server.request(number))
    # The first request adds its fields to the table, the second refers to them.
    assert server.interpreted == 2
    server.feed(server.request(21, fields=[*REQUEST, ("x-new", "1")]))
    server.feed(server.request(23))
    assert server.interpreted == 4
    assert server.streams[23].head == server.streams[1].head
    assert server.streams[21].head[b"x-new"] == b"1"


def test_a_remembered_block_means_something_else_once_the_table_has_changed(server: Server) -> None:
    block = server.encoder.encode(REQUEST)
    server.feed(build(HEADERS, END_HEADERS | END_STREAM, 1, block))
    refers = b"\x83\x86\xbe\xbf"  # POST, http, and the two last entries of the table
    for number, path in ((3, "/one"), (7, "/two")):
        names = [(":authority", "test"), (":path", path)]
        entering = b"\x83\x86" + b"".join(
            b"\x40" + bytes((len(n),)) + n.encode() + bytes((len(v),)) + v.encode()
            for n, v in names
        )
        server.feed(build(HEADERS, END_HEADERS | END_STREAM, number, entering))
        server.feed(build(HEADERS, END_HEADERS | END_STREAM, number + 2, refers))
        assert server.streams[number + 2].head[b":path"] == path.encode()


class _Whole(Kept):
    """Receives the whole request in one piece."""

    def take_last(self, view: memoryview, start: int, stop: int) -> bool:
        self.data, self.remote_closed = bytes(view[start:stop]), True
        self.respond(self.data)
        return True


@pytest.mark.parametrize("cut", [0, 1, 9, 14, 15])
def test_a_complete_request_is_delivered_in_one_piece(cut: int) -> None:
    """Only if the last frame is complete; a partial frame is delivered as usual."""
    server = Server(echo=True, stream=_Whole)
    request = server.request(1, b"hello")
    end = len(request) - cut
    server.feed(request[:end])
    server.feed(request[end:])
    stream = server.streams[1]
    assert stream.data == b"hello"
    assert stream.ended is (0 < cut < 6)
    assert [frame.kind for frame in server.sent()] == [HEADERS, DATA, HEADERS]
    assert server.connection.streams.open == {}
