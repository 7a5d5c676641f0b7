"""The worker's end of the socket to the server: it blocks."""

import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headrace.ipc.elements import Buffer
from headrace.ipc.frame_socket import CLOEXEC, READ, SPACE, FrameSocket, Received, unread
from headrace.ipc.frames import (
    INLINE,
    MAX_TOLD,
    FrameKind,
    FrameReader,
    Header,
    frame,
    pack_header,
    pack_numbers,
    told_frame,
)
from headrace.ipc.memory import BatchFiles, SharedIn, write_file
from headrace.workers.triton_tensors import TritonModelException

_AT_ONCE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
# Data in the frame, b"" if it is in a file; its size; flags; a new file's descriptor or -1.
Parcel = tuple[bytes, int, int, int]


_MOST_UNDER_WAY = 16 << 20  # bytes in files that the server has not received
_LOOK_SECS = 0.0002
TOO_LONG = f"what is told of a response, beside its tensors, takes more than {MAX_TOLD >> 20} MiB"


class WorkerChannel:
    """Frames over a blocking socket. Any thread may send; one at a time receives.

    A process forked from the worker must not use it: it is `foreign` there, sends and writes
    nothing, and ends the process when that tries to receive, which only happens when the model's
    code has returned in both processes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = FrameSocket(sock)
        self._feed = FrameReader(FrameKind).feed
        self._files = BatchFiles({FrameKind.EXECUTE})
        self.shared = SharedIn()
        self._lock = threading.RLock()
        self._sending = False  # true while the owner of the lock is sending
        self._later: deque[bytes] = deque()  # frames queued for the owner of the lock
        self._under_way = 0  # bytes in files that were sent since the server had read everything
        self.foreign = False

    def receive(self, wait: bool = True) -> list[Received] | None:
        """The frames completed by one read, without data in slots' files; None at the end.

        Raises `OSError`, and `BlockingIOError` if there is nothing to read and not `wait`.
        """
        if self.foreign:
            self._end_if_foreign()
        link = self._socket
        read, control, told, _ = link.sock.recvmsg(READ, SPACE, CLOEXEC if wait else _AT_ONCE)
        if control or told != CLOEXEC:
            link.keep(control, told)
        if not read:
            return None
        received = self._feed(read)
        slots, files = self._files.slots, link.files
        for index, (header, meta, data) in enumerate(received):
            if header.flags or header.number in slots:
                received[index] = header, meta, self._files.take(header, data, files)
        return received

    def fileno(self) -> int:
        """The socket's descriptor, to wait for."""
        self._end_if_foreign()
        return self._socket.sock.fileno()

    def data_of(self, header: Header[FrameKind], data: Buffer) -> Buffer:
        """The data of a batch, possibly in its slot's file; `data` is what was received."""
        return self._files.data(header, data)

    def disown(self) -> None:
        """Mark the channel as foreign: this process was forked from its owner."""
        self.foreign = True
        self._socket.sock.close()
        self._lock = threading.RLock()  # its holder is not in this process
        self._later.clear()

    def send_soon(self, frame: bytes) -> None:
        """Send a whole frame now, or after the one being sent by any thread."""
        self._later.append(frame)
        with suppress(OSError):  # the server is gone, which the receiver notices
            self._send_later()

    def _send_later(self) -> None:
        # A thread that adds a frame and does not get the lock leaves it to the lock's owner, which
        # checks for more after releasing it.
        while self._later and self._lock.acquire(blocking=False):
            try:
                if self._sending:
                    return  # this thread is sending, further up, and continues with these
                self._sending = True
                try:
                    while self._later:
                        frame = self._later.popleft()
                        if not self.foreign:
                            self._socket.sock.sendall(frame)
                finally:
                    self._sending = False
            finally:
                self._lock.release()

    def send(self, frame: bytes, descriptor: int = -1) -> None:
        """Send a whole frame, possibly with an open file; raises `OSError`.

        May be called by a destructor while this thread sends another frame, which is completed
        first.
        """
        if self.foreign:
            return
        with self._lock:
            if self._sending:  # this thread is sending, further up
                self._later.append(frame)
                return
            self._sending = True
            try:
                sent = self._socket.send(frame, [descriptor]) if descriptor >= 0 else 0
                self._socket.sock.sendall(frame[sent:])
            finally:
                self._sending = False
        if self._later:
            self._send_later()

    def send_loose(
        self, kind: FrameKind, document: dict[str, Any], blocks: Sequence[Sequence[Buffer]]
    ) -> None:
        """Send a frame whose data, of the sizes in its meta, belongs to no slot.

        Raises `TritonModelException` for too much meta.
        """
        try:
            told, pieces, size = told_frame(kind, document, blocks, MAX_TOLD)
        except ValueError:
            raise TritonModelException(TOO_LONG) from None
        if size and not self.foreign:
            self._wait_for_room(size)
        self._send_and_close(told, write_file(pieces, size) if size else -1)

    def _wait_for_room(self, size: int) -> None:
        """Block until the server has received frames with files, if theirs are large.

        The socket counts the frames alone: a thread that sends responses faster than the server,
        or this process's other threads, get the processor, would fill it with 170 MiB of them
        before it is told to pause.
        """
        sock = self._socket.sock
        if not unread(sock):
            self._under_way = 0
        self._under_way += size
        if self._under_way > _MOST_UNDER_WAY:
            while unread(sock):
                time.sleep(_LOOK_SECS)
            self._under_way = size

    def _send_and_close(self, frame: bytes, descriptor: int) -> None:
        try:
            self.send(frame, descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def put(self, slot: int, pieces: Sequence[Buffer], size: int) -> Parcel:
        """Data of `size` bytes, joined or in the slot's file, so that `pieces` may be released."""
        if size <= INLINE or self.foreign:
            return b"".join(pieces), size, 0, -1
        return b"", size, *self._files.put(slot, pieces, size)

    def send_parcel(self, kind: FrameKind, slot: int, meta: bytes, parcel: Parcel) -> None:
        """Send a frame with data, once only the model itself refers to the slot's input."""
        data, size, flags, descriptor = parcel
        if slot in self._files.slots and not self.foreign:
            flags |= self._files.slots[slot].used()
        if kept := self.shared.kept(slot):
            self.send(frame(FrameKind.KEPT_SHARED, pack_numbers(kept)))
        head = pack_header(kind, flags, slot, len(meta), size)
        whole = b"".join([head, meta, data])
        if descriptor < 0:
            self.send(whole)
        else:
            self._send_and_close(whole, descriptor)

    def _end_if_foreign(self) -> None:
        if self.foreign:
            text = "a process that the model has forked came back from it, and is ended"
            print(text, file=sys.stderr, flush=True)
            os._exit(1)


def end_with(sock: socket.socket) -> None:
    """End this process when the server closes its end of `sock`, whatever it is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
