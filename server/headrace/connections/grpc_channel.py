"""Connections to one gRPC server, and the calls that wait for one.

A connection is opened when a call needs it, and another one when the server's limit of streams is
reached on those that exist; if that one cannot be made, no other is attempted for a while. If there
is none at all, the call fails. Calls that were not sent when a connection ended, or that the server
reports as not processed, start again on the next one, once.

Owned by the event-loop thread.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from headrace.connections.endpoint import CLOSED, PORT, Endpoint, connect, connect_error
from headrace.core.errors import PayloadTooLarge
from headrace.core.tensors import Buffer
from headrace.protocol.compression import LARGE
from headrace.protocol.grpc import (
    MAX_MESSAGE,
    TIMING_FIELD,
    ClientCall,
    End,
    Reason,
    ResponseBlock,
    request_fields,
    timeout_field,
    unpacked,
    unreadable,
    with_path,
)
from headrace.protocol.http2.asyncio_protocol import Http2Protocol
from headrace.protocol.http2.connection import ClientConnection, ClientStreams
from headrace.protocol.http2.headers import header_block
from headrace.protocol.http2.protocol import Limits

_BUFFER = 256 << 10  # bytes received at once
_LIMITS = Limits(connection_window=256 << 20)
# A dead peer: one that does not acknowledge data, or probes.
_SILENCE_SECS = 30
_PROBE_SECS = 10


def receive_buffer() -> memoryview:
    """A receive buffer; one per loop suffices, since bytes are processed at once."""
    return memoryview(bytearray(_BUFFER))


class ChannelConnection(Http2Protocol):
    """One connection to a server; `greeted` is done once the server has sent its HTTP/2 preface.

    A dead peer is detected by TCP keep-alive.
    """

    http2: ClientConnection
    streams: ClientStreams

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        progressed: Callable[[], None],
        closed: Callable[["ChannelConnection"], None],
    ) -> None:
        """`progressed` is called after progress in either direction, `closed` when the connection
        is closed.
        """
        self.greeted: asyncio.Future[None] = loop.create_future()
        http2 = ClientConnection(
            ResponseBlock, lambda: loop.call_soon(self.flush), _LIMITS, TIMING_FIELD
        )
        super().__init__(http2, loop, buffer)
        self._progressed = progressed
        self._closed_by = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface, and enable detection of a dead peer."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            _watch(sock)

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` received bytes."""
        if not self.http2.settled and bytes(self._buffer[:5]) == b"HTTP/":
            self.refuse("the server does not speak HTTP/2")
            return
        super().buffer_updated(nbytes)
        if not self.greeted.done() and self.http2.settled and not self.http2.closing:
            self.greeted.set_result(None)
        self._progressed()

    def connection_lost(self, error: Exception | None) -> None:
        """End all streams."""
        http2 = self.http2
        http2.failure = http2.failure or (connect_error(error) if error else "")
        if not self.greeted.done():
            why = http2.failure or http2.said
            why = f"{why}; {PORT.format('gRPC')}" if why else CLOSED.format("gRPC")
            self.greeted.set_exception(ConnectionError(why))
            self.greeted.exception()  # retrieved: a cancelled attempt does not await it
        self._closed_by(self)
        super().connection_lost(error)

    def flush(self) -> None:
        """Write the collected frames."""
        if not self._lost:
            self.streams.written = self.streams.last
        super().flush()
        self._progressed()  # a stream ended by this side makes room, too


def _watch(sock: socket.socket) -> None:
    """Enable TCP keep-alive, so that a dead peer is detected."""
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_SECS),
        ("TCP_KEEPINTVL", _PROBE_SECS),
        ("TCP_KEEPCNT", _SILENCE_SECS // _PROBE_SECS),
        ("TCP_USER_TIMEOUT", _SILENCE_SECS * 1000),
    ):
        if hasattr(socket, name):  # not available on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_AGENT = b"headrace"
_AUTHORIZATION = "authorization"
_CONNECT_SECS = 5.0  # for a connection, with TLS and the server's settings
_PAUSE_SECS = 0.5  # after a failed attempt to make a further connection
_MOST_CONNECTIONS = 8
_CLOSED = "the connection was closed"


