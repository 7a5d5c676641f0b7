"""The layer between an asyncio transport and a `Connection` of either side.

The only module of this package that depends on asyncio. Owned by the event-loop thread.
"""

import asyncio
import os
import socket
from typing import cast

from headrace.core.turns import Turns
from headrace.protocol.http2.connection import Connection
from headrace.protocol.http2.protocol import HEAD_SIZE

# Bytes of queued messages written to the socket per step: 1 MiB of a tensor, and what is around it.
_PUMP = (1 << 20) + (64 << 10)
_WRITE_HIGH = 1 << 20  # bytes unsent above which pumping stops
_CLOSE_SECS = 10.0  # for the peer to read what was written


class Http2Protocol(asyncio.BufferedProtocol):
    """One connection's socket, which is closed when the HTTP/2 connection ends.

    The connection's `wake` has to schedule `flush`, at the latest for the next turn of the loop.
    """

    http2: Connection

    def __init__(
        self,
        http2: Connection,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        turns: Turns | None = None,
    ) -> None:
        """`buffer` receives bytes; it is in use only while they are processed, so that all
        connections of the loop may share one. `turns` are the loop's, if connections share them.
        """
        self.http2 = http2
        self.sender = http2.sender
        self.streams = http2.streams
        self._receive = http2.receive
        self._data = http2.data
        self._socket = -1  # the descriptor to read from directly; -1 if there is none
        self._loop = loop
        self._now = loop.time
        self._buffer = buffer
        self._rest = b""
        self._plain = True  # there is no rest, nor is a long message read in place
        self._placed = False  # the transport reads to the place of a long message
        self._turns = turns or Turns()
        self._long = 0  # bytes of the rest, if they are more than the buffer holds
        self._waits = False  # for its turn to process the rest; nothing is read meanwhile
        self._paused = False
        self._closed = False  # this side has closed it, or it is lost
        self._lost = False
        self._over = False  # lost, and all streams have ended

    # --- for subclasses

    def admit(self) -> bool:
        """True if the connection is to be started."""
        return True

    def unread(self) -> None:
        """Called after a write if data remains that the peer has not read."""

    def hold(self, nbytes: int) -> None:
        """Called for memory taken besides the shared buffer, or released."""

    def let_go(self) -> None:
        """Called last, once all streams of the lost connection have ended."""
        self.sender.clear()

    def read_on(self) -> None:
        """Resume reading, after processing what was received."""
        self._transport.resume_reading()

    # --- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface, unless the peer does not speak HTTP/2, or is not admitted."""
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
            if sock is not None and encrypted is None:
                self._socket = sock.fileno()
            if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.http2.start()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer to receive into, behind unprocessed bytes."""
        if self._plain:
            return self._buffer
        rest, buffer = self._rest, self._buffer
        if not rest:
            place = self._data.next_place()
            self._placed = place is not None
            return buffer[:HEAD_SIZE] if place is None else place
        buffer[: len(rest)] = rest
        return buffer[len(rest) :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` received bytes."""
        if self._placed:
            self._placed = False
            self._read_in_place(nbytes)
        else:
            if not self._plain:
                nbytes += len(self._rest)
            used = self._receive(self._buffer, nbytes, self._now(), self._turns.share)
            if used == nbytes and self._plain and not self._data.regular:
                return
            self._rest = bytes(self._buffer[used:nbytes])
            if self._reads_in_place() and not self._rest:
                self._read_in_place()
        if self.http2.more:
            self._put_off()
        self._plain = not (self._rest or self._reads_in_place())

    def _reads_in_place(self) -> bool:
        return self._data.regular and self._socket >= 0

    def _read_in_place(self, taken: int = 0) -> None:
        """Read more of a long message, to its own memory, after `taken` bytes in `next_place`.

        A transport offers no such reads. Of its own it does only one of a frame's rest, or head,
        before each of these: to notice that there is more, or nothing, or that the socket fails.
        """
        rest, drained = self.http2.scatter(self._scatter, self._now(), taken)
        if rest:
            self._process(memoryview(rest), len(rest))
        if not (drained or self._waits or self._transport.is_closing()):
            self._transport.pause_reading()
            self._loop.call_soon(self._read_again)  # in the next turn of the loop, after others

    def _process(self, view: memoryview, end: int) -> None:
        used = self._receive(view, end, self._now(), self._turns.share)
        self._rest = bytes(view[used:end])
        self._plain = not (self._rest or self._reads_in_place())

    def _scatter(self, buffers: list[memoryview]) -> int:
        try:
            return os.readv(self._socket, buffers)
        except OSError:  # nothing to read, or an error, after which the transport finds the end
            return 0

    def _read_again(self) -> None:
        if not (self._lost or self._waits or self._transport.is_closing()):
            self.read_on()

    def _put_off(self) -> None:
        """Leave the rest for a later turn of the loop."""
        if not self._waits:
            self._waits = True
            self._transport.pause_reading()
            if len(self._rest) > len(self._buffer):
                self._long = len(self._rest)
                self.hold(self._long)
        self._turns.put_off(self._go_on)

    def _go_on(self) -> None:
        """Process the rest, as far as one turn allows."""
        if self._lost:
            return
        self.http2.more = False
        self._process(memoryview(self._rest), len(self._rest))
        if self.http2.more:
            self._put_off()
        elif not self._lost:
            self._waits = False
            self._let_go_of_rest()
            self.read_on()

    def _let_go_of_rest(self) -> None:
        if self._long:
            self.hold(-self._long)
            self._long = 0

    def eof_received(self) -> bool:
        """Close the socket: a peer that has finished sending does not wait for answers either."""
        return self._socket >= 0 and self._turns.end_later(self._transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        """End all streams."""
        self._lost = self._closed = True
        self._let_go_of_rest()
        self._end_streams()

    def _end_streams(self) -> None:
        """End streams of a lost connection, as many as one turn allows."""
        if self._over:
            return
        if self.http2.lost(self._turns.share):
            self._turns.put_off(self._end_streams)
        elif self._lost:
            self._over = True
            self.let_go()

    def pause_writing(self) -> None:
        """Stop pumping: the peer does not keep up."""
        self._paused = True

    def resume_writing(self) -> None:
        """Resume pumping."""
        self._paused = False
        self.sender.rouse()

    # --- writing

    def flush(self) -> None:
        """Write the collected frames."""
        if self._closed:
            return
        sender = self.sender
        sender.awake = False
        if sender.queued and not self._paused:
            self.http2.pump(_PUMP)
        if sender.large:
            self._writelines(sender.take())
        elif sender.out:
            out, sender.out = sender.out, []
            self._write(b"".join(out))
        if sender.queued or self._paused:
            self.unread()
        if self.streams.over:
            if self.streams.open:  # it has failed
                self._end_streams()
            self.close()
        elif sender.queued and sender.can_pump and not self._paused:
            sender.rouse()

    def close(self) -> None:
        """Close the socket once everything is written, or the peer takes too long to read it."""
        if not self._closed:
            self._closed = True
            self._transport.close()
            self._loop.call_later(_CLOSE_SECS, self._transport.abort)

    def refuse(self, why: str) -> None:
        """Close the socket at once, since the peer does not speak HTTP/2."""
        self.http2.failure = why
        self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        self._transport.abort()
