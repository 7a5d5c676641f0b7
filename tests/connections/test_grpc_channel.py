"""gRPC connections to an echo server, and outcomes of calls."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from headrace.connections.endpoint import Endpoint
from headrace.connections.grpc_channel import ChannelConnection, GrpcChannel, UnaryCall
from headrace.core.errors import PayloadTooLarge
from headrace.core.tensors import Buffer
from headrace.protocol.grpc import End, Reason
from headrace.protocol.http2.protocol import ErrorCode, Limits, goaway
from tests.protocol.http2.peer import Server
from tests.protocol.http2.server_peer import HEAD


class Peer(asyncio.Protocol):
    """A connection of the server: echoes, unless `mute` or told otherwise."""

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.http2 = Server(service.limits, echo=not service.mute, greet=False)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.service.peers.append(self)
        self.service.arrived.set()
        if self.service.greeting:
            transport.write(self.service.greeting)
        elif self.service.greeting is None:
            self.flush()

    def data_received(self, data: bytes) -> None:
        if self.service.greeting is None:
            self.http2.feed(data)
            self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.service.peers.remove(self)
        self.service.arrived.set()

    def flush(self) -> None:
        """Write collected bytes."""
        self.transport.write(self.http2.output())
        self.service.arrived.set()

    def send(self, *frames: bytes) -> None:
        """Write other bytes."""
        self.transport.write(b"".join(frames))


class Service:
    """A server; `greeting` is sent in place of HTTP/2."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.mute = False
        self.greeting: bytes | None = None
        self.peers: list[Peer] = []
        self.arrived = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        assert self._server is not None
        self._server.close()
        for peer in list(self.peers):
            peer.transport.abort()
        await self.until(lambda: not self.peers)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for a condition."""
        while not happened():
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 60)

    @property
    def calls(self) -> int:
        """Number of open calls."""
        return sum(len(peer.http2.connection.streams.open) for peer in self.peers)


class Waiting(UnaryCall):
    """An awaitable call."""

    __slots__ = ("outcome",)

    outcome: "asyncio.Future[tuple[Buffer | None, End | None]]"

    def done(self, data: Buffer | None, end: End | None) -> None:
        self.outcome.set_result((data, end))


class Made:
    """A channel to a service."""

    def __init__(self, service: Service) -> None:
        endpoint = Endpoint("s", "grpc", "127.0.0.1", service.port, "localhost")
        self.channel = GrpcChannel(endpoint, None, memoryview(bytearray(1 << 16)))
        self.loop = asyncio.get_running_loop()

    def begin(self, message: Buffer = b"", seconds: float = 10.0) -> Waiting:
        """Start a call."""
        call = Waiting(self.channel, HEAD, [message], seconds)
        call.outcome = self.loop.create_future()
        self.channel.start(call)
        return call

    async def echo(self, message: bytes) -> None:
        """A successful echo."""
        data, end = await self.begin(message).outcome
        assert end is None
        assert data == message

    async def failure(self, call: Waiting) -> End:
        """Failure of a call."""
        data, end = await call.outcome
        assert data is None
        assert end is not None
        return end


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def made(service: Service) -> AsyncIterator[Made]:
    """A channel to the server."""
    made = Made(service)
    async with asyncio.timeout(20):
        yield made
    await made.channel.close()


async def test_messages_of_any_size(service: Service, made: Made) -> None:
    for size in (0, 1, 16_384, 1 << 20, 5 << 20):
        await made.echo(bytes(range(256)) * (size // 256) + bytes(size % 256))
    await asyncio.gather(*[made.echo(bytes((n,)) * (n << 16)) for n in range(20)])
    assert len(service.peers) == 1


async def test_a_restarted_server(service: Service, made: Made) -> None:
    await made.echo(b"a")
    await service.stop()
    for _ in range(4):
        assert (await made.failure(made.begin())).reason is Reason.UNSENT
    await service.start()
    await made.echo(b"b")
    await made.echo(b"c")


async def test_interrupted_calls(service: Service, made: Made) -> None:
    service.mute = True
    calls = [made.begin() for _ in range(3)]
    await service.until(lambda: service.calls == 3)
    await service.stop()
    for call in calls:
        assert (await made.failure(call)).reason is Reason.LOST


async def test_retired_connections_fail_no_call(service: Service, made: Made) -> None:
    service.mute = True
    first, second = made.begin(b"1"), made.begin(b"2")
    await service.until(lambda: service.calls == 2)
    [peer] = service.peers
    service.mute = False
    peer.send(goaway(1, ErrorCode.NO_ERROR))  # it has not looked at the second
    assert (await second.outcome)[0] == b"2"
    await made.echo(b"3")
    assert len(service.peers) == 2
    peer.http2.streams[1].respond(b"\0\0\0\0\x011")
    peer.flush()
    assert (await first.outcome)[0] == b"1"
    await service.until(lambda: len(service.peers) == 1)


async def test_a_call_is_retried_only_once(service: Service, made: Made) -> None:
    service.mute = True
    call = made.begin()
    for _ in range(2):
        await service.until(lambda: service.calls == 1)
        [peer] = service.peers
        peer.send(goaway(0, ErrorCode.NO_ERROR, "bye"))
        peer.transport.close()
        await service.until(lambda peer=peer: peer not in service.peers)  # type: ignore[misc]
    assert await made.failure(call) == (Reason.UNSENT, 14, "NO_ERROR: bye", None)


async def test_more_connections_where_streams_are_few(service: Service, made: Made) -> None:
    service.limits = Limits(streams=2)
    service.mute = True
    calls = [made.begin(b"x", 0.0) for _ in range(5)]
    await service.until(lambda: service.calls == 5)
    assert len(service.peers) == 3
    for peer in service.peers:
        for stream in list(peer.http2.streams.values()):
            stream.respond(b"\0\0\0\0\x01x")
        peer.flush()
    assert [(await call.outcome)[0] for call in calls] == [b"x"] * 5


async def test_a_deadline(service: Service, made: Made) -> None:
    await made.echo(b"x")
    service.peers[0].http2.echo = False
    long, call = made.begin(seconds=20.0), made.begin(seconds=0.05)
    assert (await made.failure(call)).reason is Reason.LATE
    await service.until(lambda: service.calls == 1)
    assert not long.finished
    # The connection had received nothing; the next call uses another one.
    await made.echo(b"x")
    assert len(service.peers) == 2


async def test_a_call_that_is_cancelled(service: Service, made: Made) -> None:
    service.mute = True
    call = made.begin()
    await service.until(lambda: service.calls == 1)
    call.cancel()
    await service.until(lambda: service.calls == 0)
    waiting = made.begin()
    waiting.cancel()
    assert not call.outcome.done()
    assert not waiting.outcome.done()


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
        (b"\0" * 100, "DATA on an idle stream"),
        (b"SSH-2.0-x\r\n", "FRAME_SIZE_ERROR"),
    ],
)
async def test_servers_of_another_kind(
    service: Service, made: Made, greeting: bytes, text: str
) -> None:
    service.greeting = greeting
    end = await made.failure(made.begin())
    assert end.reason is Reason.UNSENT
    assert text in end.text


async def test_a_channel_that_is_closed(service: Service, made: Made) -> None:
    service.mute = True
    call, waiting = made.begin(), made.begin()
    await service.until(lambda: service.calls == 2)
    await made.channel.close()
    for each in (call, waiting):
        assert (await made.failure(each)).reason is Reason.LOST
    assert (await made.failure(made.begin())).reason is Reason.UNSENT


async def test_a_channel_that_is_closed_while_it_connects(service: Service, made: Made) -> None:
    service.greeting = b""
    call = made.begin(seconds=0.0)
    await service.until(lambda: bool(service.peers))
    await made.channel.close()
    for each in (call, made.begin(seconds=0.0)):
        assert (await made.failure(each)).reason is Reason.UNSENT


async def test_a_message_that_is_too_large(service: Service, made: Made) -> None:
    await made.echo(b"x")
    with pytest.raises(PayloadTooLarge, match="2147483648 bytes do not fit"):
        made.begin(np.empty(1 << 31, np.uint8).data)
    assert not service.calls
    await made.echo(b"y")


async def test_a_cancelled_call_makes_room_for_a_waiting_one(service: Service, made: Made) -> None:
    service.limits = Limits(streams=1)
    service.mute = True
    calls = [made.begin(seconds=0.0) for _ in range(9)]  # one more than there are connections
    await service.until(lambda: service.calls == 8)
    before = sum(peer.http2.connection.streams.last for peer in service.peers)
    calls[0].cancel()
    await service.until(
        lambda: sum(peer.http2.connection.streams.last for peer in service.peers) > before
    )
    assert not any(call.outcome.done() for call in calls)


async def test_waiting_calls_of_a_lost_connection(service: Service, made: Made) -> None:
    service.limits = Limits(streams=1)
    service.mute = True
    calls = [made.begin(seconds=0.0) for _ in range(9)]
    await service.until(lambda: service.calls == 8)
    service.peers[0].transport.abort()
    await service.until(lambda: len(service.peers) == 7)
    await service.until(lambda: service.calls == 8)
    assert sum(call.finished for call in calls) == 1


async def test_frames_for_a_lost_connection(service: Service) -> None:
    """A call may begin in the same turn of the loop; uvloop raises for its frames."""
    loop, problems, gone = asyncio.get_running_loop(), list[object](), asyncio.Event()
    loop.set_exception_handler(lambda _, context: problems.append(context))

    def lost(link: ChannelConnection) -> None:
        link.http2.sender.ping(b"12345678")
        gone.set()

    _, link = await loop.create_connection(
        lambda: ChannelConnection(loop, memoryview(bytearray(1 << 16)), lambda: None, lost),
        "127.0.0.1", service.port,
    )  # fmt: skip
    await link.greeted
    await service.stop()
    await gone.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not problems
