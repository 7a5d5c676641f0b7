"""Listening sockets and their HTTP connections; one process may have several such servers."""

import asyncio
import socket
from random import uniform

from starlette.types import ASGIApp

from headrace.api.gate import Gate
from headrace.doors.acceptor import ANNOUNCE_SECS, Acceptor, wait_for
from headrace.doors.http.asgi import AsgiApplication
from headrace.doors.http.connection import Connection, FastPath, ServerState
from headrace.doors.listeners import port_of
from headrace.doors.tls import DoorTls
from headrace.engine.admission import Admission

_HANDSHAKE_SECS = 20.0  # for a TLS client, as for the preface of one of gRPC
_JITTER = 0.1  # so that not all clients reconnect at once
_LOOK_SECS = 1.0  # between checks for unfinished requests
_LAST_WRITES_SECS = 0.1  # for the error answers to abandoned requests


class HttpServer:
    """Serves one ASGI application on listening sockets."""

    def __init__(
        self,
        app: ASGIApp,
        listeners: list[socket.socket],
        keep_alive_secs: int,
        patience_secs: int,
        fast: FastPath | None = None,
        gate: Gate | None = None,
        max_age_secs: int = 0,
        admission: Admission | None = None,
        read_secs: int = 60,
        tls: DoorTls | None = None,
    ) -> None:
        """`patience_secs`: maximum wait for the next part of an unfinished request.

        `admission` counts connections and what they hold; None means no limits. A connection is
        closed if its client does not read an answer for `read_secs`.

        With a `fast` path, connections answer infer requests in front of `app`. If the `gate`
        forwards headers, their names are provided in original case. A connection is closed
        after the next answer once it is `max_age_secs` old, give or take a tenth; 0 for never. Unix
        sockets are without `tls`.
        """
        admission = admission or Admission(0, 0)
        self._application = AsgiApplication(app, gate)
        self._state = ServerState(
            self._application, admission, keep_alive_secs, patience_secs, read_secs, fast
        )
        self._max_age_secs = max_age_secs
        self._listeners = listeners
        self._tls = tls
        self._acceptors: list[Acceptor] = []
        self._look: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port on which the server listens, 0 if only on a Unix socket."""
        return port_of(self._listeners)

    def start(self) -> None:
        """Start serving."""
        admission = self._state.admission
        tls = None if self._tls is None else self._tls.current
        for listener in self._listeners:
            acceptor = Acceptor(
                listener, self._connection, admission.fail_accept, tls,
                _HANDSHAKE_SECS, admission.has_room, admission.proxies,
            )  # fmt: skip
            acceptor.start()
            self._acceptors.append(acceptor)
        self._check_time()

    def _connection(self) -> Connection:
        connection = Connection(self._state)
        if self._max_age_secs:
            age = self._max_age_secs * uniform(1 - _JITTER, 1 + _JITTER)
            connection.live_until(asyncio.get_running_loop().time() + age)
        return connection

    async def announce(self, grace: float) -> None:
        """Stop accepting connections, and close each one after its next answer.

        Waits for recently active clients, at most half the `grace`.
        """
        if not self._acceptors:
            return
        self._state.retiring = True
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in self._connections():
            connection.retire()
        now = asyncio.get_running_loop().time
        await wait_for(
            lambda: not any(c.awaited(now() - ANNOUNCE_SECS) for c in self._connections()),
            min(ANNOUNCE_SECS, grace / 2),
        )

    async def stop(self, grace: float) -> None:
        """Close the socket and idle connections; the others have `grace` seconds to be answered.

        Requests in flight after that are answered with 503.
        """
        self._state.retiring = True
        if self._acceptors:
            for acceptor in self._acceptors:
                acceptor.close()
            for connection in self._connections():
                connection.shutdown()
            await wait_for(self._is_empty, grace)
            if not self._is_empty():
                for connection in self._connections():
                    connection.give_up()
                await wait_for(self._is_empty, _LAST_WRITES_SECS)
        if self._look is not None:
            self._look.cancel()

    def _is_empty(self) -> bool:
        return not (self._state.connections or self._application.tasks)

    def _connections(self) -> list[Connection]:
        return list(self._state.connections)

    def end_unfinished(self) -> None:
        """Abandon incomplete requests; called when nothing new is admitted."""
        for connection in self._connections():
            connection.end_unfinished()

    def _check_time(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in self._connections():
            connection.check(now)
        self._look = loop.call_later(_LOOK_SECS, self._check_time)
