"""The server's end of the socket to a worker: frames both ways, on the event loop, without waiting.

Frames that cannot go at once wait here, with the open files that go along. What is in a file is
written, or copied, before a call returns, and a file is written again only when the worker refers
to nothing in it.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.workers.channel import FilesLost, FrameSocket
from headrace.workers.elements import Buffer
from headrace.workers.frames import (
    ANSWERS,
    INLINE,
    MAX_SLOTS,
    MAX_TOLD,
    BrokenFrame,
    FrameReader,
    Header,
    Kind,
    frame,
    pack_header,
    told_frame,
)
from headrace.workers.memory import BatchFiles, write_file

CLOSED = "closed its socket"
_REST_SECS = 10.0  # without large batches, after which a slot's files give back their memory
_PENDING = 4  # files that may have come before their frames
Take = Callable[[Header[Kind], bytes, Buffer], None]


class WorkerSocket:
    """Frames to and from one worker. `lost` is told why it is of no more use."""

    def __init__(self, descriptor: int, lost: Callable[[str, Exception | None], None]) -> None:
        self.socket = FrameSocket(
            socket.socket(fileno=descriptor), FrameReader(Kind, MAX_TOLD, MAX_SLOTS)
        )
        self.sock = self.socket.sock
        self.closed = False
        self.on_empty: Callable[[], None] = _nothing  # called when nothing waits any more
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._reading = False
        self._files = BatchFiles(ANSWERS)
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
        known = self._files.slots.get(slot)
        flags = known.used() if known is not None else 0
        if size <= INLINE:
            head = pack_header(kind, flags, slot, len(meta), size)
            self._write(b"".join([head, meta, *pieces]), -1)
        else:
            where, file = self._files.put(slot, pieces, size)
            self._write(pack_header(kind, flags | where, slot, len(meta), size) + meta, file)
            known = self._files.slots.get(slot)
            self._rest_later()
        if known is not None:
            known.lend()

    def _rest_later(self) -> None:
        """Look after a while whether slots still use the memory of their files."""
        if self._resting is None and self._loop is not None:
            self._resting = self._loop.call_later(_REST_SECS, self._rest)

    def _rest(self) -> None:
        self._resting = None
        if self._files.rest():
            self._rest_later()

    def _stop_resting(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def send_loose(
        self, kind: Kind, document: dict[str, Any], blocks: Sequence[Sequence[Buffer]]
    ) -> None:
        """Send a frame whose data, of which it tells the sizes, belong to no slot.

        Raises `OSError` if there is no memory for them.
        """
        told, pieces, size = told_frame(kind, document, blocks)
        self._write(told, write_file(pieces, size) if size else -1)

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
            return self.socket.send(data, [descriptor] if descriptor >= 0 else ())
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
        files = self.socket.files
        try:
            received = self.socket.receive()
            if received is None or len(files) > _PENDING:
                lies = BrokenFrame("too many files") if received is not None else None
                self._lost("sent too many files" if lies else CLOSED, lies)
                return False
            for header, meta, data in received:
                content = data
                if header.flags or header.number in self._files.slots:
                    content = self._files.take(header, data, files)
                    content = self._files.data(header, content)
                    if header.flags:
                        self._rest_later()
                if self._take is not None:
                    self._take(header, meta, content)
        except BlockingIOError:
            return False
        except FilesLost:
            self._lost("has sent a file that the server has no descriptor left for", None)
            return False
        except ConnectionError:
            self._lost(CLOSED, None)
            return False
        except Exception as error:  # what reading nonsense may raise, or a bug of ours
            self._lost(f"sent what makes no sense ({type(error).__name__}: {error})", error)
        return self._reading

    def close(self) -> None:
        """Let go of everything."""
        self.closed = True
        self._stop_resting()
        if self._loop is not None:
            self.give_up()
            self._loop.remove_writer(self.sock)
        self.socket.close()
        self._files.close()
        for _, descriptor in self._unsent:
            if descriptor >= 0:
                os.close(descriptor)
        self._unsent.clear()
        self._take = None


def _nothing() -> None:
    pass
