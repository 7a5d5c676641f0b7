"""The socket of an HTTP/2 connection, on both event loops."""

import asyncio
import socket
from random import Random
from typing import Any

import pytest

from headrace.protocol.http2.asyncio_protocol import Http2Protocol
from headrace.protocol.http2.protocol import DATA, END_STREAM, PING, PREFACE, Limits
from tests.doors.fakes import Transport, until
from tests.protocol.http2.peer import REQUEST, Kept, Server, build, settings, split_headers


@pytest.fixture(
    params=[pytest.param(("asyncio", {"use_uvloop": uvloop}), id=str(uvloop)) for uvloop in (0, 1)]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


class Long(Kept):
    """A stream; the first one has a buffer for a long message."""

    def __init__(self, number: int, server: Server, head: dict[bytes, bytes], echo: bool) -> None:
        super().__init__(number, server, head, echo)
        if number == 1:
            self.make_place(3 << 20)


class Held(Http2Protocol):
    """A protocol that notes the memory it takes besides the shared buffer."""

    held = 0

    def hold(self, nbytes: int) -> None:
        self.held += nbytes


class Reading(Transport):
    """A transport whose socket can be read from."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default


def _opening(server: Server) -> bytes:
    """The client's preface, and heads of the streams 1 and 3."""
    block = server.encoder.encode(REQUEST)
    heads = [*split_headers(1, block), *split_headers(3, server.encoder.encode(REQUEST))]
    return b"".join([PREFACE, settings(), *heads])


async def _exchange(frames: list[bytes], random: Random) -> Server:
    """Send frames, in pieces of random sizes, to a connection; returns once all are processed."""
    loop = asyncio.get_running_loop()
    server = Server(Limits(stream_window=1 << 24), greet=False, stream=Long)
    buffer = memoryview(bytearray(65_536))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await loop.create_connection(lambda: Http2Protocol(server.connection, loop, buffer), sock=ours)
    ends = [build(DATA, END_STREAM, number) for number in (1, 3)]
    data = b"".join([_opening(server), *frames, *ends])
    position = 0
    while position < len(data):
        size = random.choice([1, 9, 100, 5000, 70_000, 400_000])
        await loop.sock_sendall(theirs, data[position : position + size])
        position += size
        if not random.randrange(3):
            await asyncio.sleep(0)
    await until(lambda: all(stream.ended for stream in server.streams.values()))
    theirs.close()
    return server


@pytest.mark.parametrize("seed", range(6))
async def test_long_messages_arrive_whole(seed: int) -> None:
    random = Random(seed)
    frames, sent = [], {1: b"", 3: b""}
    for _ in range(12):
        number = random.choice([1, 1, 1, 3])
        size = random.choice([16_384, 16_384, 16_384, 6000, 700])
        for _ in range(random.choice([1, 5, 20])):
            payload = random.randbytes(size)
            sent[number] += payload
            frames.append(build(DATA, 0, number, payload))
        if random.randrange(2):
            frames.append(build(PING, 0, 0, bytes(8)))
    server = await _exchange(frames, random)
    assert {number: stream.data for number, stream in server.streams.items()} == sent
    assert server.streams[1].filled > server.streams[1].pieces


@pytest.mark.parametrize("lost", [False, True])
async def test_many_frames_behind_a_long_message_are_charged_while_they_wait(lost: bool) -> None:
    """Small frames read together with it are more than one turn of the loop processes."""
    server = Server(greet=False, stream=Long)
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(65_536))
    protocol = Held(server.connection, loop, buffer)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    transport = Reading(ours)
    protocol.connection_made(transport)
    long, short = build(DATA, 0, 1, bytes(16_384)), build(DATA, 0, 3, b"x" * 100)
    later = long[100:] + long + short * 900
    theirs.setblocking(False)
    assert theirs.send(later) == len(later)
    begun = _opening(server) + long + long + long[:100]
    protocol.get_buffer(-1)[: len(begun)] = begun
    protocol.buffer_updated(len(begun))
    assert protocol.held > 65_536
    assert not transport.reading
    if lost:
        protocol.connection_lost(None)
    else:
        await until(lambda: transport.reading)
        assert [len(server.streams[n].data) for n in (1, 3)] == [4 * 16_384, 90_000]
    assert protocol.held == 0
    ours.close()
    theirs.close()
