"""HTTP/1.1 connections to one server, on the event loop: each for one request at a time.

Connections are kept for reuse. The most recently used idle one is taken, and none that has been
idle for longer than servers keep connections. There are never more connections than concurrent
requests, which the model's slots bound. Owned by the event-loop thread.
"""

import asyncio
import select
import ssl
from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast
from weakref import WeakSet

from headrace.connections.endpoint import CLOSED, Endpoint, connect, connect_error
from headrace.core.errors import InvalidRequest
from headrace.core.tensors import Buffer
from headrace.protocol.http1 import LARGEST_BODY, HttpResponse, ResponseReader

# Uvicorn closes connections that have been idle for 5 s; a request may cross with that.
_IDLE_SECS = 4.0
CONNECT_SECS = 5.0


class NotConnected(Exception):
    """No connection could be made, and nothing was sent."""


class ConnectionLost(Exception):
    """The connection was lost before its answer was complete."""


class NoAnswer(Exception):
    """No answer within the timeout."""


def deadline_in(seconds: float) -> float:
    """The loop's time in `seconds`; 0 for no deadline."""
    return monotonic() + seconds if seconds else 0.0


def seconds_left(until: float) -> float | None:
    """Seconds until a deadline, always positive; None for no deadline."""
    return max(until - monotonic(), 0.001) if until else None


Done = Callable[[HttpResponse | Exception], None]


class HttpPool:
    """The connections to one server; `tls` is None for none.

    Bodies may have `largest_body` bytes.
    """

    def __init__(
        self, endpoint: Endpoint, tls: ssl.SSLContext | None, largest_body: int = LARGEST_BODY
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self.largest_body = largest_body
        self._loop = asyncio.get_running_loop()
        self._idle: list[HttpConnection] = []
        # Weak, since uvloop does not report the end of a connection whose creation was cancelled.
        self._open: WeakSet[HttpConnection] = WeakSet()
        self._closed = False

    def take(self) -> "HttpConnection | None":
        """An idle connection that is still usable; it belongs to the caller until `send`."""
        oldest = self._loop.time() - _IDLE_SECS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.stale():
                return connection
            connection.close()
        return None

    async def connection(self, seconds: float) -> "HttpConnection":
        """An idle or new connection, within `seconds`; raises `NotConnected`."""
        connection = self.take()
        if connection is not None:
            return connection
        if self._closed:
            raise NotConnected("closed")
        try:
            async with asyncio.timeout(min(seconds or CONNECT_SECS, CONNECT_SECS)):
                return await connect(lambda: HttpConnection(self), self._endpoint, self._tls)
        except TimeoutError as error:
            raise NotConnected("no connection in time") from error
        except (OSError, ssl.CertificateError) as error:
            raise NotConnected(connect_error(error)) from error

    async def ask(self, pieces: Sequence[Buffer], seconds: float) -> HttpResponse:
        """The response to a request, within `seconds`; 0: no limit.

        Raises `NotConnected`, `ConnectionLost`, `NoAnswer`, or `InvalidRequest` for a malformed
        response. Cancelling the wait closes the connection.
        """
        begun = self._loop.time()
        connection = await self.connection(seconds)
        left = max(seconds - (self._loop.time() - begun), 0.001) if seconds else 0.0
        future: asyncio.Future[HttpResponse] = self._loop.create_future()
        told = False

        def done(outcome: HttpResponse | Exception) -> None:
            nonlocal told
            told = True
            if future.done():
                return
            if isinstance(outcome, HttpResponse):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        connection.send(pieces, left, done)
        try:
            return await future
        except asyncio.CancelledError:
            # The response may have arrived since the future was cancelled, and the connection may
            # serve another request by now.
            if not told:
                connection.abort()
            raise

    def opened(self, connection: "HttpConnection") -> None:
        """Add a new connection."""
        self._open.add(connection)
        if self._closed:
            connection.abort()

    def rest(self, connection: "HttpConnection") -> None:
        """Make a connection available for another request."""
        self._idle.append(connection)

    def ending(self, connection: "HttpConnection") -> None:
        """Exclude a connection from further requests."""
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """Close all connections; requests in flight fail, and none may follow."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            connection.lose()
        await asyncio.sleep(0)  # lets them close


class HttpConnection(asyncio.BufferedProtocol):
    """A connection for one request at a time: idle, or waiting for the outcome of `send`."""

    def __init__(self, pool: HttpPool) -> None:
        self.idle_since = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._reader = ResponseReader(pool.largest_body)
        self._transport: asyncio.Transport | None = None
        self._done: Done | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._poll: select.poll | None = None

    def send(
        self,
        pieces: Sequence[Buffer],
        seconds: float,
        done: Done,
        sink: Callable[[bytes], None] | None = None,
    ) -> None:
        """Send a request; `done` is called with its outcome, within `seconds`.

        A `sink` receives the body of a successful response piece by piece. `done` is never called
        from within this call. After any exception but `NotConnected`, the server may have begun
        the request.
        """
        self._done = done
        self._reader.sink = sink
        if self._transport is None or self._transport.is_closing():  # closed since it was made
            self._loop.call_soon(self._finish, NotConnected("closed"))
            return
        if seconds:
            self._timer = self._loop.call_later(seconds, self._expire)
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def hold(self, held: bool) -> None:
        """Pause or resume reading the response."""
        if self._transport is None or self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def stale(self) -> bool:
        """True if the server has closed the idle connection, or sent unexpected bytes.

        The event loop may not have noticed yet.
        """
        if self._poll is None:
            # Not when the connection is made: it may be about to be dropped.
            assert self._transport is not None
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the idle connection."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without calling `done`."""
        self._done = None
        self._end()

    def lose(self) -> None:
        """Close the connection at once; a request in flight fails."""
        self._finish(ConnectionLost("closed"))

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._pool.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._done is None or self._transport is None:  # no request in flight
            self._end()
            return
        try:
            response = self._reader.received(nbytes)
        except InvalidRequest as error:
            self._finish(error)
            return
        if response is None:
            return
        # A server that answers before it has received the whole request does not read the rest.
        if response.reusable and not self._transport.get_write_buffer_size():
            done, self._done = self._done, None
            self._stop_timer()
            if self._reader.sink is not None:
                self._transport.resume_reading()  # reading may have been paused by the last piece
            self.idle_since = self._loop.time()
            self._pool.rest(self)
            done(response)
        else:
            self._finish(response)

    def eof_received(self) -> bool:
        self._pool.ending(self)
        return False  # False: the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.ending(self)
        if self._done is not None:
            whole = None if error is not None else self._reader.closed()
            # After an answer, a wrong port is not the reason.
            why = "closed by the server" if self.idle_since else CLOSED.format("HTTP")
            self._finish(whole or ConnectionLost(connect_error(error) if error else why))

    # --- the end of a request, and of the connection with it

    def _expire(self) -> None:
        self._finish(NoAnswer())

    def _finish(self, outcome: HttpResponse | Exception) -> None:
        done, self._done = self._done, None
        self._end()
        if done is not None:
            done(outcome)

    def _end(self) -> None:
        self._stop_timer()
        self._pool.ending(self)
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
