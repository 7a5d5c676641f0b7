"""The worker's end of the socket to the server: waits for frames, and sends them."""

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.workers.elements import Buffer
from headrace.workers.frames import (
    IN_FILE,
    INLINE,
    KEPT,
    NEW_FILE,
    BrokenFrame,
    FrameReader,
    Header,
    Kind,
    pack_header,
)
from headrace.workers.memory import InFile, OutFile, descriptors

_READ = 256 << 10
_SPACE = socket.CMSG_SPACE(4 * 16)


class Parcel(NamedTuple):
    """Data on their way: in the frame, or in a file, which is a new one with its descriptor."""

    data: bytes
    size: int
    flags: int
    descriptor: int


class Link:
    """Frames over a blocking socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._frames: deque[tuple[Header, bytes, bytes]] = deque()
        self._descriptors: deque[int] = deque()
        self._lock = threading.Lock()
        self._in: dict[int, InFile] = {}
        self._out: dict[int, OutFile] = {}

    def receive(self) -> tuple[Header, bytes, bytes] | None:
        """The next frame: its header, meta, and data unless `mapped` has it.

        None if the server has gone.
        """
        while not self._frames:
            data = self._read()
            if not data:
                return None
            self._frames.extend(self._reader.feed(data))
        header, meta, data = self._frames.popleft()
        if header.flags & KEPT:
            self._out_file(header.slot).retired = True
        if header.flags & NEW_FILE:
            self._in[header.slot] = file = InFile()
            file.map(self._descriptors.popleft())
        return header, meta, data

    def mapped(self, header: Header) -> memoryview:
        """The data of a frame that are in its slot's file."""
        found = self._in[header.slot].bytes
        if found is None or len(found) < header.data:
            raise BrokenFrame("data beyond its file")
        return found.data

    def send(self, frame: bytes) -> None:
        """Send a whole frame."""
        with self._lock:
            self._sock.sendall(frame)

    def put(self, slot: int, pieces: Sequence[Buffer], size: int) -> Parcel:
        """Data of `size` bytes, joined or in the slot's file, so that `pieces` may go."""
        if size <= INLINE:
            return Parcel(b"".join(pieces), size, 0, -1)
        descriptor = self._out_file(slot).write(pieces, size)
        return Parcel(b"", size, IN_FILE | (NEW_FILE if descriptor >= 0 else 0), descriptor)

    def send_parcel(self, kind: Kind, slot: int, meta: bytes, parcel: Parcel) -> None:
        """Send a frame with data, once nothing but the model itself refers to the slot's input."""
        flags = parcel.flags
        if slot in self._in and self._in[slot].in_use:
            flags |= KEPT
        head = pack_header(kind, flags, slot, len(meta), parcel.size)
        frame = b"".join([head, meta, parcel.data])
        with self._lock:
            if parcel.descriptor < 0:
                self._sock.sendall(frame)
                return
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [parcel.descriptor]))
            sent = self._sock.sendmsg([frame], [rights])
            self._sock.sendall(frame[sent:])

    def _out_file(self, slot: int) -> OutFile:
        file = self._out.get(slot)
        if file is None:
            file = self._out[slot] = OutFile()
        return file

    def _read(self) -> bytes:
        data, control, _, _ = self._sock.recvmsg(_READ, _SPACE, socket.MSG_CMSG_CLOEXEC)
        self._descriptors.extend(descriptors(control))
        return data


def end_with(sock: socket.socket) -> None:
    """End this process when the server's end of `sock` is closed, whatever it is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
