"""The native server: its sockets and its end."""

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import cast

from headrace.engine.admission import Admission
from headrace.transports.grpc.access import UNAVAILABLE
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.native.host import Host
from headrace.transports.grpc.native.link import PREFACE_SECS, Link
from headrace.transports.grpc.options import GrpcOptions
from headrace.wire.http2.budget import Limits

_LOOK_SECS = 1.0  # between two looks at what clients have left unfinished, or unread
_FAREWELL_SECS = 0.1  # for streams that end by themselves when the server does
_DRAIN_SECS = 1.0  # how long the answer to the PING of a GOAWAY is waited for
_BACKLOG = 2048


class NativeServer:
    """Serves gRPC on the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        admission: Admission,
        max_request_bytes: int,
        access_log: bool,
        tls: ssl.SSLContext | None = None,
        options: GrpcOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._host = Host(
            handlers, admission, max_request_bytes, access_log, options or GrpcOptions(),
            limits or Limits(),
        )  # fmt: skip
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._look: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer on a bound socket from now on."""
        loop = self._host.loop
        self._server = await loop.create_server(
            lambda: Link(self._host),
            sock=listener,
            ssl=self._tls,
            ssl_handshake_timeout=PREFACE_SECS if self._tls else None,
            backlog=_BACKLOG,
        )
        self._look = loop.call_later(_LOOK_SECS, self._check_progress)

    async def stop(self, grace: float) -> None:
        """Take no more calls, and wait for those under way, at most `grace` seconds."""
        if self._look is not None:
            self._look.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self._host.links):
            link.http2.drain()
        loop = self._host.loop
        end = loop.time() + grace
        await self._empty(min(_FAREWELL_SECS, grace))
        for call in list(self._host.endless):
            call.abandon()
            call.close(UNAVAILABLE, "Server exiting")
        await self._empty(min(_DRAIN_SECS, end - loop.time()))
        for link in list(self._host.links):
            link.http2.finish_drain()
        await self._empty(end - loop.time())
        for link in list(self._host.links):
            link.abort()

    async def _empty(self, seconds: float) -> None:
        """Wait for the last connection to close, at most so long."""
        empty = asyncio.Event()
        self._host.on_empty = empty.set
        if self._host.links:
            with suppress(TimeoutError):
                await asyncio.wait_for(empty.wait(), max(seconds, 0))

    def _check_progress(self) -> None:
        """Close connections whose clients have not begun, or make no progress."""
        loop = self._host.loop
        now = loop.time()
        for link in list(self._host.links):
            if not link.http2.settled and link.opened < now - PREFACE_SECS:
                link.abort()
            else:
                link.check_progress(now)
        self._look = loop.call_later(_LOOK_SECS, self._check_progress)


def port_of(listener: socket.socket) -> int:
    """The port that a bound socket has."""
    return cast(int, listener.getsockname()[1])
