"""Flow control windows in both directions."""

from headrace.protocol.grpc import OK_FIELDS
from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    WINDOW_UPDATE,
    ErrorCode,
    Limits,
    Setting,
)
from tests.protocol.http2.peer import (
    REQUEST,
    RESPONSE_HEAD,
    Frame,
    Server,
    build,
    rst,
    settings,
    window_update,
)

SMALL = Limits(stream_window=1000, connection_window=70_000)


def sizes(frames: list[Frame], stream: int = 1) -> list[int]:
    """Sizes of a stream's DATA frames."""
    return [len(frame.payload) for frame in frames if (frame.kind, frame.stream) == (DATA, stream)]


def updates(server: Server) -> dict[int, int]:
    """WINDOW_UPDATE increments since the last call, by stream."""
    given: dict[int, int] = {}
    for frame in server.sent():
        if frame.kind == WINDOW_UPDATE:
            given[frame.stream] = given.get(frame.stream, 0) + frame.word
    return given


def opened(limits: Limits) -> Server:
    """A server with stream 1 open."""
    server = Server(limits)
    server.feed(build(HEADERS, END_HEADERS, 1, server.encoder.encode(REQUEST)))
    return server


# --- receiving


def test_window_updates_are_combined() -> None:
    server = opened(SMALL)
    server.feed(build(DATA, 0, 1, bytes(400)))
    assert updates(server) == {}
    server.feed(build(DATA, 0, 1, bytes(200)))
    assert updates(server) == {1: 600}
    for _ in range(69):
        server.feed(build(DATA, 0, 1, bytes(500)))
    assert updates(server) == {0: 35_100, 1: 34_500}

    server.feed(build(DATA, END_STREAM, 1))
    assert server.streams[1].ended


def test_padding_counts_towards_the_window() -> None:
    server = opened(SMALL)
    server.feed(build(DATA, 8, 1, b"\xf0" + bytes(240)) * 3)
    assert updates(server)[1] >= 500
    assert server.streams[1].data == b""


def test_a_stream_that_sends_more_than_its_window() -> None:
    server = opened(SMALL)
    server.streams[1].keeps_window = True
    server.feed(build(DATA, 0, 1, bytes(900)), build(DATA, 0, 1, bytes(101)))
    assert server.reset() == (1, ErrorCode.FLOW_CONTROL_ERROR)
    server = opened(SMALL)
    server.feed(build(DATA, 0, 1, bytes(1001))[:50])  # a partial frame counts as a whole
    assert server.reset() == (1, ErrorCode.FLOW_CONTROL_ERROR)


def test_a_connection_that_sends_more_than_its_window() -> None:
    server = Server(Limits(stream_window=1 << 20, connection_window=100_000, frame=1 << 20))
    for number in (1, 3):
        server.feed(build(HEADERS, END_HEADERS, number, server.encoder.encode(REQUEST)))
    server.feed(build(DATA, 0, 1, bytes(60_000)) + build(DATA, 0, 3, bytes(60_000)))
    assert server.goaway() is ErrorCode.FLOW_CONTROL_ERROR


def test_a_held_stream_keeps_its_window() -> None:
    server = opened(SMALL)
    stream = server.streams[1]
    stream.keeps_window = True
    server.feed(build(DATA, 0, 1, bytes(1000)))
    assert updates(server) == {}
    server.connection.release(stream)
    assert updates(server) == {1: 1000}


def test_the_window_grows_to_the_expected_length() -> None:
    server = opened(SMALL)
    stream = server.streams[1]
    server.connection.data.expect(stream, 50_000)
    assert updates(server) == {1: 49_000}
    for _ in range(49):
        server.feed(build(DATA, 0, 1, bytes(1000)))
    assert 1 not in updates(server)
    server.feed(build(DATA, 0, 1, bytes(1000)))
    assert updates(server)[1] == 1000  # back to normal
    assert stream.window == 1000


def test_data_of_closed_streams_returns_to_the_connection_window() -> None:
    server = opened(SMALL)
    server.feed(rst(1))
    server.feed(build(DATA, 0, 1, bytes(36_000)))
    assert updates(server) == {0: 36_000}


# --- sending


def test_data_waits_for_the_window_of_its_stream() -> None:
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 10)), server.request(1, b"x" * 25))
    frames = server.sent()
    assert sizes(frames) == [10]
    assert not frames[-1].ends
    server.feed(window_update(1, 14))
    assert sizes(server.sent()) == [14]
    server.feed(window_update(1, 1))
    frames = server.sent()
    assert sizes(frames) == [1]
    assert frames[-1].ends
    assert server.connection.streams.open == {}
    assert server.connection.sender.queued == 0


