"""Attacks upon HTTP/2, over a socket: the attacker is hung up on, nobody else notices.

All that are known are in `tests/protocol/http2/test_limits.py`; two of them stand for them here.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from hpack import Encoder

from headrace.protocol.http2.protocol import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.faults.conftest import Busy
from tests.faults.requests import busy_message, infer_grpc
from tests.support.http2_socket import REQUEST
from tests.support.raw_clients import open_channel
from tests.support.watching import Resources, admitted, until

CALM = 11  # ENHANCE_YOUR_CALM
_GROWTH = 64 << 20


class Attacker:
    """A connection on which the handshake is done."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.encoder = Encoder()

    def request(self, number: int, message: bytes | None = None) -> bytes:
        """A call of ModelInfer; without a message its client never ends it."""
        head = frame(HEADERS, 4, number, self.encoder.encode(REQUEST))
        if message is None:
            return head
        return head + frame(DATA, 1, number, struct.pack(">BI", 0, len(message)) + message)

    async def next_frame(self) -> tuple[int, int, bytes]:
        """Type, stream and payload of the next frame."""
        head = await self.reader.readexactly(9)
        length = int.from_bytes(head[:3])
        return head[3], int.from_bytes(head[5:]), await self.reader.readexactly(length)

    async def hung_up_on(self) -> int:
        """Read to the end, which has to come; the error of GOAWAY, or -1 for none."""
        code = -1
        try:
            while True:
                kind, _, payload = await self.next_frame()
                if kind == GOAWAY:
                    code = struct.unpack(">I", payload[4:8])[0]
        except (asyncio.IncompleteReadError, ConnectionError):
            return code


@asynccontextmanager
async def attacking(busy: Busy, *settings: tuple[int, int]) -> AsyncIterator[Attacker]:
    """A connection to the server; afterwards the server holds nothing of it."""
    host, _, port = busy.server.grpc.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    values = b"".join(struct.pack(">HI", *pair) for pair in settings)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, values))
    try:
        yield Attacker(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await until(lambda: admitted(busy.server), lambda found: found == (0, 0))


def rapid_reset(attacker: Attacker) -> Iterator[bytes]:
    message = busy_message("busy", 1)
    for number in range(1, 1 << 30, 2):
        yield attacker.request(number, message) + frame(RST_STREAM, 0, number, bytes(4))


def continuation(attacker: Attacker) -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, b"\x82")
    while True:
        yield frame(CONTINUATION, 0, 1, b"\x82" * 10)


@pytest.mark.parametrize("attack", [rapid_reset, continuation])
def test_floods(busy: Busy, attack: Callable[[Attacker], Iterator[bytes]]) -> None:
    async def scenario() -> None:
        before = Resources.of(busy.server.pid).resident
        async with attacking(busy) as attacker, open_channel(busy.server.grpc) as channel:
            ended = asyncio.ensure_future(attacker.hung_up_on())
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
            assert await ended in (CALM, -1)  # the reset of the socket may swallow it
        assert Resources.of(busy.server.pid).resident - before < _GROWTH

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_not_read_from(busy: Busy) -> None:
    """What waits for it is bounded: it gets no further than its own answers let it."""

    async def scenario() -> None:
        server = busy.server
        before = Resources.of(server.pid).resident
        # So long that no more than may be under way at once are read at once.
        request = pb.ModelInferRequest.FromString(busy_message("busy", 1))
        request.id = "x" * 60_000
        message = request.SerializeToString()
        window = struct.pack(">I", (1 << 31) - 1 - 65_535)
        async with attacking(busy, (4, (1 << 31) - 1)) as attacker:
            attacker.writer.write(frame(WINDOW_UPDATE, 0, 0, window))
            unknown = frame(HEADERS, 5, 1, attacker.encoder.encode(REQUEST))
            attacker.writer.write(unknown)
            sent = 0
            for number in range(3, 1 << 22, 2):
                attacker.writer.write(attacker.request(number, message))
                sent += 1
                if number % 11 == 0:
                    try:
                        async with asyncio.timeout(2):
                            await attacker.writer.drain()
                    # It is hung up on if its requests come so fast that too many are refused.
                    except (TimeoutError, ConnectionError):
                        break
            assert sent < 1 << 20
            async with open_channel(server.grpc) as channel:
                assert await infer_grpc(channel, "busy", 8) == 8
            # No more than as many requests as may be under way, and their answers.
            assert Resources.of(server.pid).resident - before < 5 * _GROWTH

    asyncio.run(scenario())
