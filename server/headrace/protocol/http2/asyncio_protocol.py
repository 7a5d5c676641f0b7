"""The layer between an asyncio transport and a `Http2Connection` of either side.

The only module of this package that depends on asyncio. Owned by the event-loop thread.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import cast

from headrace.core.turns import LONG_READ, Turns
from headrace.protocol.http2.connection import Http2Connection
from headrace.protocol.http2.protocol import HEAD_SIZE
from headrace.protocol.http2.streams import Memory

# Bytes of queued messages written to the socket per step: 1 MiB of a tensor, and what is around it.
_PUMP = (1 << 20) + (64 << 10)
_WRITE_HIGH = 1 << 20  # bytes unsent above which pumping stops
# A client that has sent so many bytes of a message, read in place, within so many seconds is faster
# than this side if each of its frames wakes the loop. While at least as many are missing, more of
# them are waited for, but not longer than that for any bytes.
_FAST, _FAST_SECS = 1 << 20, 0.02
_GATHERED = 512 << 10  # bytes
_GATHER_SECS = 0.005
_END_UNITS = 8  # of `Turns.share`, for the end of a stream whose call is under way
_CLOSE_SECS = 10.0  # for the peer to read what was written


class LowWater:
    """The bytes from which on a socket is readable: many, while a fast client sends a long message.

    Each of its frames would wake the loop otherwise, which takes longer than reading them. Other
    frames of the client wait with them, but no longer than `_GATHER_SECS` once it pauses.
    """

    def __init__(
        self, set_option: Callable[[int, int, int], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`set_option` is the socket's."""
        self.received = 0  # bytes of messages, read in place
        self._counted, self._at = 0, 0.0  # `received` at the last update, and its time
        self._timer: asyncio.TimerHandle | None = None  # set while the mark is high
        self._set_option = set_option
        self._loop = loop

    def counts(self, nbytes: int) -> bool:
        """Count further bytes; true if an update is due."""
        self.received += nbytes
        return self._timer is not None or self.received - self._counted >= _FAST

    def update(self, missing: int) -> None:
        """Raise or lower the mark: so many bytes of the message are still to come."""
        now = self._loop.time()
        fast = now - self._at <= _FAST_SECS
        self._counted, self._at = self.received, now
        if missing < _FAST:
            self.close()
        elif fast and self._timer is None:
            self._set(_GATHERED)
            self._timer = self._loop.call_later(_GATHER_SECS, self._look)

    def close(self) -> None:
        """Lower the mark, and look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._set(1)

    def _look(self) -> None:
        """Lower the mark if nothing was read for `_GATHER_SECS`."""
        left = self._at + _GATHER_SECS - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.close()

    def _set(self, nbytes: int) -> None:
        with suppress(OSError):  # it is closed
            self._set_option(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


class Http2Protocol(asyncio.BufferedProtocol):
    """One connection's socket, which is closed when the HTTP/2 connection ends.

    The connection's `wake` has to schedule `flush`, at the latest for the next turn of the loop.
    """

    http2: Http2Connection

    def __init__(
        self,
        http2: Http2Connection,
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
        self._low: LowWater | None = None  # for the descriptor
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
                self._low = LowWater(sock.setsockopt, self._loop)
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
        elif not (self._plain or self._rest) and self._reads_in_place():
            self._read_in_place(0, bytes(self._buffer[:nbytes]))
        else:
            if not self._plain:
                nbytes += len(self._rest)
            turns, now = self._turns, self._now()
            turns.room -= 1
            if turns.room < 0 and turns.full(self._loop):
                self._rest = bytes(self._buffer[:nbytes])
                self._plain = False
                self._put_off()
                return
            if nbytes < LONG_READ:
                used = self._receive(self._buffer, nbytes, now, turns.share)
            else:
                share, begun = turns.begin(self._loop), perf_counter()
                used = self._receive(self._buffer, nbytes, now, share)
                turns.spend(perf_counter() - begun)
            if used == nbytes and self._plain and not self._data.regular:
                if nbytes == len(self._buffer):
                    self._let_others()
                return
            self._rest = bytes(self._buffer[used:nbytes])
            if self._reads_in_place() and not self._rest:
                self._read_in_place()
        if self.http2.more:
            self._put_off()
        elif nbytes >= len(self._buffer) and not self._data.regular:
            self._let_others()
        self._plain = not (self._rest or self._reads_in_place())

    def _let_others(self) -> None:
        """Read on in the next turn of the loop; a transport fills the buffer 32 times before."""
        if not (self._waits or self._transport.is_closing()):
            self._transport.pause_reading()
            self._loop.call_soon(self._read_again)

    def _reads_in_place(self) -> bool:
        return self._data.regular and self._socket >= 0

    def _read_in_place(self, taken: int = 0, head: bytes = b"") -> None:
        """Read more of a long message, to its own memory; the arguments are those of `scatter`.

        A transport offers no such reads. Of its own it does only one of a frame's rest, or head,
        before each of these: to notice that there is more, or nothing, or that the socket fails.
        """
        rest, drained = self.http2.scatter(self._scatter, self._now(), taken, head)
        if rest:
            self._process(memoryview(rest), len(rest))
        if self._low is not None and self._low.counts(taken):
            self._low.update(self._data.missing)
        if not drained:
            self._let_others()

    def _process(self, view: memoryview, end: int) -> None:
        used = self._receive(view, end, self._now(), self._turns.share)
        self._rest = bytes(view[used:end])
        self._plain = not (self._rest or self._reads_in_place())

    def _scatter(self, buffers: list[Memory]) -> int:
        try:
            nbytes = os.readv(self._socket, buffers)
        except OSError:  # nothing to read, or an error, after which the transport finds the end
            return 0
        if self._low is not None:
            self._low.received += nbytes
        return nbytes

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
        if self._low is not None:
            self._low.close()
        self._let_go_of_rest()
        self._end_streams()

    def _end_streams(self) -> None:
        """End streams of a lost connection, as many as one turn allows."""
        if self._over:
            return
        if self.http2.lost(max(self._turns.share // _END_UNITS, 1)):
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
