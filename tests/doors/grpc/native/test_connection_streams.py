"""Open calls of a connection: their charge, their number, their time, and their share of a turn."""

import asyncio
import gc
import gzip
import tracemalloc
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from hpack import Encoder, NeverIndexedHeaderTuple

from headrace.core.errors import Overloaded, PayloadTooLarge, ServerError
from headrace.core.limits import PRESSED_SECS, Shares
from headrace.core.tensors import Buffer
from headrace.core.turns import SHARE
from headrace.doors.grpc.call import Handlers, Peer
from headrace.doors.grpc.inference import stream_opener
from headrace.doors.grpc.native.calls import SessionRpc, TaskRpc
from headrace.doors.grpc.native.connection import GrpcConnection, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.protocol.http2.connection import OWN_STREAMS
from headrace.protocol.http2.protocol import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    ErrorCode,
    Limits,
    frame,
    rst_stream,
)
from tests.doors.fakes import FakeEngine, Transport, until

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_ECHO, _TASK, _COUNTED = "/echo", "/task", "/counted"
_EMPTY = bytes(5)  # a message
Fields = Sequence[tuple[str, str] | NeverIndexedHeaderTuple]


class Echo:
    """A session that counts messages, and may hold; `held` counts those that a hold let pass."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.received: list[int] = []
        self.refused: list[type[ServerError]] = []
        self.ended = False
        self.holds_after = 0
        self.idle = True

    def receive(self, message: Buffer) -> None:
        self.received.append(len(message))
        if len(self.received) == self.holds_after:
            self.peer.hold(True)

    def refuse(self, error: ServerError) -> None:
        self.refused.append(type(error))

    def half_close(self) -> None:
        self.ended = True
        self.peer.finish()

    def sent(self) -> None: ...

    def closed(self) -> None: ...


class Counted(TaskRpc):
    """A call that counts looks at it."""

    looks = 0

    def look(self, now: float) -> bool:
        Counted.looks += 1
        return super().look(now)


class World:
    """A server without sockets; `sessions` are those of `_ECHO`."""

    def __init__(self, shares: Shares | None = None, options: GrpcOptions | None = None) -> None:
        self.admission = Admission(10_000, 1 << 30, shares)
        self.sessions: list[Echo] = []
        self.answered = 0
        self.go_on = asyncio.Event()  # calls of `_TASK` wait for it
        self.go_on.set()
        engine = FakeEngine()
        engine.admission = self.admission

        def echo(peer: Peer) -> Echo:
            self.sessions.append(Echo(peer))
            return self.sessions[-1]

        async def task(data: Buffer, call: object) -> bytes:
            await self.go_on.wait()
            self.answered += 1
            return b""

        procedures: dict[str, tuple[type, object]] = {
            _ECHO: (SessionRpc, echo), _TASK: (TaskRpc, task), _COUNTED: (Counted, task),
            _STREAM: (SessionRpc, stream_opener(engine, 1 << 20)),
        }  # fmt: skip
        self.context = ServerContext(
            procedures,
            Handlers({}, {}, {}),
            self.admission,
            1 << 20,
            False,
            options or GrpcOptions(),
            Limits(),
        )


class Client:
    """A client of such a server."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transport = Transport()
        self.connection = GrpcConnection(world.context)
        self.connection.connection_made(self.transport)
        self._encoder = Encoder()
        self._number = -1
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> None:
        """Receive bytes, as far as the server reads."""
        while data and self.transport.reading and not self.transport.closed:
            buffer = self.connection.get_buffer(-1)
            nbytes = min(len(data), len(buffer))
            buffer[:nbytes] = data[:nbytes]
            self.connection.buffer_updated(nbytes)
            data = data[nbytes:]

    async def send_all(self, data: bytes) -> None:
        """Receive bytes over as many turns as the server takes."""
        for start in range(0, len(data), 4096):
            await until(lambda: self.transport.reading)
            self.send(data[start : start + 4096])
        await until(lambda: self.transport.reading)

    def head(self, path: str, fields: Fields = ()) -> bytes:
        """HEADERS of a further call."""
        self._number += 2
        common = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        block = self._encoder.encode([*common, *fields])
        return frame(HEADERS, END_HEADERS, self._number, block)

    def call(self, path: str, message: bytes = _EMPTY) -> bytes:
        """A whole unary call."""
        return self.head(path) + frame(DATA, END_STREAM, self._number, message)

    def data(self, payload: bytes, flags: int = 0) -> bytes:
        """DATA of the last call."""
        return frame(DATA, flags, self._number, payload)

    def resets(self) -> int:
        """The number of streams that were refused."""
        written = b"".join(bytes(piece) for piece in self.transport.written)
        numbers = range(1, self._number + 2, 2)
        return sum(rst_stream(number, ErrorCode.REFUSED_STREAM) in written for number in numbers)


