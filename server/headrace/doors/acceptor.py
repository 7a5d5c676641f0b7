"""A listening socket whose connections are accepted here instead of by the event loop.

The loop's own servers close while connections are in the kernel's queue, which resets them, and
uvloop's silently drop clients when no descriptor is left. An `Acceptor` accepts the queued
connections before it closes, and counts and logs failures. Owned by the event loop.

A TLS handshake costs a millisecond of the loop, as soon as its client has said hello. So sockets
wait here for that, and one handshake begins per turn; all of them count as connections.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

_QUEUE = 2048  # connections that can wait to be accepted
_PAUSE_SECS = 1.0  # pause after a failure that would repeat at once
_LOG_SECS = 10.0  # between log lines about failures
_LOOK_SECS = 0.02  # polling interval of `wait_for`
ANNOUNCE_SECS = 1.0  # for clients to notice the announcement


class Acceptor:
    """Makes a protocol by `make` for each connection; `failed` is called for each failure.

    When descriptors are exhausted, clients are not left hanging: one spare descriptor is kept to
    accept a connection and close it at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        failed: Callable[[], object],
        tls: ssl.SSLContext | None = None,
        handshake_secs: float | None = None,
        room: Callable[[int], bool] = lambda connecting: True,
    ) -> None:
        """`handshake_secs` and `room` are for TLS alone.

        `room` is asked for each connection, with the number of those whose handshake is not over.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._failed = failed
        self._tls = tls
        self._handshake_secs = handshake_secs if tls else None
        self._spare = -1  # spare descriptor, closed to accept a connection
        self._room = room
        self._connecting: set[asyncio.Task[None]] = set()
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}  # until their client's hello
        self._greeted: deque[socket.socket] = deque()  # their handshake is to begin
        self._pause: asyncio.TimerHandle | None = None
        self._log_at = 0.0
        self._unlogged = 0
        self.closed = False

    def start(self) -> None:
        """Start accepting."""
        self._pause = None
        self._keep_spare()
        # By its number: uvloop would delay closing the socket to its next turn.
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept the queued connections, and close the socket."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._listener.fileno())
        for _ in range(_QUEUE):  # bounded, since a flood would never end
            if not self._accept():
                break
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)

    def _accept(self) -> bool:
        """Accept one connection; returns True if another one may be queued.

        The loop calls it for each connection: checking for another one costs more than a turn.
        """
        try:
            sock, _peer = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:  # the client has disconnected
            return True
        except OSError as error:
            return self._fail(error)
        sock.setblocking(False)
        if self._tls is None:
            self._begin(sock)
        elif self._room(len(self._silent) + len(self._greeted) + len(self._connecting)):
            timer = self._loop.call_later(self._handshake_secs or 0, self._forget, sock)
            self._silent[sock] = timer
            self._loop.add_reader(sock.fileno(), self._on_hello, sock)
        else:
            sock.close()
        return True

    def _forget(self, sock: socket.socket) -> None:
        """Close a connection whose client has not said anything."""
        del self._silent[sock]
        self._loop.remove_reader(sock.fileno())
        sock.close()

    def _on_hello(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock.fileno())
        self._silent.pop(sock).cancel()
        self._greeted.append(sock)
        if len(self._greeted) == 1:
            self._loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        self._begin(self._greeted.popleft())
        if self._greeted:
            self._loop.call_soon(self._begin_next)

    def _begin(self, sock: socket.socket) -> None:
        task = self._loop.create_task(self._connect(sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_secs
            )
        except OSError as error:  # disconnected, or not TLS
            log.debug("a connection was not made: %s", error)
            sock.close()

    def _fail(self, error: OSError) -> bool:
        """Handle a connection that cannot be accepted; returns True to go on at once."""
        self._failed()
        self._unlogged += 1
        now = self._loop.time()
        if now >= self._log_at:
            self._log_at = now + _LOG_SECS
            log.error(
                "cannot accept %d connection%s: %s; they are closed or queued", self._unlogged,
                "s" if self._unlogged > 1 else "", error.strerror,
            )  # fmt: skip
            self._unlogged = 0
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._turn_away():
            return True
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(_PAUSE_SECS, self.start)
        return False

    def _turn_away(self) -> bool:
        """Close the first queued connection; returns False without a descriptor to do so."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        with suppress(OSError):  # disconnected, or the descriptor was taken
            self._listener.accept()[0].close()
        self._keep_spare()
        return self._spare >= 0

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


async def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Poll a condition until it holds, for at most `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition() and loop.time() < end:  # noqa: ASYNC110  # too many ways for an event
        await asyncio.sleep(_LOOK_SECS)