class RequestHeads:
    """Heads of requests to one endpoint, each made once; `packing` compresses messages."""

    def __init__(
        self,
        endpoint: Endpoint,
        metadata: Sequence[tuple[str, str]] = (),
        authorization: str = "",
        packing: str = "",
    ) -> None:
        self._common = request_fields(endpoint.secure, endpoint.authority, _AGENT)
        self._common += [(name.encode(), value.encode()) for name, value in metadata]
        shown = authorization.encode()
        self._shown = [(_AUTHORIZATION.encode(), shown)] if shown else []
        self._coded = [(b"grpc-encoding", packing.encode())]
        self._heads: dict[tuple[bytes, bool, bool], bytes] = {}
        self._seconds = 0.0
        self._timeout = b""

    def head(
        self,
        path: bytes,
        headers: Sequence[tuple[str, str]] = (),
        seconds: float = 0.0,
        packed: bool = False,
    ) -> bytes:
        """The head of a call of a procedure, with its `headers` and timeout, 0 for none."""
        own = not any(name == _AUTHORIZATION for name, _ in headers)
        key = path, own, packed
        head = self._heads.get(key)
        if head is None:
            fields = self._common + (self._shown if own else []) + (self._coded if packed else [])
            head = self._heads[key] = with_path(fields, path)
        if seconds != self._seconds:
            self._seconds, self._timeout = seconds, timeout_field(seconds)
        fields = [(n.encode("latin-1"), v.encode("latin-1", "replace")) for n, v in headers]
        return head + self._timeout + header_block(fields)


class ChannelCall(ClientCall):
    """A call with one message, which may have to wait for a connection.

    `begun` is of the loop's clock.
    """

    __slots__ = ("begun", "channel", "head", "packed", "pieces", "size", "tries")

    def __init__(
        self,
        channel: "GrpcChannel",
        head: bytes,
        message: list[Buffer],
        seconds: float = 0.0,
        packed: bool = False,
    ) -> None:
        """`seconds` is the timeout, 0 for none; `message` is compressed if `packed`.

        Raises `PayloadTooLarge`.
        """
        self.begun = begun = channel.now()
        super().__init__(begun + seconds if seconds else inf, channel.largest)
        self.channel = channel
        self.head = head
        self.pieces = message
        self.size = len(message[0]) if len(message) == 1 else sum(map(len, message))
        if self.size > MAX_MESSAGE:
            raise PayloadTooLarge(f"{self.size} bytes do not fit into a message of gRPC")
        self.packed = packed
        self.tries = 0

    def launch(self, connection: ChannelConnection) -> None:
        """Send the whole request on a connection with a free stream."""
        http2 = connection.http2
        self.begin(http2)
        http2.sender.request(self, self.head, self.pieces, self.size, self.packed)


class UnaryCall(ChannelCall):
    """A call with one message each way. A large compressed answer is unpacked on a thread."""

    _data: Buffer | None = None
    _encoding_left = ""  # encoding of the answer, if still to be unpacked

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Receive the answer, or the failure of the call."""
        raise NotImplementedError

    def message(self, data: Buffer) -> None:
        """Keep the message until the status arrives."""
        if self._data is not None:
            self.break_off(End(Reason.BROKEN, 13, "there is more than one answer"))
            return
        self._data = data

    def message_packed(self, data: bytes, encoding: str) -> None:
        """Keep a large message compressed."""
        if len(data) <= LARGE:
            super().message_packed(data, encoding)
        else:
            self._encoding_left = encoding
            self.message(data)

    def cancel(self) -> None:
        """Cancel the call without a callback."""
        super().cancel()
        self._encoding_left = ""

    def closed(self, end: End | None) -> None:
        """Start again, or report the end."""
        if end is None:
            data = self._data
            if data is None:
                end = End(Reason.BROKEN, 13, "the answer has a good status and nothing else")
            elif self._encoding_left:
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(
                    None, unpacked, bytes(data), self._encoding_left, self.most
                )
                work.add_done_callback(self._unpacked)
                return
            self.done(data, end)
        elif end.reason is Reason.UNSENT and self.connection is not None and not self.tries:
            self.renew()
            self.tries = 1
            self.channel.start(self)
        else:
            self.done(None, end)

    def _unpacked(self, work: "asyncio.Future[Buffer]") -> None:
        if not self._encoding_left:
            return  # cancelled meanwhile
        try:
            data = work.result()
        except Exception as error:  # any error concerns this call alone
            self.done(None, unreadable(error))
        else:
            self.done(data, None)


class AwaitedCall(UnaryCall):
    """A call whose outcome a coroutine awaits."""

    __slots__ = ("outcome",)

    outcome: "asyncio.Future[tuple[Buffer | None, End | None]]"

    def done(self, data: Buffer | None, end: End | None) -> None:
        """Set the outcome, unless the future is done."""
        if not self.outcome.done():
            self.outcome.set_result((data, end))


class StreamCall(ChannelCall):
    """A call with one message that is answered by any number of them."""

    def hold(self, held: bool) -> None:
        """Pause or resume the server's answers."""
        self.keeps_window = held
        if not held and self.connection is not None and not self.finished:
            self.connection.release(self)


