"""Frames of every type and size through a buffer smaller than the largest of them."""

from itertools import product

import pytest

from headrace.protocol.http2.connection import Http2Connection
from headrace.protocol.http2.protocol import CONTINUATION, GOAWAY, PREFACE, PUSH_PROMISE, Limits
from tests.protocol.http2.peer import Server, build
from tests.protocol.http2.server_peer import Client

BUFFER = 64 << 10  # that of the links is larger, but the largest frame is larger still
LARGEST = Limits().frame
SIZES = (
    0, 1, 4, 5, 6, 8, 9, 16_383, 16_384, 16_385, 16_386, BUFFER - 9, BUFFER, 6 * BUFFER, LARGEST,
    LARGEST + 1, (1 << 24) - 1,
)  # fmt: skip
KINDS = range(CONTINUATION + 4)  # and unknown ones


def receive(connection: Http2Connection, data: bytes) -> None:
    """Feed a connection like a socket does: unconsumed bytes precede the next ones."""
    buffer = memoryview(bytearray(BUFFER))
    kept = 0
    while data and not connection.closing:
        room = BUFFER - kept
        assert room, "a frame is awaited that does not fit"
        piece, data = data[:room], data[room:]
        end = kept + len(piece)
        buffer[kept:end] = piece
        used = connection.receive(buffer, end, 0.0)
        kept = end - used
        buffer[:kept] = bytes(buffer[used:end])


@pytest.mark.parametrize(("kind", "number"), [*product(KINDS, (0, 1, 2))])
@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("side", ["server", "client"])
def test_every_frame_is_accepted_or_ends_the_connection(
    side: str, kind: int, number: int, settled: bool
) -> None:
    for size, flags in product(SIZES, (0, 0x4, 0x2D)):
        peer: Server | Client = Server(greet=settled) if side == "server" else Client(greet=settled)
        peer.output(1 << 30)  # its preface
        given = build(kind, flags, number, bytes(size))[: 2 * BUFFER]
        if side == "server" and not settled:
            given = PREFACE + given
        receive(peer.connection, given)
        ended = [frame for frame in peer.sent() if frame.kind == GOAWAY]
        assert bool(peer.connection.failure) == bool(ended), (size, flags)
        if size > LARGEST or kind == PUSH_PROMISE:
            assert ended, (size, flags)


def test_a_push_promise_is_refused_by_its_frame_header() -> None:
    server = Server()
    server.sent()
    server.feed(build(PUSH_PROMISE, 0, 1, bytes(LARGEST))[:9])
    assert server.connection.failure == "PROTOCOL_ERROR: PUSH_PROMISE"
