"""The native server: its sockets and its end."""

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import cast

from headrace.engine.admission import Admission
from headrace.transports.acceptor import ANNOUNCE_SECS, Acceptor, wait_for
from headrace.transports.grpc.access import UNAVAILABLE
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.native.host import Host
from headrace.transports.grpc.native.link import PREFACE_SECS, Link
from headrace.transports.grpc.options import GrpcOptions
from headrace.wire.http2.budget import Limits

_LOOK_SECS = 1.0  # between two looks at what clients have left unfinished, or unread
_FAREWELL_SECS = 0.1  # for streams that end by themselves when the server does


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
        self._acceptor: Acceptor | None = None
        self._look: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer on a bound socket from now on."""
        loop = self._host.loop
        host = self._host
        self._acceptor = Acceptor(
            listener, lambda: Link(host), host.admission.fail_accept, self._tls, PREFACE_SECS
        )
        self._acceptor.start()
        self._look = loop.call_later(_LOOK_SECS, self._check_progress)

    async def announce(self, grace: float) -> None:
        """`Server.announce`; waits for clients to know it, at most half the `grace`."""
        host = self._host
        host.draining = True
        if self._acceptor is not None:
            self._acceptor.close()
        for link in list(host.links):
            link.http2.drain()
        await wait_for(
            lambda: all(link.http2.drained for link in host.links), min(ANNOUNCE_SECS, grace / 2)
        )
        for link in list(host.links):
            link.http2.finish_drain()

    async def stop(self, grace: float) -> None:
        """Take no more calls, and wait for those under way, at most `grace` seconds."""
        if self._look is not None:
            self._look.cancel()
        loop = self._host.loop
        end = loop.time() + grace
        await self.announce(grace)
        await self._empty(min(_FAREWELL_SECS, end - loop.time()))
        for call in list(self._host.endless):
            call.abandon()
            call.close(UNAVAILABLE, "Server exiting")
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
            link.check_progress(now)
        self._look = loop.call_later(_LOOK_SECS, self._check_progress)


def port_of(listener: socket.socket) -> int:
    """The port that a bound socket has."""
    return cast(int, listener.getsockname()[1])
