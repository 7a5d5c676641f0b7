"""DATA received in place: the same bytes and errors as DATA passed on."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.http2.protocol import (
    DATA,
    END_STREAM,
    PING,
    RST_STREAM,
    WINDOW_UPDATE,
    ErrorCode,
    Limits,
)
from headrace.protocol.http2.streams import Memory
from tests.protocol.http2.peer import (
    REQUEST,
    Server,
    build,
    padded,
    rst,
    split_headers,
    window_update,
)

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


class Inbox:
    """A socket's received bytes, which arrive in parts."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.there = 0  # bytes that have arrived
        self.taken = 0

    def read(self, buffers: list[Memory]) -> int:
        """Like `os.readv`."""
        before = self.taken
        for buffer in buffers:
            nbytes = min(len(buffer), self.there - self.taken)
            buffer[:nbytes] = self.data[self.taken : self.taken + nbytes]
            self.taken += nbytes
        return self.taken - before


def feed_scattered(server: Server, inbox: Inbox) -> None:
    """Process what has arrived, by scattered reads while a message is regular."""
    data = server.connection.data
    while inbox.taken < inbox.there:
        taken, head = 0, b""
        regular = data.regular and not server.rest
        place = data.next_place() if regular else None
        if place is not None:
            taken = inbox.read([place])
        else:
            nbytes = min(inbox.there - inbox.taken, 9 if regular else 65_536)
            piece = memoryview(bytearray(nbytes))
            inbox.read([piece])
            if regular:
                head = bytes(piece)
            else:
                server.feed(bytes(piece))
        while taken or head or (data.regular and not server.rest and inbox.taken < inbox.there):
            before = inbox.taken
            rest, drained = server.connection.scatter(inbox.read, 0.0, taken, head)
            server.feed(rest)
            if drained and not (taken or head):
                assert inbox.taken in (before, inbox.there)
            taken, head = 0, b""
            if drained:
                break


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


# Kind of a frame, its stream, size, padding (-1: none), repetitions.
long_frames = st.lists(
    st.tuples(
        st.sampled_from([DATA, DATA, DATA, DATA, PING, RST_STREAM]), st.sampled_from([1, 1, 1, 3]),
        st.sampled_from([4096, 5000, 16_384, 16_384, 300_000, 9, 0]),
        st.sampled_from([-1, -1, -1, 0, 9]),
        st.sampled_from([1, 3, 17]),
    ),
    max_size=6,
)  # fmt: skip


@given(
    long_frames,
    st.sampled_from([60_000, 300_000, 2_000_000]),
    st.lists(st.integers(0, 500_000), max_size=8),
    st.lists(st.integers(0, 40), max_size=8),
    st.booleans(),
)
def test_scattered_reads_make_no_difference(
    sizes: list[tuple[int, int, int, int, int]],
    place: int,
    cuts: list[int],
    frames_before_cuts: list[int],
    ends: bool,
) -> None:
    parts = [build(DATA, 0, 1, b"a" * 16_384)] * 3  # begins a regular message
    for count, (kind, number, size, padding, times) in enumerate(sizes):
        for turn in range(times):
            payload = bytes([(10 * count + turn) % 256]) * size
            if kind == PING:
                parts.append(build(PING, 0, 0, bytes(8)))
            elif kind == RST_STREAM:
                parts += [rst(number)] * (not turn)
            elif padding < 0:
                parts.append(build(DATA, 0, number, payload))
            else:
                parts.append(padded(DATA, 0, number, payload, padding))
    if ends:
        parts.append(build(DATA, END_STREAM, 1, b"end"))
    stream = b"".join(parts)
    scattered, plain = [open_streams(n, Limits(stream_window=1 << 27)) for n in (place, 0)]
    inbox = Inbox(stream)
    between = [len(b"".join(parts[:count])) for count in frames_before_cuts]
    marks = sorted({0, len(stream), *(cut for cut in cuts + between if cut < len(stream))})
    for begin, end in pairwise(marks):
        inbox.there = end
        feed_scattered(scattered, inbox)
        plain.feed(stream[begin:end])
        assert state(scattered) == state(plain)


@pytest.mark.parametrize(
    "following",
    [
        build(DATA, 0, 1, b"b" * 16_384),
        build(DATA, 0, 1, b"b" * 5000),
        build(DATA, END_STREAM, 1, b"b" * 16_384),
        build(DATA, 0, 3, b"b" * 16_384),
        padded(DATA, 0, 1, b"b" * 16_000, 100),
        build(PING, 0, 0, bytes(8)),
        rst(1),
    ],
)
@pytest.mark.parametrize("place", [3 * 16_384 + 100, 4 * 16_384, 300_000])
def test_any_frame_may_follow_those_of_a_regular_message(following: bytes, place: int) -> None:
    scattered, plain = [open_streams(n, Limits(stream_window=1 << 27)) for n in (place, 0)]
    frames = [*[build(DATA, 0, 1, b"a" * 16_384)] * 4, following, build(DATA, 0, 3, b"end")]
    inbox = Inbox(b"".join(frames))
    for frame in (frames[0], b"".join(frames[1:3]), *frames[3:]):
        inbox.there += len(frame)
        feed_scattered(scattered, inbox)
        plain.feed(frame)
        assert state(scattered) == state(plain)