class GrpcChannel:
    """Calls to one address. Must be created on the running loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        context: ssl.SSLContext | None,
        buffer: memoryview,
        largest: int = MAX_MESSAGE,
    ) -> None:
        """`buffer` receives bytes; other channels of the loop may share it.

        A response message may have `largest` bytes.
        """
        self.largest = largest
        self._endpoint = endpoint
        self._context = context
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._connections: list[ChannelConnection] = []
        self._current: ChannelConnection | None = None
        self._waiting: deque[ChannelCall] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before = 0.0  # next attempt to make a further connection
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._closed = False
        self.when_lost: Callable[[], None] | None = None  # called after each loss of a connection

    def start(self, call: ChannelCall) -> None:
        """Start a call, or let it wait for a connection."""
        if call.deadline < self._timer_at:
            self._arm(call.deadline)
        connection = self._current
        if connection is not None and not self._waiting and connection.streams.room > 0:
            call.launch(connection)
            return
        self._waiting.append(call)
        self._go_on()

    async def answer(
        self,
        head: bytes,
        message: list[Buffer],
        seconds: float,
        packed: bool = False,
    ) -> tuple[Buffer | None, End | None]:
        """The answer to a message, or the failure of the call; cancelling the wait cancels it."""
        call = AwaitedCall(self, head, message, seconds, packed)
        call.outcome = self._loop.create_future()
        self.start(call)
        try:
            return await call.outcome
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
            self._connecting = None
        self._fail_waiting(_CLOSED)
        for connection in list(self._connections):
            connection.abort()

    def _go_on(self) -> None:
        """Start waiting calls, as far as streams are free."""
        waiting = self._waiting
        while waiting:
            if waiting[0].finished:
                waiting.popleft()
                continue
            connection = self._free()
            if connection is None:
                self._connect()
                return
            waiting.popleft().launch(connection)

    def _free(self) -> ChannelConnection | None:
        for connection in self._connections:
            if connection.streams.room > 0:
                self._current = connection
                return connection
        return None

    # --- connecting

    def _connect(self) -> None:
        usable = self._usable()
        if self._connecting is not None or usable >= _MOST_CONNECTIONS:
            return
        if self._closed:
            self._loop.call_soon(self._fail_waiting, _CLOSED)
        elif not usable or self.now() >= self._not_before:
            self._connecting = self._loop.create_task(self._attempt())

    async def _attempt(self) -> None:
        connection = None

        def make() -> ChannelConnection:
            return ChannelConnection(self._loop, self._buffer, self._progressed, self._lost)

        try:
            async with asyncio.timeout(_CONNECT_SECS):
                connection = await connect(make, self._endpoint, self._context)
                await connection.greeted
        except Exception as error:  # any error: the next attempt may succeed
            self._connecting = None
            if connection is not None:
                connection.abort()
            late = isinstance(error, TimeoutError) and not str(error)
            self._not_before = self.now() + _PAUSE_SECS
            if not self._usable():
                self._fail_waiting("it does not answer" if late else connect_error(error))
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        else:
            self._connecting = None
            self._connections.append(connection)
            self._current = connection
            self._go_on()

    def _usable(self) -> int:
        return sum(not connection.streams.leaving for connection in self._connections)

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.break_off(End(Reason.UNSENT, 14, why))

    def _progressed(self) -> None:
        if self._waiting:
            self._go_on()

    def _lost(self, connection: ChannelConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._current is connection:
            self._current = self._connections[-1] if self._connections else None
        if self.when_lost is not None:
            self.when_lost()
        if self._waiting:  # possibly for a free stream
            self._loop.call_soon(self._go_on)

    # --- deadlines

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """End the calls whose deadline has passed, and schedule the next check."""
        self._timer, self._timer_at = None, inf
        now = self._loop.time()
        late = [call for call in self._waiting if call.deadline <= now and not call.finished]
        for connection in list(self._connections):
            mute = [c for c in _calls(connection) if c.deadline <= now]
            late += mute
            if any(connection.streams.now <= call.begun for call in mute):
                # It may be dead. Calls in flight may wait for it; no others will.
                connection.streams.leave()
        following = min(
            [
                c.deadline
                for connection in self._connections
                for c in _calls(connection)
                if c.deadline > now
            ]
            + [c.deadline for c in self._waiting if c.deadline > now],
            default=inf,
        )
        if following < inf:
            self._arm(following)
        for call in late:
            call.break_off(End(Reason.LATE, 4, "Deadline Exceeded"))


def _calls(connection: ChannelConnection) -> Sequence[ChannelCall]:
    return [
        stream for stream in connection.streams.open.values() if isinstance(stream, ChannelCall)
    ]
