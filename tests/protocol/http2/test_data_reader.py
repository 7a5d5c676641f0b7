"""DATA received in place: the same bytes and errors as DATA passed on."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.http2.protocol import DATA, END_STREAM, ErrorCode, Limits
from tests.protocol.http2.peer import REQUEST, Server, build, padded, split_headers, window_update

_LIMITS = Limits(stream_window=4000, connection_window=65_535 + 3000)


def open_streams(place: int, limits: Limits = _LIMITS) -> Server:
    """A server with streams 1 and 3 open; stream 1 has a buffer for `place` bytes."""
    server = Server(limits)
    for number in (1, 3):
        server.feed(*split_headers(number, server.encoder.encode(REQUEST)))
    server.sent()
    if place:
        server.streams[1].make_place(place)
    return server


def state(server: Server) -> tuple[object, ...]:
    """State that must be equal for both ways of receiving."""
    data = server.connection.data
    streams = [
        (s.data, s.window, s.consumed, s.ended, s.gone, s.remote_closed)
        for s in server.streams.values()
    ]
    return streams, data.window, data.left, data.skip, server.rest, server.output()


# Stream of a frame, size, padding (-1: none), repetitions.
frames = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 3]), st.integers(0, 900), st.sampled_from([-1, -1, 0, 9]),
        st.sampled_from([1, 1, 1, 7]),
    ),
    max_size=12,
)  # fmt: skip


@given(frames, st.integers(1, 3000), st.lists(st.integers(0, 8000), max_size=8), st.booleans())
def test_receiving_in_place_makes_no_difference(
    sizes: list[tuple[int, int, int, int]], place: int, cuts: list[int], ends: bool
) -> None:
    parts = [
        build(DATA, 0, number, bytes([10 * count + turn]) * size)
        if padding < 0
        else padded(DATA, 0, number, bytes([10 * count + turn]) * size, padding)
        for count, (number, size, padding, times) in enumerate(sizes)
        for turn in range(times)
    ]
    if ends:
        parts.append(build(DATA, END_STREAM, 1, b"end"))
    stream = b"".join(parts)
    # Wide windows: the moment of WINDOW_UPDATE may differ, see the next test.
    placed, plain = open_streams(place, Limits()), open_streams(0, Limits())
    marks = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in pairwise(marks):
        for server in (placed, plain):
            server.feed(stream[begin:end])
        assert state(placed) == state(plain)


@given(frames, st.integers(1, 3000))
def test_every_window_byte_is_returned(sizes: list[tuple[int, int, int, int]], place: int) -> None:
    server = open_streams(place)
    for count, (_, size, *_) in enumerate(sizes):
        server.feed(build(DATA, 0, 1, bytes([count]) * min(size, 300)))
        stream = server.streams[1]
        assert stream.window + stream.consumed == 4000
        assert stream.consumed < 2000 + 300
    assert server.streams[1].gone is None


def test_frames_received_together_are_read_together() -> None:
    server = open_streams(2500)
    server.feed(*[build(DATA, 0, 1, bytes([n]) * 1000) for n in (1, 2)])
    stream = server.streams[1]
    assert (stream.filled, stream.pieces) == (2000, 0)
    server.feed(build(DATA, END_STREAM, 1, b"x" * 600))  # the buffer ends within it
    assert (stream.filled, stream.pieces) == (2000, 1)
    assert len(stream.data) == 2600
    assert stream.ended


def test_many_frames_of_one_size_are_read_as_one() -> None:
    server = open_streams(40_000, Limits())
    payloads = [bytes([n]) * 3000 for n in range(9)]
    others = [build(DATA, 0, 3, b"other"), build(DATA, 0, 1, b"y" * 500)]
    server.feed(*[build(DATA, 0, 1, payload) for payload in payloads], *others)
    stream = server.streams[1]
    assert (stream.filled, stream.pieces) == (27_500, 0)
    assert stream.data == b"".join(payloads) + b"y" * 500
    assert server.streams[3].data == b"other"


def test_a_stream_that_sends_more_than_its_window() -> None:
    server = open_streams(10_000)
    server.streams[1].keeps_window = True  # its bytes are not returned to the window
    server.feed(*[build(DATA, 0, 1, bytes(900)) for _ in range(5)])
    assert server.reset() == (1, ErrorCode.FLOW_CONTROL_ERROR)


def test_a_frame_beyond_the_largest() -> None:
    server = open_streams(100_000, Limits(frame=16_384))
    server.feed(build(DATA, 0, 1, bytes(16_385)))
    assert server.goaway() is ErrorCode.FRAME_SIZE_ERROR


def test_a_large_buffer_is_sent_in_small_frames_without_a_copy() -> None:
    server = Server()
    server.feed(window_update(0, 1 << 20), server.request(1))
    server.feed(window_update(1, 1 << 20))
    server.sent()
    data = bytes(range(256)) * 400
    sender = server.connection.sender
    sender.data(server.streams[1], [b"head", memoryview(data)], len(data) + 4)
    server.connection.pump(1 << 30)
    buffers = sender.take()
    views = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert len(views) == 5  # small pieces are joined
    assert all(view.obj is data for view in views)
    sender.data(server.streams[1], [b"head", memoryview(data)], len(data) + 4)
    frames = server.sent()
    assert [len(frame.payload) for frame in frames] == [16_384] * 6 + [len(data) + 4 - 6 * 16_384]
    assert b"".join(frame.payload for frame in frames) == b"head" + data
