"""Known HTTP/2 attacks: each ends the stream or the connection early."""

from collections.abc import Callable, Iterator
from itertools import islice, repeat
from struct import pack

import pytest

from headrace.protocol.http2.connection import OWN_STREAMS
from headrace.protocol.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    Budget,
    ErrorCode,
    Limits,
    Setting,
)
from tests.protocol.http2.peer import REQUEST, Server, build, rst, settings, window_update

LIMITS = Limits(streams=10, control=100, control_rate=10, resets=50, resets_rate=10)
Attack = Callable[[Server], Iterator[bytes]]


def request_and(frame: Callable[[int], bytes]) -> Attack:
    """Requests, each followed by a frame."""

    def attack(server: Server) -> Iterator[bytes]:
        for number in range(1, 100_000, 2):
            yield server.request(number, b"x") + frame(number)

    return attack


def repeated(frame: bytes, opened: bool = False) -> Attack:
    """One frame repeatedly, of a stream that is open if `opened`."""

    def attack(server: Server) -> Iterator[bytes]:
        if opened:
            yield build(HEADERS, END_HEADERS, 1, server.encoder.encode(REQUEST))
        yield from repeat(frame)

    return attack


def malformed_requests(server: Server) -> Iterator[bytes]:
    for number in range(1, 100_000, 2):
        yield server.request(number, fields=[(":method", "POST")])


def late_resets(server: Server) -> Iterator[bytes]:
    """RST_STREAM of a closed stream."""
    yield server.request(1) + rst(1)
    yield from repeat(rst(1))


ATTACKS = {
    "CVE-2023-44487: rapid resets": request_and(rst),
    "CVE-2025-8671: resets of our own": request_and(lambda number: window_update(number, 0)),
    "malformed requests": malformed_requests,
    "more than SETTINGS_MAX_CONCURRENT_STREAMS": request_and(lambda number: b""),
    "CVE-2019-9512: pings": repeated(build(PING, 0, 0, bytes(8))),
    "CVE-2019-9515: empty settings": repeated(settings()),
    "acknowledgements of nothing": repeated(build(PING, ACK, 0, bytes(8))),
    "CVE-2019-9513: priorities": repeated(build(PRIORITY, 0, 1, bytes(5))),
    "CVE-2019-9518: empty data": repeated(build(DATA, 0, 1), opened=True),
    "padding alone": repeated(build(DATA, 8, 1, b"\x03\0\0\0"), opened=True),
    "windows of one byte": repeated(window_update(0, 1)),
    "unknown frames": repeated(build(200, 0, 0, b"x")),
    "late resets": late_resets,
}
QUIET = ("rapid resets", "pings", "settings", "byte")
SLOWLY = [name for name in ATTACKS if name.endswith(QUIET)]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_floods_end_the_connection(attack: Attack) -> None:
    server = Server(LIMITS)
    for fed, piece in enumerate(attack(server)):
        server.feed(piece)
        if server.connection.closing:
            break
        assert fed < 500
        assert len(server.connection.streams.open) <= LIMITS.streams
    assert server.goaway() is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("attack", SLOWLY)
def test_the_same_frames_at_a_slower_rate_are_fine(attack: str) -> None:
    server = Server(LIMITS)
    for piece in islice(ATTACKS[attack](server), 1000):
        server.now += 1
        server.feed(piece)
        server.sent()
        assert not server.connection.closing


def test_requests_refill_the_ping_budget() -> None:
    """Clients measure bandwidth by PINGs, more often under load."""
    server = Server(LIMITS, echo=True)
    for number in range(1, 4001, 2):
        server.feed(server.request(number, b"x"), build(PING, 0, 0, bytes(8)), window_update(0, 1))
        server.sent()
        assert not server.connection.closing


def test_answers_refill_the_window_update_budget() -> None:
    server = Server(LIMITS)
    server.feed(server.request(1))
    sender, stream = server.connection.sender, server.streams[1]
    for _ in range(2000):
        sender.data(stream, [b"0123456789"], 10)
        server.sent()
        server.feed(window_update(0, 10), window_update(1, 10))
        assert not server.connection.closing


