"""Listening sockets of the doors, on ports and on Unix sockets, and the addresses of clients.

A Unix socket is a file. Its server creates it with its final permissions, and removes it when it
accepts no more connections; a killed server leaves it behind, and the next one replaces it. A
socket on which a server listens is never replaced.
"""

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.core.identity import PeerFacts

if TYPE_CHECKING:
    from asyncio import BaseTransport  # late, since commands read settings without it

QUEUE = 4096  # connections that can wait to be accepted; others are retried after a second
CLOSED = "none"  # as a door's address: no port is opened
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("HBBI")  # of a socket filter: code, jumps if true and false, operand
_WITHOUT_SYN = b"".join(
    _INSTRUCTION.pack(*instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags of the TCP header
        (0x45, 0, 1, 0x02),  # SYN is set: go on, else leave out one
        (0x06, 0, 0, 0),  # drop the segment
        (0x06, 0, 0, 0xFFFFFFFF),  # take all of it
    )
)


def reserve(address: str, port: int, shared: bool = False) -> socket.socket:
    """A socket that reserves a port for listeners that share it; raises `OSError`.

    Other servers may listen on the port if it is `shared` with them.
    """
    probe = bind(address, port, shared)  # fails if another process listens
    name = probe.getsockname()
    probe.close()
    keeper = socket.socket(probe.family, socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        keeper.bind(name[:2])
    except OSError:
        keeper.close()
        raise
    return keeper


def bind(address: str, port: int, shared: bool = False) -> socket.socket:
    """A listening socket, one of several on its port if `shared`; raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
        listener.listen(QUEUE)  # listen now, so that a second door on this port is refused
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def refuse_connections(listener: socket.socket) -> None:
    """Let no further client connect to a port; those in the queue can still be accepted.

    A connection that the kernel makes between the last `accept` and `close` would be reset, with
    the request that its client has sent meanwhile. So segments that begin one are dropped, and sent
    again once the port is closed (`SO_ATTACH_FILTER`, see socket(7) and the kernel's
    networking/filter.rst).
    """
    if sys.platform != "linux" or listener.family == socket.AF_UNIX:
        return
    program = ctypes.create_string_buffer(_WITHOUT_SYN, len(_WITHOUT_SYN))
    count = len(_WITHOUT_SYN) // _INSTRUCTION.size
    filtering = struct.pack("HP", count, ctypes.addressof(program))
    with suppress(OSError):  # a sandbox that knows no filters
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filtering)


class UnixSocket:
    """A listening Unix socket with its file."""

    def __init__(self, path: str, mode: int) -> None:
        """Listen, with the permissions `mode`; raises `OSError`, also if a server listens there."""
        self.path = os.path.abspath(path)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Two servers must not both replace what a third one has left behind.
            fcntl.flock(folder, fcntl.LOCK_EX)
            _remove_left_behind(self.path)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                os.fchmod(self.listener.fileno(), mode)  # the file's, less the umask
                self.listener.bind(self.path)
                os.chmod(self.path, mode)
                self.listener.listen(QUEUE)
                # Kept while the socket is open; a later file may have the same number.
                self._file: tuple[int, int] | None = _identity(self.path)
            except OSError:
                self.listener.close()
                raise
        finally:
            os.close(folder)
        self.listener.setblocking(False)

    def remove(self) -> None:
        """Remove the file before the socket is closed, unless it is another's by now.

        Clients that wait can still be accepted.
        """
        with suppress(FileNotFoundError):
            if _identity(self.path) == self._file:
                os.unlink(self.path)
        self._file = None


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_left_behind(path: str) -> None:
    """Remove a socket on which nobody listens; raises `OSError` for any other file."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise FileExistsError(errno.EEXIST, "the file exists, and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # its queue is full
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def port_of(listeners: list[socket.socket]) -> int:
    """The port of the first listener that has one, else 0."""
    return next((s.getsockname()[1] for s in listeners if s.family != socket.AF_UNIX), 0)


def user_of(sock: socket.socket) -> str:
    """The client of a Unix socket in place of an address, `unix:` and its user's number."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return f"unix:{_CREDENTIALS.unpack(given)[1]}"


def peer_of(transport: "BaseTransport") -> PeerFacts:
    """The facts about the other end of a connection."""
    client = client_of(transport)
    address = client[0] if client else ""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return PeerFacts(address, None, *_CREDENTIALS.unpack(given))
    tls = transport.get_extra_info("ssl_object")
    return PeerFacts(address, (tls.getpeercert() or None) if tls is not None else None)


def client_of(transport: "BaseTransport") -> tuple[str, int] | None:
    """A client's address and port, 0 on a Unix socket; None if it is neither of TCP nor of that."""
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return user_of(sock), 0
