"""The native gRPC server: its sockets and its shutdown."""

import asyncio
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from headrace.doors.acceptor import ANNOUNCE_SECS, Acceptor, wait_for
from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.native.calls import (
    InferRpc,
    SessionRpc,
    TaskRpc,
)
from headrace.doors.grpc.native.connection import (
    PREFACE_SECS,
    GrpcConnection,
    Rpc,
    ServerContext,
)
from headrace.doors.grpc.options import GrpcOptions
from headrace.doors.tls import DoorTls
from headrace.engine.admission import Admission
from headrace.protocol.http2.protocol import Limits

_LOOK_SECS = 1.0  # between checks for unfinished requests and unread answers
_TURN_SECS = 0.002  # for such checks in one turn of the loop


class NativeServer(ServerContext):
    """Serves gRPC on the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        admission: Admission,
        max_request_bytes: int,
        access_log: bool,
        tls: DoorTls | None = None,
        options: GrpcOptions | None = None,
        door: str = "grpc",
    ) -> None:
        kinds: list[tuple[type[Rpc], Mapping[str, object]]] = [
            (InferRpc, handlers.direct),
            (TaskRpc, handlers.unary),
            (SessionRpc, handlers.sessions),
        ]
        procedures = {
            path: (kind, handler) for kind, table in kinds for path, handler in table.items()
        }
        chosen = options or GrpcOptions()
        super().__init__(
            procedures, handlers, admission, max_request_bytes, access_log,
            chosen, Limits(chosen.streams, chosen.window), door,
        )  # fmt: skip
        if handlers.gate is not None:
            handlers.gate.watch(self._forget_heads)
        self._tls = tls
        self._acceptors: list[Acceptor] = []
        self._look: asyncio.TimerHandle | None = None

    async def start(self, listeners: list[socket.socket]) -> None:
        """Start serving on bound sockets, with TLS except on Unix sockets."""
        tls = None if self._tls is None else self._tls.current
        for listener in listeners:
            acceptor = Acceptor(
                listener, lambda: GrpcConnection(self), self.admission.fail_accept,
                tls, PREFACE_SECS, self.admission.has_room, self.admission.proxies,
            )  # fmt: skip
            acceptor.start()
            self._acceptors.append(acceptor)
        self._look = self.loop.call_later(_LOOK_SECS, self._check_progress)

    async def announce(self, grace: float) -> None:
        """Implements `Server.announce`; waits for clients, at most half the `grace`."""
        self.draining = True
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in list(self.connections):
            connection.http2.drain()
        await wait_for(
            lambda: all(connection.http2.drained for connection in self.connections),
            min(ANNOUNCE_SECS, grace / 2),
        )
        for connection in list(self.connections):
            connection.http2.finish_drain()

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and wait for those in flight, at most `grace` seconds."""
        if self._look is not None:
            self._look.cancel()
        end = self.loop.time() + grace
        await self.announce(grace)
        if self.admission.exiting:
            self.end_unfinished()
        await self._empty(end - self.loop.time())
        for connection in list(self.connections):
            connection.abort()

    def end_unfinished(self) -> None:
        """Implements `GrpcServer.end_unfinished`."""
        for connection in list(self.connections):
            connection.end_unfinished()

    def _forget_heads(self) -> None:
        """Forget the heads of calls, whose refusals follow from rules that have changed."""
        for connection in self.connections:
            connection.http2.forget_heads()

    async def _empty(self, seconds: float) -> None:
        """Wait for the last connection to close, for at most `seconds`."""
        empty = asyncio.Event()
        self.on_empty = empty.set
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(empty.wait(), max(seconds, 0))

    def _check_progress(self) -> None:
        """Close connections whose clients send no preface, or make no progress."""
        self._check(deque(self.connections), self.loop.time())

    def _check(self, connections: deque[GrpcConnection], begun: float) -> None:
        """Check connections for as long as one turn of the loop may take; the rest in later ones.

        `begun` is when the first was checked.
        """
        now = self.loop.time()
        end = now + _TURN_SECS
        while connections and self.loop.time() < end:
            connections.popleft().check_progress(now)
        if connections:
            self._look = self.loop.call_later(0, self._check, connections, begun)
        else:
            at = max(begun + _LOOK_SECS, now)
            self._look = self.loop.call_at(at, self._check_progress)
