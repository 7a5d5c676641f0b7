"""The socket of an HTTP/2 connection, on both event loops."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
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


async def test_a_full_buffer_is_read_once_in_a_turn() -> None:
    """A transport would fill it 32 times, and other connections wait for 2 MiB of messages."""
    server = Server(greet=False)
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(65_536))
    protocol = Http2Protocol(server.connection, loop, buffer)
    ours, theirs = socket.socketpair()
    transport = Reading(ours)
    protocol.connection_made(transport)
    begun = _opening(server) + build(DATA, 0, 3, bytes(16_384)) * 3
    begun += build(DATA, 0, 3, bytes(len(buffer) - len(begun) - 9))
    protocol.get_buffer(-1)[:] = begun
    protocol.buffer_updated(len(begun))
    assert not transport.reading
    await until(lambda: transport.reading)
    ours.close()
    theirs.close()


class Clock:
    """A loop whose time the test sets, with timers that it runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Ignore it: the test reads on by itself."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> "Clock":
        self.timers.append(callback)
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def run(self, secs: float) -> None:
        self.now += secs
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class Longer(Kept):
    """A stream with a buffer for 6 MiB."""

    def __init__(self, number: int, server: Server, head: dict[bytes, bytes], echo: bool) -> None:
        super().__init__(number, server, head, echo)
        self.make_place(6 << 20)


class Upload:
    """A client that sends a message of 6 MiB, in frames of 16 KiB."""

    def __init__(self) -> None:
        self.clock = Clock()
        loop: Any = self.clock
        server = Server(Limits(stream_window=1 << 26), greet=False, stream=Longer)
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.protocol = Http2Protocol(server.connection, loop, memoryview(bytearray(65_536)))
        self.protocol.connection_made(Reading(self._ours))
        self._receive(_opening(server))
        self._unsent = build(DATA, 0, 1, bytes(16_384)) * 383

    @property
    def low_water(self) -> int:
        """Bytes from which on the server's socket is readable."""
        return self._ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def send(self, mib: float, secs: float = 0.0) -> None:
        """Send so much of the message, evenly in `secs`."""
        parts = round(50 * mib)
        for _ in range(parts):
            self._theirs.sendall(self._unsent[:21_000])
            self._unsent = self._unsent[21_000:]
            self.clock.now += secs / parts
            with suppress(BlockingIOError):
                while nbytes := self._ours.recv_into(self.protocol.get_buffer(-1)):
                    self.protocol.buffer_updated(nbytes)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def _receive(self, data: bytes) -> None:
        self.protocol.get_buffer(-1)[: len(data)] = data
        self.protocol.buffer_updated(len(data))


@pytest.fixture
def upload() -> Iterator[Upload]:
    found = Upload()
    yield found
    found.close()


def test_bytes_of_a_fast_client_gather_in_the_socket(upload: Upload) -> None:
    upload.send(2.5, 0.01)
    assert upload.low_water == 512 << 10
    upload.send(3, 0.01)
    assert upload.low_water == 1  # the rest of the message is shorter


def test_bytes_of_a_slow_client_do_not(upload: Upload) -> None:
    upload.send(4, 0.2)
    assert upload.low_water == 1


def test_bytes_of_a_client_that_pauses_are_read(upload: Upload) -> None:
    upload.send(2.5, 0.01)
    upload.clock.run(0.004)
    assert upload.low_water == 512 << 10
    upload.send(0.5)
    upload.clock.run(0.004)
    assert upload.low_water == 512 << 10
    upload.clock.run(0.005)
    assert upload.low_water == 1
    assert not upload.clock.timers


def test_a_lost_client_is_waited_for_no_longer(upload: Upload) -> None:
    upload.send(2.5, 0.01)
    upload.protocol.connection_lost(None)
    assert not upload.clock.timers
