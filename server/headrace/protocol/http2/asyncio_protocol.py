"""Bytes between an asyncio transport and a `Connection` of either side.

The only part of this package that knows asyncio. Owned by the thread of its event loop.
"""

import asyncio
import socket
from typing import cast

from headrace.protocol.http2.connection import Connection

_PUMP = 1 << 20  # bytes of queued messages that are given to the socket at once
_WRITE_HIGH = 1 << 20  # bytes that the socket has not taken, from which on no more are pumped
_CLOSE_SECS = 10.0  # for what is written to be taken


class Http2Protocol(asyncio.BufferedProtocol):
    """One connection's socket, which is closed when the HTTP/2 connection is over.

    The connection's `wake` has to call `flush` later, at the latest in the next turn of the loop.
    """

    http2: Connection

    def __init__(
        self, http2: Connection, loop: asyncio.AbstractEventLoop, buffer: memoryview
    ) -> None:
        """`buffer` is where bytes are received: there only while they are taken in, so that all
        connections of the loop may have the same one.
        """
        self.http2 = http2
        self.sender = http2.sender
        self.streams = http2.streams
        self._receive = http2.receive
        self._loop = loop
        self._now = loop.time
        self._buffer = buffer
        self._rest = b""
        self._paused = False
        self._closed = False
        self._lost = False

    # --- for subclasses

    def admit(self) -> bool:
        """True if the connection is to be started."""
        return True

    def unread(self) -> None:
        """Something waits for the peer to read it, after a write."""

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, unless the peer does not speak HTTP/2, or is not admitted."""
        self._transport = cast(asyncio.Transport, transport)
        self._write, self._writelines = self._transport.write, self._transport.writelines
        self._transport.set_write_buffer_limits(_WRITE_HIGH)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            self.refuse("the server does not offer HTTP/2 over TLS")
        elif not self.admit():
            self.abort()
        else:
            sock = transport.get_extra_info("socket")
            if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.http2.start()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer to receive into, behind what is left of the last time."""
        rest = self._rest
        if not rest:
            return self._buffer
        self._buffer[: len(rest)] = rest
        return self._buffer[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take in so many bytes."""
        end = nbytes + len(self._rest)
        used = self._receive(self._buffer, end, self._now())
        self._rest = bytes(self._buffer[used:end]) if used < end else b""

    def eof_received(self) -> bool:
        """Close the socket: a peer that sends no more does not wait for anything either."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """End everything that is under way."""
        self._lost = True
        self.http2.lost()

    def pause_writing(self) -> None:
        """Pump no more: the peer does not keep up."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on pumping."""
        self._paused = False
        self.sender.rouse()

    # --- writing

    def flush(self) -> None:
        """Write what has collected."""
        sender = self.sender
        sender.awake = False
        if sender.queued and not self._paused:
            self.http2.pump(_PUMP)
        if sender.out:
            if self._lost:  # uvloop would raise, and what others have of this turn be left lying
                sender.out = []
                return
            if sender.large:
                self._writelines(sender.take())
            else:
                out, sender.out = sender.out, []
                self._write(b"".join(out))
        if sender.queued or self._paused:
            self.unread()
        if self.streams.over:
            self.close()
        elif sender.queued and sender.can_pump and not self._paused:
            sender.rouse()

    def close(self) -> None:
        """Close the socket when everything is written, or the peer takes too long to read it."""
        if not self._closed:
            self._closed = True
            self._transport.close()
            self._loop.call_later(_CLOSE_SECS, self._transport.abort)

    def refuse(self, why: str) -> None:
        """Close the socket at once, since the peer is none for us."""
        self.http2.failure = why
        self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        self._transport.abort()
