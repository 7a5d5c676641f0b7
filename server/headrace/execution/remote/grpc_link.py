"""One connection to a server of gRPC: the socket's side of `headrace.wire.http2`.

Owned by the event-loop thread.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from headrace.execution.remote.connect_errors import CLOSED, PORT, connect_error
from headrace.wire.grpc_response import ResponseBlock
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.client_connection import ClientConnection

_BUFFER = 256 << 10  # bytes that are received at once
_PUMP = 1 << 20  # bytes of queued messages that are given to the socket at once
_WRITE_HIGH = 1 << 20  # bytes that the socket has not taken, from which on no more are pumped
_LIMITS = Limits(connection_window=256 << 20)
_CLOSE_SECS = 5.0
# A peer that is gone without a word: data that it does not acknowledge, or probes.
_SILENCE_SECS = 30
_PROBE_SECS = 10


def receive_buffer() -> memoryview:
    """Where links receive. Bytes are here only while they are taken in: a loop needs one."""
    return memoryview(bytearray(_BUFFER))


class Link(asyncio.BufferedProtocol):
    """Carries bytes between a socket and a `ClientConnection`.

    `greeted` is done when the server has said that it speaks HTTP/2; `heard` is when it last said
    anything, by the loop's clock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        progressed: Callable[[], None],
        closed: Callable[["Link"], None],
    ) -> None:
        """`buffer` is where bytes are received; other links of the loop may have the same.

        `progressed` is called when something has come or gone, `closed` when there is no
        connection.
        """
        self.heard = 0.0
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.http2 = ClientConnection(ResponseBlock, self._wake, _LIMITS)
        self.streams = self.http2.streams
        self._loop = loop
        self._buffer = buffer
        self._progressed = progressed
        self._closed = closed
        self._sender = self.http2.sender
        self._rest = b""
        self._paused = False
        self._closing = False
        self._transport: asyncio.Transport | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_HIGH)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            self._refuse("the server does not offer HTTP/2 over TLS")
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            _watch(sock)
        self.http2.start()
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what comes next: behind what is left of the last time."""
        rest = self._rest
        if not rest:
            return self._buffer
        self._buffer[: len(rest)] = rest
        return self._buffer[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        end = nbytes + len(self._rest)
        self.heard = now = self._loop.time()
        if not self.http2.settled and bytes(self._buffer[:5]) == b"HTTP/":
            self._refuse("the server does not speak HTTP/2")
            return
        used = self.http2.receive(self._buffer, end, now)
        self._rest = bytes(self._buffer[used:end]) if used < end else b""
        if not self.greeted.done() and self.http2.settled and not self.http2.closing:
            self.greeted.set_result(None)
        self._progressed()

    def eof_received(self) -> bool:
        """The server sends nothing any more."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Everything that is under way has ended."""
        self._transport = None  # what is still to be written goes nowhere
        self.http2.failure = self.http2.failure or (connect_error(error) if error else "")
        if not self.greeted.done():
            why = self.http2.failure or self.http2.said
            why = f"{why}; {PORT.format('gRPC')}" if why else CLOSED.format("gRPC")
            self.greeted.set_exception(ConnectionError(why))
        self._closed(self)
        self.http2.lost()

    def pause_writing(self) -> None:
        """The server does not keep up."""
        self._paused = True

    def resume_writing(self) -> None:
        """It does again."""
        self._paused = False
        self._wake()

    # --- writing

    def flush(self) -> None:
        """Write what has collected."""
        sender, transport = self._sender, self._transport
        sender.awake = False
        if transport is None:
            return
        if sender.queued and not self._paused:
            self.http2.pump(_PUMP)
        if sender.out:
            self.streams.written = self.streams.last
            buffers = sender.take()
            if len(buffers) == 1:
                transport.write(buffers[0])
            else:
                transport.writelines(buffers)
        if self.http2.closing:
            self.close()
            return
        if sender.can_pump and not self._paused:
            sender.rouse()
        self._progressed()  # a stream that we have ended makes room, too

    def close(self) -> None:
        """Close the socket when everything is written."""
        if not self._closing and self._transport is not None:
            self._closing = True
            self._transport.close()
            self._loop.call_later(_CLOSE_SECS, self._transport.abort)

    def abort(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, why: str) -> None:
        self.http2.failure = why
        self.abort()

    def _wake(self) -> None:
        self._loop.call_soon(self.flush)


def _watch(sock: socket.socket) -> None:
    """Have the system see to it that a dead peer is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_SECS),
        ("TCP_KEEPINTVL", _PROBE_SECS),
        ("TCP_KEEPCNT", _SILENCE_SECS // _PROBE_SECS),
        ("TCP_USER_TIMEOUT", _SILENCE_SECS * 1000),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
