"""The server's end of the socket to a worker: frames both ways, on the event loop, without waiting.

Frames that cannot go at once wait here, with the open files that go along. What is in a file is
written, or copied, before a call returns, and a file is written again only when the worker refers
to nothing in it.
"""

import array
import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace.workers.elements import Buffer
from headrace.workers.frames import (
    ANSWERS,
    IN_FILE,
    INLINE,
    KEEPING,
    MAX_TOLD,
    NEW_FILE,
    BrokenFrame,
    FrameReader,
    Header,
    Kind,
    frame,
    lay_out,
    pack_header,
)
from headrace.workers.memory import OutFile, SlotFiles, descriptors

READ = 64 << 10  # bytes; Python makes room for as many each time, and much room is slow to get
CLOSED = "closed its socket"
_SPACE = socket.CMSG_SPACE(4 * 16)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)  # to combine flags of `enum` takes longer than a read
_TRUNCATED = int(socket.MSG_CTRUNC)
_REST_SECS = 10.0  # without large batches, after which a slot's files give back their memory
_PENDING = 4  # files that may have come before their frames
Take = Callable[[Header, bytes, Buffer], None]


class WorkerSocket:
    """Frames to and from one worker. `lost` is told why it is of no more use."""

    def __init__(self, descriptor: int, lost: Callable[[str, Exception | None], None]) -> None:
        self.sock = socket.socket(fileno=descriptor)
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.frames = FrameReader(MAX_TOLD)
        self.closed = False
        self.on_empty: Callable[[], None] = _nothing  # called when nothing waits any more
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._reading = False
        self._descriptors: deque[int] = deque()
        self._files: dict[int, SlotFiles] = {}  # of slots whose batches are large
        self._unsent: deque[tuple[memoryview, int]] = deque()
        self._resting: asyncio.TimerHandle | None = None

    @property
    def unsent(self) -> int:
        """Frames that wait to be sent."""
        return len(self._unsent)

    def attach(self, loop: asyncio.AbstractEventLoop, take: Take) -> None:
        """From now on hand frames to `take`."""
        self._loop = loop
        self._take = take
        self.sock.setblocking(False)
        self._reading = True
        loop.add_reader(self.sock, self.receive)
        if self._unsent:
            loop.add_writer(self.sock, self._on_writable)

    def detach(self) -> None:
        """Belong to no event loop any more; frames that come wait for the next one."""
        self.give_up()
        self._stop_resting()
        if self._loop is not None:
            self._loop.remove_writer(self.sock)
        self._loop = self._take = None

    def give_up(self) -> None:
        """Take nothing in any more."""
        if self._reading and self._loop is not None:
            self._reading = False
            self._loop.remove_reader(self.sock)

    def send(self, kind: Kind, meta: bytes = b"") -> None:
        """Send a frame without data."""
        self._write(frame(kind, meta), -1)

    def send_data(
        self, kind: Kind, slot: int, meta: bytes, pieces: Sequence[Buffer], size: int
    ) -> None:
        """Send a frame with data, which are written or copied before this returns.

        Raises `OSError` if there is no memory for them.
        """
        known = self._files.get(slot)
        flags = known.used() if known is not None else 0
        if size <= INLINE:
            head = pack_header(kind, flags, slot, len(meta), size)
            self._write(b"".join([head, meta, *pieces]), -1)
            if known is not None:
                known.lend()
            return
        files = self._files_of(slot)
        where, descriptor = files.put(pieces, size)
        flags |= where
        head = pack_header(kind, flags, slot, len(meta), size) + meta
        try:
            # The file may be replaced before what waits is sent.
            self._write(head, os.dup(descriptor) if descriptor >= 0 else -1)
        except OSError:
            files.spoil(where)  # the worker has not got it
            raise
        files.sent()
        files.lend()
        self._rest_later()

    def _rest_later(self) -> None:
        """Look after a while whether slots still use the memory of their files."""
        if self._resting is None and self._loop is not None:
            self._resting = self._loop.call_later(_REST_SECS, self._rest)

    def _rest(self) -> None:
        self._resting = None
        if any([files.rest() for files in self._files.values()]):
            self._rest_later()

    def _stop_resting(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _files_of(self, slot: int) -> SlotFiles:
        files = self._files.get(slot)
        if files is None:
            files = self._files[slot] = SlotFiles(slot < KEEPING)
        return files

    def send_loose(
        self, kind: Kind, document: dict[str, Any], blocks: Sequence[Sequence[Buffer]]
    ) -> None:
        """Send a frame whose data, of which it tells the sizes, belong to no slot.

        Raises `OSError` if there is no memory for them.
        """
        document["sizes"], pieces, size = lay_out(blocks)
        meta = json.dumps(document).encode()
        if size <= INLINE:
            self._write(b"".join([pack_header(kind, 0, 0, len(meta), size), meta, *pieces]), -1)
            return
        file = OutFile()
        try:
            descriptor = os.dup(file.write(pieces, size))
        finally:
            file.close()
        self._write(pack_header(kind, IN_FILE | NEW_FILE, 0, len(meta), size) + meta, descriptor)

    def _write(self, data: bytes | memoryview, descriptor: int) -> None:
        """Send a frame as soon as it can go, with an open file, which is closed then."""
        if self.closed:
            if descriptor >= 0:
                os.close(descriptor)
            return
        if descriptor < 0 and not self._unsent:  # as nearly always
            try:
                sent = self.sock.send(data)
            except OSError:
                sent = 0  # which is tried again, and then told
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        self._unsent.append((memoryview(data), descriptor))
        if len(self._unsent) == 1:
            self._flush()
            if self._unsent:
                assert self._loop is not None
                self._loop.add_writer(self.sock, self._on_writable)

    def _send_some(self, data: Buffer, descriptor: int) -> int:
        try:
            if descriptor < 0:
                return self.sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            return self.sock.sendmsg([data], [rights])
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)  # the worker has ended: what it has sent before is still to be read
        except OSError as error:
            self._lost(f"cannot be written to: {error}", None)
            return len(data)

    def _flush(self) -> None:
        """Send of what waits as much as can go now."""
        while self._unsent:
            data, descriptor = self._unsent[0]
            sent = self._send_some(data, descriptor)
            if sent and descriptor >= 0:
                os.close(descriptor)
                descriptor = -1
            if sent < len(data):
                self._unsent[0] = (data[sent:], descriptor)
                return
            self._unsent.popleft()

    def _on_writable(self) -> None:
        self._flush()
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self.sock)
            self.on_empty()

    def receive(self) -> bool:
        """Take in what has come; whether there may be more."""
        if not self._reading:
            return False
        try:
            data, control, flags, _ = self.sock.recvmsg(READ, _SPACE, _CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            data, control, flags = b"", [], 0
        if control:
            self._descriptors.extend(descriptors(control))
        if not data or len(self._descriptors) > _PENDING:
            lies = BrokenFrame("too many files") if data else None
            self._lost("sent too many files" if data else CLOSED, lies)
            return False
        if flags & _TRUNCATED:
            self._lost("has sent a file that the server has no descriptor left for", None)
            return False
        try:
            for header, meta, content in self.frames.feed(data):
                if header.flags or header.slot in self._files:
                    content = self._accept(header, content)
                if self._take is not None:
                    self._take(header, meta, content)
        except Exception as error:  # what reading nonsense may raise, or a bug of ours
            self._lost(f"sent what makes no sense ({type(error).__name__}: {error})", error)
        return self._reading

    def _accept(self, header: Header, data: Buffer) -> Buffer:
        """The data of a frame that may be in a file."""
        flags = header.flags
        if header.kind in ANSWERS:
            files = self._files_of(header.slot)
        elif flags:
            files = SlotFiles()
        else:
            return data
        files.heed(flags)
        if flags & NEW_FILE:
            files.take(flags, self._descriptors.popleft())
        if flags & IN_FILE:
            self._rest_later()
            return files.data(flags, header.data)
        return data

    def close(self) -> None:
        """Let go of everything."""
        self.closed = True
        self._stop_resting()
        if self._loop is not None:
            self.give_up()
            self._loop.remove_writer(self.sock)
        self.sock.close()
        for files in self._files.values():
            files.close()
        for descriptor in (*self._descriptors, *(d for _, d in self._unsent if d >= 0)):
            os.close(descriptor)
        self._files.clear()
        self._descriptors.clear()
        self._unsent.clear()
        self._take = None


def _nothing() -> None:
    pass
