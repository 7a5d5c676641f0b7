"""One end of a socket pair between two of the server's processes: frames, and files beside them."""

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Generic, TypeVar

from headrace.workers.elements import Buffer
from headrace.workers.frames import FrameReader, Header

READ = 64 << 10  # bytes; Python makes room for as many each time, and much room is slow to get
_SPACE = socket.CMSG_SPACE(4 * 253)  # for as many files as the system lets come with one message
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)  # to combine flags of `enum` takes longer than a read
_TRUNCATED = int(socket.MSG_CTRUNC)
_SEND_BYTES = 1 << 20  # that the system keeps of what is sent, if it may
K = TypeVar("K", bound=IntEnum)


class FilesLost(OSError):
    """A file has come for which this process has no descriptor left."""


class FrameSocket(Generic[K]):
    """Owns the socket, and the files that have come and are not taken, in `files`."""

    def __init__(self, sock: socket.socket, reader: FrameReader[K]) -> None:
        self.sock = sock
        self.reader = reader
        self.files: deque[int] = deque()
        self.full = False  # the last read gave as much as it may: there may be more
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)

    def receive(self, flags: int = 0) -> list[tuple[Header[K], bytes, Buffer]] | None:
        """The frames that are complete with one read; None if the other end has gone.

        Raises `OSError`, `BlockingIOError` if nothing has come, and `BrokenFrame`.
        """
        data, control, told, _ = self.sock.recvmsg(READ, _SPACE, _CLOEXEC | flags)
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.files.extend(array.array("i", payload[: len(payload) // 4 * 4]))
        if told & _TRUNCATED:
            raise FilesLost("too many files at once")
        self.full = len(data) == READ
        return self.reader.feed(data) if data else None

    def send(self, data: Buffer, files: Sequence[int] = ()) -> int:
        """Send as much as can go, with open files, if that is anything; raises `OSError`."""
        if not files:
            return self.sock.send(data)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        return self.sock.sendmsg([data], [rights])

    def close(self) -> None:
        """Close the socket, and the files that nobody has taken."""
        self.sock.close()
        while self.files:
            os.close(self.files.popleft())