def test_max_concurrent_streams() -> None:
    server = Server(LIMITS)
    for number in range(1, 23, 2):
        server.feed(server.request(number))
    frames = [frame for frame in server.sent() if frame.kind == RST_STREAM]
    assert [(frame.stream, frame.word) for frame in frames] == [(21, ErrorCode.REFUSED_STREAM)]
    assert len(server.streams) == 10
    server.streams[5].respond(b"")
    server.feed(server.request(23))
    assert server.streams[23].ended


def test_streams_refused_for_those_of_other_connections_are_not_counted() -> None:
    """Their peer has made no error, however many it opens."""
    server = Server(LIMITS, reserve=lambda streams: False)
    for number in range(1, 401, 2):
        server.feed(server.request(number))
    words = [frame.word for frame in server.sent() if frame.kind == RST_STREAM]
    assert words == [ErrorCode.REFUSED_STREAM] * (200 - OWN_STREAMS)
    assert len(server.streams) == OWN_STREAMS
    assert not server.connection.closing


@pytest.mark.parametrize("size", [0, 1, 100])
def test_continuation_flood(size: int) -> None:
    """CVE-2024-27316: a header block that never ends."""
    server = Server(Limits(header_block=2000))
    server.feed(build(HEADERS, 0, 1, b"\x82"))
    for _ in range(40):
        server.feed(build(CONTINUATION, 0, 1, b"\x82" * size))
    assert server.goaway() is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("kind", [HEADERS, CONTINUATION, 4])
def test_large_frames_of_headers_and_settings(kind: int) -> None:
    """The large frame limit is meant for DATA."""
    server = Server()
    if kind == CONTINUATION:
        server.feed(build(HEADERS, 0, 1, b"\x82"))
    stream = 0 if kind == 4 else 1
    server.feed(pack(">I", 60_000)[1:] + bytes((kind, 0)) + pack(">I", stream))
    assert server.goaway() is ErrorCode.ENHANCE_YOUR_CALM
    assert server.rest == 0


def test_hpack_bomb() -> None:
    """A large value is entered once, then referred to by single bytes."""
    server = Server()
    value = b"v" * 3000
    enter = b"\x40\x01a\x7f" + bytes((0x80 | (3000 - 127) & 127, (3000 - 127) >> 7)) + value
    server.feed(build(HEADERS, END_HEADERS | END_STREAM, 1, enter + b"\xbe" * 1000))
    assert server.goaway() is ErrorCode.ENHANCE_YOUR_CALM


def test_many_settings_in_a_frame() -> None:
    """Each would change every stream's window; only the last is applied."""
    server = Server(echo=True)
    values = [(Setting.INITIAL_WINDOW_SIZE, n) for n in range(2000)]
    server.feed(settings(*values, (Setting.INITIAL_WINDOW_SIZE, 7)), server.request(1, b"x" * 20))
    frames = [frame for frame in server.sent() if frame.kind == DATA]
    assert [len(frame.payload) for frame in frames] == [7]


def test_goaway_of_a_client_is_no_error() -> None:
    server = Server(echo=True)
    server.feed(server.request(1, b"x"), build(GOAWAY, 0, 0, pack(">II", 0, 0) + b"bye"))
    assert not server.connection.closing


@pytest.mark.parametrize(("steps", "good"), [
    ([(0.0, 3, 0)], True), ([(0.0, 4, 0)], False), ([(0.0, 3, 0), (0.0, 1, 0)], False),
    ([(0.0, 3, 0), (1.0, 2, 0)], True), ([(0.0, 3, 0), (1.0, 3, 0)], False),
    ([(0.0, 3, 0), (0.0, 1, 1)], True), ([(0.0, 0, 100), (0.0, 4, 0)], False),
    ([(100.0, 4, 0)], False),
])  # fmt: skip
def test_budget_refills_over_time(steps: list[tuple[float, int, int]], good: bool) -> None:
    """A budget of three tokens that regains two per second."""
    budget = Budget(3, 2)
    assert [budget.spend(cost, now, earned) for now, cost, earned in steps][-1] is good
