"""One end of a link: frames over a socket pair, long ones in files that travel along.

What is sent within a turn of the event loop is written at its end, all in one. Files are made when
their turn to be sent comes, so that few are open however much waits. Owned by the event loop.
"""

import array
import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace.core.tensors import Buffer
from headrace.frontends.shared import map_file, write_file
from headrace.wire.link_frames import (
    HEADER_SIZE,
    INLINE,
    BrokenLink,
    Flag,
    Frame,
    FrameReader,
    header,
)

log = logging.getLogger(__name__)

_READ = 64 << 10  # bytes at once; with more, the memory for them would be mapped anew each time
_READS = 16  # in one turn of the loop
_FILES = 32  # in one message, and held open at once
_SPACE = socket.CMSG_SPACE(4 * 253)  # for as many as the system lets come with one message
_CHUNK = 256 << 10  # bytes written at once
_BACKLOG = 8 << 20  # bytes that wait, from which on nothing more is read from the other end
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ETOOMANYREFS)
_AGAIN_SECS = 0.01

_APART = 1 << 20  # bytes of a file from which on it is written apart from the event loop
_Long = tuple[bytes, Sequence[Buffer]]  # a header, and what is to lie in a file
_Filled = tuple[bytes, int]  # a header, and the file


class Channel:
    """Sends frames, and hands those that come to `take`, until `lost` is called: at most once.

    `take` may raise `BrokenLink`, which ends the channel as any other nonsense does. `considerate`
    ends read nothing while the other end does not: only one of the two may be, or both could wait.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Frame, Any], None],
        lost: Callable[[str], None],
        considerate: bool,
    ) -> None:
        """`take` gets a frame and the buffer that its rest is in."""
        sock.setblocking(False)
        self._sock = sock
        self._take = take
        self._lost = lost
        self._considerate = considerate
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._files: deque[int] = deque()
        self._short: list[bytes] = []  # frames since the last long one
        self._waiting: deque[bytes | _Long | _Filled] = deque()
        self._filling = False  # the file of the first that waits is being written
        self._chunk: memoryview | None = None  # what is being written, and its files
        self._chunk_files: list[int] = []
        self._size = 0  # bytes of all that waits
        self._scheduled = False
        self._blocked = False  # the system takes nothing more for now
        self._paused = False
        self._room: tuple[int, Callable[[], None]] | None = None
        self.closed = False
        self._loop.add_reader(sock, self._on_readable)

    @property
    def waiting(self) -> int:
        """Bytes that wait for the other end to read."""
        return self._size

    def when_room(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback`, once, when no more than `nbytes` wait."""
        self._room = (nbytes, callback)

    # --- sending

    def send(self, frame: bytes) -> None:
        """Send a whole frame."""
        if self.closed:
            return
        self._short.append(frame)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def send_parts(
        self, kind: int, flags: int, number: int, meta: bytes, rest: Sequence[Buffer]
    ) -> None:
        """Send a frame with a rest in pieces, which must stay as they are."""
        size = sum(map(len, rest))
        if size + len(meta) <= INLINE:
            self.send(b"".join([header(kind, flags, number, len(meta), size), meta, *rest]))
            return
        if self.closed:
            return
        if self._short:
            self._queue_short()
        self._waiting.append(
            (header(kind, flags | Flag.SHARED, number, len(meta), size), [meta, *rest])
        )
        self._size += HEADER_SIZE + len(meta) + size
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the socket; what waits is not sent, and `lost` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        filled = [i[1] for i in self._waiting if not isinstance(i, bytes) and isinstance(i[1], int)]
        for descriptor in (*self._files, *self._chunk_files, *filled):
            os.close(descriptor)
        self._files.clear()
        self._chunk_files.clear()
        self._waiting.clear()
        self._short.clear()

    def _queue_short(self) -> None:
        joined = b"".join(self._short) if len(self._short) > 1 else self._short[0]
        self._short.clear()
        self._waiting.append(joined)
        self._size += len(joined)

    def _flush(self) -> None:
        self._scheduled = False
        if self._short:
            self._queue_short()
        if not self._blocked:
            self._write()

    def _write(self) -> None:
        try:
            while self._chunk is not None or self._waiting:
                if self._chunk is None:
                    self._next_chunk()
                if self._chunk is None:
                    break  # what is next is being put into its file
                self._write_chunk()
        except BlockingIOError:
            self._block()
        except OSError as error:
            if not self._on_short(error):
                return
        self._consider()
        if (room := self._room) is not None and self._size <= room[0]:
            self._room = None
            room[1]()

    def _on_short(self, error: OSError) -> bool:
        """Try again soon if the system is short of something, otherwise give up; which it is."""
        if error.errno not in _SHORT_OF:
            self._fail(str(error))
            return False
        self._blocked = True
        self._loop.call_later(_AGAIN_SECS, self._on_writable)
        return True

    def _next_chunk(self) -> None:
        pieces: list[bytes] = []
        size = 0
        waiting = self._waiting
        while waiting and size < _CHUNK and len(self._chunk_files) < _FILES:
            item = waiting[0]
            if not isinstance(item, bytes):
                item, content = item
                if isinstance(content, int):
                    self._chunk_files.append(content)
                else:
                    nbytes = sum(map(len, content))
                    if nbytes > _APART:
                        if not pieces:
                            self._fill(item, content)
                        break
                    try:
                        self._chunk_files.append(write_file(content))
                    except OSError:
                        if not pieces:
                            raise
                        break
                    self._size -= nbytes
            waiting.popleft()
            pieces.append(item)
            size += len(item)
        if pieces:
            self._chunk = memoryview(b"".join(pieces) if len(pieces) > 1 else pieces[0])

    def _fill(self, head: bytes, content: Sequence[Buffer]) -> None:
        """Write the file of the first that waits on a thread; those behind it wait, too."""
        if self._filling:
            return
        self._filling = True

        def filled(done: "asyncio.Future[int]") -> None:
            self._filling = False
            error = done.exception()
            if self.closed:
                if error is None:
                    os.close(done.result())
            elif error is None:
                self._waiting[0] = head, done.result()
                self._size -= sum(map(len, content))
                if not self._blocked:
                    self._write()
            elif isinstance(error, OSError):
                self._on_short(error)
            else:
                log.error("bug while writing a file", exc_info=error)
                self._fail("a bug")

        self._loop.run_in_executor(None, write_file, content).add_done_callback(filled)

    def _write_chunk(self) -> None:
        assert self._chunk is not None
        if self._chunk_files:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._chunk_files))
            sent = self._sock.sendmsg([self._chunk], [rights])
            for descriptor in self._chunk_files:
                os.close(descriptor)
            self._chunk_files.clear()
        else:
            sent = self._sock.send(self._chunk)
        self._size -= sent
        self._chunk = self._chunk[sent:] if sent < len(self._chunk) else None

    def _block(self) -> None:
        if not self._blocked:
            self._blocked = True
            self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        if self.closed:
            return
        self._loop.remove_writer(self._sock)
        self._blocked = False
        self._write()

    def _consider(self) -> None:
        """Read only while not too much waits to be written."""
        if not self._considerate or self.closed:
            return
        if self._size > _BACKLOG and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._sock)
        elif self._paused and self._size <= _BACKLOG // 2:
            self._paused = False
            self._loop.add_reader(self._sock, self._on_readable)

    # --- receiving

    def _on_readable(self) -> None:
        for _ in range(_READS):
            if self.closed or self._paused:
                return
            try:
                data, control, flags, _ = self._sock.recvmsg(_READ, _SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(str(error))
                return
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._files.extend(array.array("i", payload[: len(payload) // 4 * 4]))
            if not data or flags & socket.MSG_CTRUNC:
                self._fail("the other end has gone" if not data else "too many files at once")
                return
            try:
                for frame in self._reader.feed(data):
                    self._hand_on(frame)
            except (BrokenLink, OSError) as error:
                self._fail(str(error))
                return
            except Exception:
                # What came behind it is lost, and would be waited for until the end of days.
                log.exception("bug while taking a frame")
                self._fail("a bug")
                return
            if len(data) < _READ:
                return

    def _hand_on(self, frame: Frame) -> None:
        if self.closed:
            return
        if not frame.shared:
            self._take(frame, frame.buffer)
            return
        if not self._files:
            raise BrokenLink("a file that has not come")
        descriptor = self._files.popleft()
        try:
            content = map_file(descriptor, frame.stop)
        finally:
            os.close(descriptor)
        self._take(frame._replace(meta=content[: frame.start]), content)

    def _fail(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._lost(reason)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a link, with room for what is written in a turn of the loop."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends
