"""HTTP/2 attacks over a socket: the attacker is disconnected, others are not affected.

The complete list is in `tests/protocol/http2/test_connection_limits.py`.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from headrace.protocol.http2.protocol import (
    CONTINUATION,
    HEADERS,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.conftest import Busy
from tests.faults.requests import busy_message, infer_grpc
from tests.support.http2_socket import REQUEST, prefixed
from tests.support.raw_clients import Http2Caller, open_channel, open_http2
from tests.support.watching import Resources, admitted, until

pytestmark = pytest.mark.slow
CALM = 11  # ENHANCE_YOUR_CALM
_GROWTH = 64 << 20


@asynccontextmanager
async def attacking(busy: Busy, *settings: tuple[int, int]) -> AsyncIterator[Http2Caller]:
    """A connection to the server; afterwards the server holds nothing of it."""
    async with open_http2(busy.server.grpc, *settings) as attacker:
        yield attacker
    await until(lambda: admitted(busy.server), lambda found: found == (0, 0))


def rapid_reset(attacker: Http2Caller) -> Iterator[bytes]:
    message = prefixed(busy_message("busy", 1))
    for number in range(1, 1 << 30, 2):
        yield attacker.request(number, message, end=True) + frame(RST_STREAM, 0, number, bytes(4))


def continuation(attacker: Http2Caller) -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, b"\x82")
    while True:
        yield frame(CONTINUATION, 0, 1, b"\x82" * 10)


def too_many_streams(attacker: Http2Caller) -> Iterator[bytes]:
    for number in range(1, 1 << 30, 2):
        yield attacker.request(number)


@pytest.mark.parametrize("attack", [rapid_reset, continuation, too_many_streams])
async def test_floods(busy: Busy, attack: Callable[[Http2Caller], Iterator[bytes]]) -> None:
    before = Resources.of(busy.server.pid).resident
    async with attacking(busy) as attacker, open_channel(busy.server.grpc) as channel:
        ended = asyncio.ensure_future(attacker.ended())
        for sent, piece in enumerate(attack(attacker)):
            if attacker.writer.is_closing() or ended.done():
                break
            attacker.writer.write(piece)
            if sent % 100 == 0:
                await asyncio.sleep(0)
                try:
                    await attacker.writer.drain()
                except ConnectionError:
                    break
            assert sent < 1_000_000
        assert await infer_grpc(channel, "busy", 5) == 5
        assert await ended in (CALM, None)  # the reset of the socket may discard it
    assert Resources.of(busy.server.pid).resident - before < _GROWTH


async def test_a_client_that_does_not_read_is_not_read_from(busy: Busy) -> None:
    """Its pending output is bounded by its own answers."""
    server = busy.server
    before = Resources.of(server.pid).resident
    # So long that no more than the concurrent ones are read at once.
    request = pb.ModelInferRequest.FromString(busy_message("busy", 1))
    request.id = "x" * 60_000
    message = prefixed(request.SerializeToString())
    window = struct.pack(">I", (1 << 31) - 1 - 65_535)
    async with attacking(busy, (4, (1 << 31) - 1)) as attacker:
        attacker.writer.write(frame(WINDOW_UPDATE, 0, 0, window))
        unknown = frame(HEADERS, 5, 1, attacker.encoder.encode(REQUEST))
        attacker.writer.write(unknown)
        sent = 0
        for number in range(3, 1 << 22, 2):
            attacker.writer.write(attacker.request(number, message, end=True))
            sent += 1
            if number % 11 == 0:
                try:
                    async with asyncio.timeout(2):
                        await attacker.writer.drain()
                # It is disconnected if its requests arrive so fast that too many are refused.
                except (TimeoutError, ConnectionError):
                    break
        assert sent < 1 << 20
        async with open_channel(server.grpc) as channel:
            assert await infer_grpc(channel, "busy", 8) == 8
        # No more than the concurrent requests, and their answers.
        assert Resources.of(server.pid).resident - before < 5 * _GROWTH