async def _flushed() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


# --- memory

_LONG = [("a", "x" * 3_000)]
_HEADS: dict[str, Callable[[int], Fields]] = {
    "small": lambda _: [],
    "shared": lambda _: _LONG * 4,
    "different": lambda number: [
        *_LONG * 4, NeverIndexedHeaderTuple("b", f"{number:06}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize("begun", [b"", b"\0\0\0\0\x64"], ids=["idle", "begun"])
@pytest.mark.parametrize("path", [_STREAM, _TASK])
async def test_calls_are_charged_by_what_they_take(path: str, begun: bytes, heads: str) -> None:
    """Within a factor of 1.5, beside what each connection may hold; nothing remains."""
    world = World()
    client = Client(world)
    await client.send_all(client.head(path, _LONG) + client.head(path, _HEADS[heads](0)))
    gc.collect()
    tracemalloc.start()
    try:
        count = 200
        for number in range(count):
            fields = _HEADS[heads](number)
            await client.send_all(client.head(path, fields) + (begun and client.data(begun)))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(client.connection.streams.open) == count + 2
    charged = world.admission.bytes
    least = 2_048 * count  # of a unary call, for which it may begin a message
    assert taken / 1.5 - 24_576 <= charged <= max(taken, least) * 1.5 + 24_576
    client.connection.connection_lost(None)
    assert client.connection.streams.open  # they end over several turns
    await until(lambda: world.admission.bytes == 0)
    assert world.admission.streams == 0


async def test_a_handler_that_waits_is_charged_however_its_call_has_ended() -> None:
    """Some libraries end a call by an empty frame behind its message."""
    message, charged = bytes(4) + b"\x08" + bytes(8), []
    for apart in (False, True):
        world = World()
        world.go_on.clear()
        client = Client(world)
        before = world.admission.bytes
        ends = client.head(_TASK) + client.data(message, 0 if apart else END_STREAM)
        client.send(ends + client.data(b"", END_STREAM) * apart)
        await _flushed()
        charged.append(world.admission.bytes - before)
        world.go_on.set()
        await until(lambda: world.answered == 1)  # noqa: B023
        assert world.admission.bytes == before
        client.connection.connection_lost(None)
    assert charged[0] == charged[1] > 1_000


# --- number


async def test_open_calls_of_the_server_are_limited() -> None:
    """Each connection has a few of its own, whatever others do; room returns."""
    world = World(Shares(streams=64))
    greedy, other, late = Client(world), Client(world), Client(world)
    await greedy.send_all(b"".join(greedy.head(_TASK) for _ in range(100)))
    await _flushed()
    assert len(greedy.connection.streams.open) == 64 + OWN_STREAMS
    assert greedy.resets() == 100 - 64 - OWN_STREAMS
    assert world.admission.refused_streams > 0
    assert world.admission.pressed
    await other.send_all(b"".join(other.head(_TASK) for _ in range(20)))
    assert len(other.connection.streams.open) == OWN_STREAMS
    greedy.connection.connection_lost(None)
    await late.send_all(b"".join(late.head(_TASK) for _ in range(20)))
    assert len(late.connection.streams.open) == 20
    assert world.admission.streams == 32


async def test_room_for_calls_returns_once_they_have_ended() -> None:
    world = World(Shares(streams=64))
    client = Client(world)
    await client.send_all(b"".join(client.call(_TASK) for _ in range(60)))
    await until(lambda: world.answered == 60)
    await _flushed()
    client.connection.check_progress(asyncio.get_running_loop().time())
    assert (world.admission.streams, world.admission.bytes) == (0, 0)


async def test_refused_calls_whose_data_is_under_way_cost_no_other_call() -> None:
    """However many of them: a client's library takes turns in sending their messages."""
    client = Client(World())
    large = b"\0" + (2 << 20).to_bytes(4) + bytes(100)
    await client.send_all(b"".join(client.head(_TASK) + client.data(large) for _ in range(400)))
    numbers = [*range(1, 800, 2)] * 8
    await client.send_all(b"".join(frame(DATA, 0, number, bytes(100)) for number in numbers))
    assert client.connection.http2.failure == ""
    await client.send_all(client.call(_TASK))
    await until(lambda: client.world.answered == 1)


# --- time


def _check(client: Client, since: float, *seconds: float) -> None:
    for second in seconds:
        client.connection.check_progress(since + second)


async def test_streams_that_were_never_used_end_early_under_pressure() -> None:
    world = World(Shares(streams=40), GrpcOptions(stream_idle_secs=100.0))
    client = Client(world)
    now = asyncio.get_running_loop().time()
    await client.send_all(b"".join(client.head(_ECHO) for _ in range(3)) + client.data(_EMPTY))
    _check(client, now, 1, 7, 13, 90)
    assert len(client.connection.streams.open) == 3
    assert world.admission.reserve(40)
    _check(client, now, 91 + PRESSED_SECS)
    assert len(client.connection.streams.open) == 0  # idle for longer than a minute, all of them
    await client.send_all(client.head(_ECHO) + client.head(_ECHO) + client.data(_EMPTY))
    now = asyncio.get_running_loop().time()
    _check(client, now, 1, 8)
    assert list(client.connection.streams.open) == [9]
    world.admission.release(40)
    _check(client, now, 95, 110)
    assert not client.connection.streams.open


async def test_calls_that_wait_are_looked_at_now_and_then() -> None:
    """Not all of them at each check."""
    client = Client(World())
    await client.send_all(b"".join(client.head(_COUNTED) for _ in range(100)))
    Counted.looks = 0
    now = asyncio.get_running_loop().time()
    _check(client, now, 1, 2, 3, 4, 5)
    assert Counted.looks == 0
    _check(client, now, 6.5, 7, 8, 9, 10)
    assert Counted.looks == 100
    _check(client, now, *range(11, 80))
    assert not client.connection.streams.open  # the patience of a minute


# --- turns


async def test_many_messages_are_processed_over_several_turns() -> None:
    """Another client's message is not behind them; the end of the stream is."""
    world = World()
    greedy, other = Client(world), Client(world)
    greedy.send(greedy.head(_ECHO) + greedy.data(_EMPTY * 3_000, END_STREAM))
    other.send(other.head(_ECHO) + other.data(_EMPTY, END_STREAM))
    many, one = world.sessions
    assert 0 < len(many.received) <= SHARE
    assert one.ended
    await until(lambda: many.ended)
    assert len(many.received) == 3_000
    await _flushed()
    assert world.admission.bytes == 0


async def test_messages_count_by_their_size() -> None:
    """64 KiB of fields that protobuf has to decode take longer than 128 empty messages."""
    world = World()
    greedy, other = Client(world), Client(world)
    message = (0).to_bytes(1) + (1024).to_bytes(4) + bytes(1024)
    greedy.send(greedy.head(_ECHO) + greedy.data(message * 60, END_STREAM))
    other.send(other.head(_ECHO) + other.data(message * 60, END_STREAM))
    many, few = world.sessions
    assert 0 < len(many.received) < 50
    assert 0 < len(few.received) < 5  # while others wait
    await until(lambda: many.ended and few.ended)
    assert (len(many.received), len(few.received)) == (60, 60)


async def test_compressed_messages_count_for_many() -> None:
    world = World()
    greedy, other = Client(world), Client(world)
    packed = gzip.compress(bytes(1000))
    message = b"\1" + len(packed).to_bytes(4) + packed
    for client in (greedy, other):
        head = client.head(_ECHO, [("grpc-encoding", "gzip")])
        client.send(head + client.data(message * 20, END_STREAM))
    many, few = world.sessions
    assert 0 < len(many.received) < 10
    assert len(few.received) == 1  # while others wait
    await until(lambda: many.ended and few.ended)
    assert (len(many.received), len(few.received)) == (20, 20)


async def test_calls_count_by_their_size() -> None:
    world = World()
    greedy, other = Client(world), Client(world)
    message = (0).to_bytes(1) + (1024).to_bytes(4) + bytes(1024)
    calls = [greedy.head(_TASK) + greedy.data(message, END_STREAM) for _ in range(55)]
    greedy.send(b"".join(calls))
    other.send(other.call(_TASK))
    assert not greedy.transport.reading
    assert other.transport.reading
    await until(lambda: world.answered == 56)


async def test_many_calls_are_processed_over_several_turns() -> None:
    world = World()
    greedy, other = Client(world), Client(world)
    greedy.send(b"".join(greedy.call(_TASK) for _ in range(500)))
    other.send(other.call(_TASK))
    assert not greedy.transport.reading
    assert other.transport.reading
    await _flushed()
    assert 0 < world.answered < 400
    await until(lambda: world.answered == 501)
    await until(lambda: greedy.transport.reading)


async def test_long_heads_are_decoded_over_several_turns() -> None:
    """Huffman code is decoded in Python: a millisecond or two for each of these."""
    world = World()
    greedy, other = Client(world), Client(world)
    field = NeverIndexedHeaderTuple("x", "a" * 7_000)
    heads = [greedy.head(_TASK, [field]) + greedy.data(_EMPTY, END_STREAM) for _ in range(50)]
    greedy.send(b"".join(heads[:14]))  # what is read at once
    other.send(other.call(_TASK))
    assert not greedy.transport.reading
    await _flushed()
    assert 0 < world.answered < 14
    await until(lambda: world.answered == 15)


async def test_refused_requests_are_freed_at_once() -> None:
    """Their errors do not keep the frames, and with them the requests, for the collector."""
    world = World()
    client = Client(world)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        client.send(client.head(_STREAM) + client.data(bytes((0, 0, 0, 0, 2, 0x0A, 5)) * 3))
        await _flushed()
        client.connection.connection_lost(None)
        del client
        gc.collect()
        kept = [one for one in gc.garbage if isinstance(one, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not kept


async def test_a_clients_pause_lasts_over_turns() -> None:
    """Reading resumes once both the rest is processed and the client reads."""
    world = World()
    client = Client(world)
    client.send(b"".join(client.call(_TASK) for _ in range(200)))
    client.connection.pause_writing()
    await until(lambda: world.answered == 200)
    await _flushed()
    assert not client.transport.reading
    client.connection.resume_writing()
    assert client.transport.reading


async def test_messages_behind_a_hold() -> None:
    """In order, and charged while they wait."""
    world = World()
    client = Client(world)
    client.send(client.head(_ECHO))
    [session] = world.sessions
    session.holds_after = 2
    sizes = [size % 7 for size in range(300)]
    messages = b"".join(bytes(3) + size.to_bytes(2) + bytes(size) for size in sizes)
    await client.send_all(b"".join(client.data(bytes((byte,))) for byte in messages))
    await client.send_all(client.data(b"", END_STREAM))
    await _flushed()
    assert session.received == sizes[:2]
    assert not session.ended
    assert world.admission.bytes >= len(messages) - 100
    session.peer.hold(False)
    assert len(session.received) <= SHARE + 2
    await until(lambda: session.ended)
    assert session.received == sizes
    assert world.admission.bytes == 0


async def test_messages_that_wait_for_a_turn_are_not_overtaken() -> None:
    """The session may report that there is room meanwhile, without having held."""
    world = World()
    client = Client(world)
    client.send(client.head(_ECHO) + client.data(_EMPTY * (SHARE + 10)))
    [session] = world.sessions
    assert len(session.received) == SHARE
    session.peer.hold(False)
    client.send(client.data(b"\0\0\0\0\1x", END_STREAM))
    await until(lambda: session.ended)
    assert session.received == [0] * (SHARE + 10) + [1]
    assert world.admission.bytes == 0


async def test_the_rest_of_a_message_may_wait_for_a_turn() -> None:
    """Other streams of the connection have used up this turn."""
    world = World()
    client = Client(world)

    def data(stream: int, *sizes: int) -> bytes:
        messages = [bytes(1) + size.to_bytes(4) + bytes(size) for size in sizes]
        return frame(DATA, 0, stream, b"".join(messages))

    long = bytes(1) + (3_000).to_bytes(4) + bytes(3_000)
    first, second = client.head(_ECHO), client.head(_ECHO)
    client.send(first + second + frame(DATA, 0, 1, long[:1_000]))
    session, other = world.sessions
    rest = frame(DATA, 0, 1, long[1_000:] + bytes(1) + (100).to_bytes(4) + bytes(100))
    client.send(data(3, *[0] * SHARE) + rest + data(1, 50) + frame(DATA, END_STREAM, 1))
    assert len(other.received) == SHARE
    await until(lambda: session.ended)
    assert session.received == [3_000, 100, 50]


# --- refused messages


@pytest.mark.parametrize("room", ["at its begin", "later", "no limit"])
async def test_the_rest_of_a_refused_message_is_dropped(room: str) -> None:
    """However long: its stream goes on with the message behind it, and returns its window."""
    world = World()
    client = Client(world)
    size = 3 << 20 if room == "no limit" else 1 << 20
    payload = b"\0" + size.to_bytes(4) + bytes(size) + b"\0" + (5).to_bytes(4) + b"later"
    frames = [client.head(_ECHO)]
    frames += [client.data(payload[at : at + 16_384]) for at in range(0, len(payload), 16_384)]
    filling = 0
    if room != "no limit":
        filling = (1 << 30) - (1 << 19)
        await client.send_all(b"".join(frames[: 8 if room == "later" else 1]))
        del frames[: 8 if room == "later" else 1]
        world.admission.count(filling)
    await client.send_all(b"".join(frames))
    [session] = world.sessions
    await until(lambda: session.received == [5])
    assert session.refused == [PayloadTooLarge if room == "no limit" else Overloaded]
    assert list(client.connection.streams.open) == [1]
    assert world.admission.messages == 0
    client.connection.connection_lost(None)
    assert world.admission.bytes == filling


async def test_the_rest_of_a_refused_message_needs_no_room_while_data_waits() -> None:
    """Other streams of the connection have used up this turn."""
    world = World()
    client = Client(world)
    size = 2 << 20
    first, second = client.head(_ECHO), client.head(_ECHO)
    client.send(first + second + frame(DATA, 0, 1, b"\0" + size.to_bytes(4)))
    session, other = world.sessions
    assert session.refused == [PayloadTooLarge]
    world.admission.count(1 << 30)
    client.send(frame(DATA, 0, 3, _EMPTY * SHARE) + frame(DATA, 0, 1, bytes(1000)))
    assert len(other.received) == SHARE
    rest = [frame(DATA, 0, 1, bytes(8192)) for _ in range((size - 1000) // 8192)]
    await client.send_all(b"".join(rest))
    assert list(client.connection.streams.open) == [1, 3]
    world.admission.count(-(1 << 30))
    later = bytes((size - 1000) % 8192) + b"\0\0\0\0\5later"
    await client.send_all(frame(DATA, 0, 1, later))
    await until(lambda: session.received == [5])
    assert session.refused == [PayloadTooLarge]


@pytest.mark.parametrize("prefix", [b"\0" + (1 << 31).to_bytes(4), b"\2\0\0\0\1"])
async def test_bytes_that_are_hardly_a_message_end_their_stream(prefix: bytes) -> None:
    client = Client(World())
    await client.send_all(client.head(_ECHO) + client.data(prefix + bytes(10)))
    await _flushed()
    [session] = client.world.sessions
    assert list(client.connection.streams.open) == []
    assert not session.received
    assert not session.refused


async def test_a_failed_piece_does_not_stop_others() -> None:
    turns = Admission(0, 0).turns
    done: list[int] = []
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))

    def fail() -> None:
        raise RuntimeError

    turns.put_off(fail)
    turns.put_off(lambda: done.append(1))
    assert turns.share < SHARE
    await until(lambda: done == [1])
    assert len(problems) == 1
    assert turns.share == SHARE
