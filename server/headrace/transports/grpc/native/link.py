"""One client's connection: the socket's side of `headrace.wire.http2`."""

import asyncio
import logging
import socket
from functools import partial
from math import inf
from random import uniform
from typing import TYPE_CHECKING, cast

from headrace.core.limits import undelivered
from headrace.engine.progress import Progress
from headrace.transports.grpc.native.head import RESPONSE_HEAD
from headrace.wire.http2.keep_alive import Due, Watch
from headrace.wire.http2.protocol import ErrorCode
from headrace.wire.http2.server_connection import ServerConnection

if TYPE_CHECKING:
    from headrace.transports.grpc.native.host import Host

log = logging.getLogger(__name__)

_PUMP = 1 << 20  # bytes of queued messages that are given to the socket at once
_WRITE_HIGH = 1 << 20  # bytes that the socket has not taken, from which on nothing more is read
_CLOSE_SECS = 10.0
_FEW = 8  # calls of a connection, whose heads are not worth counting
PREFACE_SECS = 20.0  # a client that has not said what it wants by then is hung up on
_KEEP_ALIVE_PING = b"alive? \0"
_RETIRED = "max_age"  # in GOAWAY, as gRPC's servers say it


class Link(asyncio.BufferedProtocol):
    """Carries bytes between a socket and a `ServerConnection`; closes the socket when that is over.

    Nothing is read while the client does not take what is written, so what waits is bounded.
    """

    def __init__(self, host: "Host") -> None:
        self.host = host
        self.peer = ""  # the client's address, without its port
        self._buffer = host.buffer
        self._rest = b""
        self._paused = False
        self._closed = False
        self._lost = False
        self._now = host.loop.time
        self.account = host.nobody  # until the connection is taken
        self.progress = Progress(self.account, host.patience_secs)
        self._last = 0  # stream, as it was when it was last looked for idleness
        self._idle_since = 0.0
        self.http2 = ServerConnection(
            partial(host.interpret, self), RESPONSE_HEAD, self._wake, host.limits, host.keep_alive
        )
        self.sender = self.http2.sender
        self.streams = self.http2.streams
        self._receive = self.http2.receive
        self.opened = 0.0  # when; in seconds of the loop's clock
        self._watch: Watch | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write
        self._transport.set_write_buffer_limits(_WRITE_HIGH)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            transport.abort()  # type: ignore[attr-defined]
            return
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else str(name)
        account = self.host.admission.connect("grpc", self.peer)
        if account is None:
            self._transport.abort()
            return
        self.account = account
        self.progress = Progress(account, self.host.patience_secs)
        self.opened = self._idle_since = self._now()
        self.host.links.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.http2.start()
        if self.host.draining:
            self.http2.drain()
        self._watch = Watch(self.host.keep_alive, self.opened, uniform(-1, 1))
        self._timer = self.host.loop.call_at(self._watch.at, self._look)

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
        used = self._receive(self._buffer, end, self._now())
        self._rest = bytes(self._buffer[used:end]) if used < end else b""

    def eof_received(self) -> bool:
        """The client sends nothing any more: it does not wait for answers either."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Everything that is under way is cancelled."""
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self.http2.lost()
        self.host.lost(self)
        self.account.close()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self._paused = True
        self._transport.pause_reading()
        self._count_unread()

    def resume_writing(self) -> None:
        """It does again."""
        self._paused = False
        self._transport.resume_reading()
        self._wake()

    # --- time

    def _look(self) -> None:
        """Do what is due, and look again in time."""
        watch, http2, now = self._watch, self.http2, self._now()
        assert watch is not None, "a connection that was not made. This is a bug."
        # While nothing is read, because the client does not read, nothing can be heard either.
        heard = now if self._paused else max(http2.streams.now, self.opened)
        due = watch.look(now, heard, bool(self.streams.open), http2.sent)
        if due is Due.GIVE_UP:
            log.debug("gave %s up: it does not answer a PING", self.peer)
            self.abort()
            return
        if due is Due.PING:
            self.sender.ping(_KEEP_ALIVE_PING)
        elif due is Due.RETIRE:
            http2.drain(_RETIRED)
        elif due is Due.FINISH:
            http2.finish_drain()
        elif due is Due.CUT:
            http2.fail(ErrorCode.NO_ERROR, _RETIRED)
        self._timer = self.host.loop.call_at(watch.at, self._look)

    def check_progress(self, now: float) -> None:
        """Give up what its client begins, or asks for, and makes no progress with."""
        if not self.http2.settled and self.opened < now - PREFACE_SECS:
            self.abort()
            return
        if not self._reads(now):
            log.debug("gave %s up: it does not read", self.peer)
            self.abort()
            return
        if not self._paused:  # while nothing is read, nothing can be expected
            for call in list(self.streams.open.values()):
                call.look(now)
        self._check_idle(now)

    def _check_idle(self, now: float) -> None:
        """End a connection that has had no calls for long, as the client expects it."""
        if self.streams.open or self.streams.last != self._last:
            self._last, self._idle_since = self.streams.last, now
            return
        most = self.host.idle_secs or inf
        if self.progress.idles(self._idle_since, now, most):
            self.http2.drain("max_idle")
        if self.progress.idles(self._idle_since + PREFACE_SECS, now, most):
            self.http2.finish_drain()  # whatever the client has made of it

    def _reads(self, now: float) -> bool:
        """Whether the client reads what waits for it; its calls' heads count with that."""
        unread, heads = self._unread, 0
        if len(self.streams.open) > _FEW:
            heads = sum(call.head_size for call in self.streams.open.values())
        if not (unread or heads or self.account.unread or self.account.kept):
            return True
        moved = self.sender.pumped - undelivered(self._transport)
        return self.progress.reads(unread, heads, moved, now)

    @property
    def _unread(self) -> int:
        """Bytes that the client has to read."""
        waiting: int = self.sender.queued + self._transport.get_write_buffer_size()
        return waiting

    def _count_unread(self) -> None:
        """Count what the client has to read."""
        if not self.progress.within(self._unread, self.account.kept):
            self.abort()

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
                self._transport.writelines(sender.take())
            else:
                out, sender.out = sender.out, []
                self._write(b"".join(out))
        if sender.queued or self._paused:
            self._count_unread()
        if self.streams.over:
            self._close()
        elif sender.queued and sender.can_pump and not self._paused:
            sender.rouse()

    def _close(self) -> None:
        """Close the socket when everything is written, or the client takes too long to read it."""
        if self._closed:
            return
        self._closed = True
        if self.http2.failure:
            log.debug("hung up on %s: %s", self.peer, self.http2.failure)
        self._transport.close()
        self.host.loop.call_later(_CLOSE_SECS, self._transport.abort)

    def _wake(self) -> None:
        self.host.flush_soon(self.flush)

    def abort(self) -> None:
        """Close the socket at once."""
        self._transport.abort()