def test_data_waits_for_the_window_of_the_connection() -> None:
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 20)))
    server.feed(server.request(1, bytes(50_000)), server.request(3, bytes(50_000)))
    frames = server.sent()
    assert sum(sizes(frames, 1)) + sum(sizes(frames, 3)) == 65_535
    assert max(sizes(frames, 1)) == 16_384
    assert server.connection.sender.queued == 34_465
    assert not server.connection.sender.can_pump
    server.feed(window_update(0, 1_000_000))
    frames = server.sent()
    assert sum(sizes(frames, 1)) + sum(sizes(frames, 3)) == 34_465
    assert server.connection.streams.open == {}


def test_other_streams_pass_a_blocked_one() -> None:
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 5)))
    server.feed(server.request(1, b"x" * 10), server.request(3, b"y" * 5))
    frames = server.sent()
    assert (sizes(frames, 1), sizes(frames, 3)) == ([5], [5])
    assert [frame.stream for frame in frames if frame.ends] == [3]


def test_a_smaller_initial_window_can_make_windows_negative() -> None:
    """RFC 9113, section 6.9.2."""
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 10)), server.request(1, b"x" * 30))
    assert sizes(server.sent()) == [10]
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 0)), window_update(1, 10))
    assert sizes(server.sent()) == []
    server.feed(window_update(1, 3))
    assert sizes(server.sent()) == [3]
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 100)))
    assert sizes(server.sent()) == [17]


def test_an_initial_window_that_overflows_a_window() -> None:
    server = opened(Limits())
    server.feed(window_update(1, (1 << 31) - 1 - 65_535))
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 65_536)))
    assert server.goaway() is ErrorCode.FLOW_CONTROL_ERROR


def test_queued_output_is_dropped_with_its_stream() -> None:
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 0)), server.request(1, bytes(1000)))
    server.sent()
    assert server.connection.sender.queued == 1000
    server.feed(rst(1))
    assert server.connection.sender.queued == 0
    server.feed(window_update(0, 5000))
    assert server.sent() == []


def test_output_comes_in_bounded_portions() -> None:
    server = Server()
    big = (1 << 31) - 1 - 65_535
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30)), window_update(0, big))
    server.feed(server.request(1))
    stream = server.streams[1]
    server.sent()
    data = bytes(10 << 20)
    sender = server.connection.sender
    sender.head(stream, RESPONSE_HEAD)
    sender.data(stream, [data], len(data))
    assert sum(sizes(server.sent(limit=1 << 20))) == 1 << 20
    assert sender.can_pump
    assert stream.room > 0
    sender.finish(stream, OK_FIELDS)
    frames = server.sent()
    assert sum(sizes(frames)) == 9 << 20
    assert frames[-1].ends


def test_large_buffers_are_not_copied() -> None:
    server = Server()
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30), (Setting.MAX_FRAME_SIZE, 1 << 20)))
    server.feed(window_update(0, 1 << 30), server.request(1))
    server.sent()
    sender, stream = server.connection.sender, server.streams[1]
    data = bytearray(3 << 20)
    sender.data(stream, [b"head", memoryview(data)], len(data) + 4)
    server.connection.pump(1 << 30)
    views = [piece for piece in sender.take() if isinstance(piece, memoryview)]
    assert sum(map(len, views)) >= len(data) - 4
    assert all(view.obj is data for view in views)


def test_streams_take_turns() -> None:
    server = Server(echo=True)
    server.feed(settings((Setting.INITIAL_WINDOW_SIZE, 1 << 30)), window_update(0, 1 << 30))
    server.feed(*(server.request(number, bytes(600_000)) for number in (1, 3)))
    order = [frame.stream for frame in server.sent() if frame.kind == DATA]
    assert order.index(3) < len(order) // 3


def test_a_table_that_shrinks_and_grows() -> None:
    server = Server(echo=True)
    for number, size in ((1, 4096), (3, 0), (5, 30), (7, 200), (9, 4096), (11, 4096)):
        server.feed(settings((Setting.HEADER_TABLE_SIZE, size)))
        server.decoder.max_allowed_table_size = size
        server.feed(server.request(number, b"x"))
        heads = [frame for frame in server.sent() if frame.kind == HEADERS]
        assert server.headers(heads[0])[1] == ("content-type", "application/grpc")
        assert server.headers(heads[1]) == [("grpc-status", "0")]
        assert server.decoder.header_table_size <= size


def test_a_table_that_shrinks_between_two_answers() -> None:
    """RFC 7541, section 4.2: the smallest size in between is signalled."""
    server = Server(echo=True)
    server.feed(server.request(1, b"x"))
    for frame in server.sent():
        if frame.kind == HEADERS:
            server.headers(frame)
    server.feed(
        settings((Setting.HEADER_TABLE_SIZE, 0)), settings((Setting.HEADER_TABLE_SIZE, 4096))
    )
    server.feed(server.request(3, b"x"))
    heads = [frame for frame in server.sent() if frame.kind == HEADERS]
    assert heads[0].payload.startswith(b"\x20\x88")
    assert server.headers(heads[0])[0] == (":status", "200")
    assert server.headers(heads[1]) == [("grpc-status", "0")]