def test_a_scattered_read_takes_whole_frames_to_their_place() -> None:
    server = open_streams(1 << 20, Limits())
    payloads = [bytes([n]) * 16_384 for n in range(40)]
    inbox = Inbox(b"".join(build(DATA, 0, 1, payload) for payload in payloads))
    inbox.there = inbox.taken = 2 * 16_393 + 100
    server.feed(inbox.data[: inbox.taken])
    assert server.connection.data.regular
    inbox.there = len(inbox.data)
    assert server.connection.scatter(inbox.read, 0.0) == (b"", True)
    assert server.streams[1].data == b"".join(payloads)


def test_frames_longer_than_a_read() -> None:
    server = open_streams(4 << 20, Limits(stream_window=8 << 20))
    payloads = [bytes([n]) * 600_000 for n in range(5)]
    inbox = Inbox(b"".join(build(DATA, 0, 1, payload) for payload in payloads))
    inbox.there = len(inbox.data)
    feed_scattered(server, inbox)
    stream = server.streams[1]
    assert (stream.data, stream.pieces) == (b"".join(payloads), 0)


def test_scattered_reads_of_one_turn_are_bounded() -> None:
    server = open_streams(8 << 20, Limits(stream_window=16 << 20))
    inbox = Inbox(build(DATA, 0, 1, bytes(16_384)) * 300)
    inbox.there = 2 * 16_393 + 100
    server.feed(inbox.data[: inbox.there])
    inbox.taken, inbox.there = inbox.there, len(inbox.data)
    assert server.connection.scatter(inbox.read, 0.0) == (b"", False)
    assert inbox.taken <= 2 * 16_393 + 100 + (1 << 20)


def test_a_scattered_read_keeps_to_the_windows() -> None:
    server = open_streams(1 << 20, Limits(stream_window=60_000))
    server.streams[1].keeps_window = True  # its bytes are not returned to the window
    inbox = Inbox(build(DATA, 0, 1, bytes(16_384)) * 5)
    inbox.there = inbox.taken = 2 * 16_393 + 100
    server.feed(inbox.data[: inbox.taken])
    inbox.there = len(inbox.data)
    feed_scattered(server, inbox)
    assert server.reset() == (1, ErrorCode.FLOW_CONTROL_ERROR)


@given(frames, st.integers(1, 3000))
def test_every_window_byte_is_returned(sizes: list[tuple[int, int, int, int]], place: int) -> None:
    server = open_streams(place)
    for count, (_, size, *_) in enumerate(sizes):
        server.feed(build(DATA, 0, 1, bytes([count]) * min(size, 300)))
        stream = server.streams[1]
        assert stream.window + stream.consumed == 4000
        assert stream.consumed < 2000 + 300
    assert server.streams[1].gone is None


def test_an_only_message_that_fits_into_its_window_is_read_without_returning_any() -> None:
    server = open_streams(3700)
    server.streams[1].unary = True
    server.sent()
    for n in range(11):
        server.feed(build(DATA, 0, 1, bytes([n]) * 300))
        assert not server.sent()
    server.feed(build(DATA, 0, 1, b"x" * 400))  # its last bytes
    (update,) = server.sent()
    assert (update.kind, update.stream, update.payload) == (
        WINDOW_UPDATE, 1, (3700).to_bytes(4),
    )  # fmt: skip


def test_padding_does_not_use_up_the_window_of_an_only_message() -> None:
    server = open_streams(3000)
    server.streams[1].unary = True
    for n in range(100):
        server.feed(padded(DATA, 0, 1, bytes([n]) * 30, 255))
    stream = server.streams[1]
    assert (len(stream.data), stream.gone) == (3000, None)


def test_a_shorter_last_frame_is_read_with_those_before_it() -> None:
    server = open_streams(20 * 16_384 + 39, Limits())
    payloads = [*[bytes([n]) * 16_384 for n in range(20)], b"end" * 13]
    inbox = Inbox(b"".join(build(DATA, 0, 1, payload) for payload in payloads))
    inbox.there = inbox.taken = 2 * 16_393 + 100
    server.feed(inbox.data[: inbox.taken])
    inbox.there = len(inbox.data)
    rest, _ = server.connection.scatter(inbox.read, 0.0)
    assert rest == build(DATA, 0, 1, payloads[-1])
    assert inbox.taken == inbox.there
    server.feed(rest)
    assert server.streams[1].data == b"".join(payloads)


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


def test_tiny_frames_of_a_long_message_share_a_turn() -> None:
    server = open_streams(40_000, Limits())
    data = build(DATA, 0, 1, b"x") * 5000
    view = memoryview(data)
    used = server.connection.receive(view, len(view), 0.0, share=10)
    assert server.connection.more
    assert used == server.streams[1].filled * 10 == 400
    assert server.connection.receive(view[used:], len(view) - used, 0.0) == len(view) - used
    assert server.streams[1].data == b"x" * 5000


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
