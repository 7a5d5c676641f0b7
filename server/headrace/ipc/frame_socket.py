"""Sockets between the server's processes: frames in both directions, with open files."""

import array
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from headrace.ipc.elements import Buffer
from headrace.ipc.frames import FrameKind, Header

# A frame: its header, meta and data, or what is received of the latter if it is in a slot's file.
Received = tuple[Header[FrameKind], bytes, Buffer]

READ = 64 << 10  # bytes; Python allocates as many each time, and large allocations are slow
SPACE = socket.CMSG_SPACE(4 * 253)  # for the maximum of files per message
# Ints, since combining enum flags takes longer than a read.
CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_INT = struct.Struct("i")
_SEND_BYTES = 1 << 20  # send buffer of the socket, if permitted


class FilesLost(OSError):
    """A received file exceeds this process's limit of descriptors."""


class FrameSocket:
    """Either end of a pair of sockets.

    Owns the socket, and received files that were not taken yet, in `files`.

    Its owner reads by `sock.recvmsg(READ, SPACE, CLOEXEC)`, and calls `keep` unless that returned
    no control messages and the flags `CLOEXEC`: a call per read is saved for small frames.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.files: deque[int] = deque()
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)

    def keep(self, control: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Keep the files received with a message; raises `FilesLost`."""
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.files.extend(array.array("i", payload[: len(payload) // 4 * 4]))
        if flags & _TRUNCATED:
            raise FilesLost("too many files at once")

    def send(self, data: Buffer, files: Sequence[int] = ()) -> int:
        """Send as much as possible, with open files if anything is sent; raises `OSError`."""
        if not files:
            return self.sock.send(data)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        return self.sock.sendmsg([data], [rights])

    def close(self) -> None:
        """Close the socket, and the files that were not taken."""
        self.sock.close()
        while self.files:
            os.close(self.files.popleft())


def unread(sock: socket.socket) -> int:
    """Bytes that were sent and that the other end has not received, by TCP: acknowledged.

    Of Unix sockets with the kernel's own for each message.
    """
    (queued,) = _INT.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT.size)))
    return int(queued)
