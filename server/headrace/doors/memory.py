"""Memory of clients on a Unix socket: beside the socket PATH, one at PATH.memory takes files.

A client connects, sends one byte with a sealed file of memory (`memfd_create`) attached, and gets
`ok` and the name of a region, or `no` and the reason. Requests over the doors name the region by
the protocol's extension for shared memory. It exists as long as that connection: nothing is left
when the client ends, however it does. Only the engine's process listens here, also with front ends.

Owned by the event loop.
"""

import asyncio
import logging
import os
import socket

from headrace.core.errors import InvalidRequest, ServerError
from headrace.doors.listeners import UnixSocket
from headrace.engine.shared_memory import Regions

log = logging.getLogger(__name__)

SUFFIX = ".memory"
_MOST_CLIENTS = 1024  # connections, each with a region at most
_PAUSE_SECS = 1.0  # after a connection that could not be accepted


class MemoryDoor:
    """Takes regions from clients and gives them to `regions`."""

    def __init__(self, unix: UnixSocket, regions: Regions) -> None:
        self.unix = unix
        self._regions = regions
        self._loop = asyncio.get_running_loop()
        self._clients: dict[socket.socket, str] = {}  # with their regions' names
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more clients, and give up all regions once requests do not use them."""
        self.unix.remove()
        if self._pause is not None:
            self._pause.cancel()
        if self.unix.listener.fileno() >= 0:
            self._loop.remove_reader(self.unix.listener.fileno())
            self.unix.listener.close()
        for client in list(self._clients):
            self._leave(client)

    def _listen(self) -> None:
        self._loop.add_reader(self.unix.listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self.unix.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no free descriptor
            log.error("cannot accept a client's memory: %s", error.strerror)
            self._loop.remove_reader(self.unix.listener.fileno())
            self._pause = self._loop.call_later(_PAUSE_SECS, self._listen)
            return
        if len(self._clients) >= _MOST_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = ""
        self._loop.add_reader(client.fileno(), self._hear, client)

    def _hear(self, client: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(client, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        if not data:
            self._leave(client)
            return
        try:
            if len(files) != 1 or self._clients[client]:
                raise InvalidRequest(f"expected one file for a connection, got {len(files)}")
            self._clients[client] = self._regions.lend(files.pop())
            answer = f"ok {self._clients[client]}"
        except (ServerError, OSError) as error:
            answer = f"no {error}"
        finally:
            for descriptor in files:
                os.close(descriptor)
        try:
            client.send(answer.encode())
        except OSError:  # it has left, or does not read
            self._leave(client)

    def _leave(self, client: socket.socket) -> None:
        if name := self._clients.pop(client):
            self._regions.withdraw(name)
        self._loop.remove_reader(client.fileno())
        client.close()
