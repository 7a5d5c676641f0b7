"""One end of a link: frames over a socket pair, long ones in files that travel along.

What is sent within a turn of the event loop is written at its end, all in one. Files are made when
their turn to be sent comes, so that few are open however much waits. While a large one is written,
on a thread, frames of its exchange wait for it, and requests for one another; all others go on.
Owned by the event loop.
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
from typing import Any, NamedTuple

from headrace.core.tensors import Buffer
from headrace.frontends.shared import map_file, write_file
from headrace.wire.link_frames import (
    INLINE,
    BrokenLink,
    Flag,
    Frame,
    FrameReader,
    Kind,
    header,
    number_of,
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
_Long = tuple[bytes, Sequence[Buffer] | int]  # a header, and what is to lie in a file, or the file
_Going = Callable[[], None] | None  # called when a frame goes
_IN_ORDER = (Kind.INFER, Kind.CANCEL, Kind.PAUSE, Kind.GO_ON)  # of all exchanges


class _Apart(NamedTuple):
    """A header and what is to lie in a large file, or a whole frame behind such a one."""

    head: bytes
    content: Sequence[Buffer]
    going: _Going


class Channel:
    """Sends frames, and hands those that come to `take`, until `lost` is called: at most once.

    `take` may raise `BrokenLink`, which ends the channel as any other nonsense does. The end that
    has `on_waiting` reads nothing while the other end does not: only one of the two may have it, or
    both could wait.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Frame, Any], None],
        lost: Callable[[str], None],
        on_waiting: Callable[[int], object] | None = None,
        count: Callable[[int], object] = int,
    ) -> None:
        """`take` gets a frame and the buffer that its rest is in.

        `count` is told of bytes more, or less, that copies on their way into a file take.
        `on_waiting` is told of changes of `waiting`, for which the other end says what is `taken`.
        """
        sock.setblocking(False)
        self._sock = sock
        self._take = take
        self._lost = lost
        self._on_waiting = on_waiting
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._files: deque[int] = deque()
        self._short: list[bytes] = []  # frames since the last long one
        self._waiting: deque[bytes | _Long] = deque()
        self._apart: dict[int, deque[_Apart]] = {}  # by lane; the first has a file
        self._filling = False  # the file of the first of them is being written
        self._filled = 0  # files that are, and wait to be sent
        self._chunk: memoryview | None = None  # what is being written, and its files
        self._chunk_files: list[int] = []
        self._size = 0  # bytes of all that waits here
        self._sent = 0  # bytes of files that were sent, and are not taken
        self._told = 0
        self._scheduled = False
        self._blocked = False  # the system takes nothing more for now
        self._paused = False
        self._room: tuple[int, Callable[[], None]] | None = None
        self.closed = False
        self._loop.add_reader(sock, self._on_readable)

    @property
    def waiting(self) -> int:
        """Bytes that wait for the other end to take them."""
        return self._size + self._sent

    def taken(self, nbytes: int) -> None:
        """The other end has taken a file of so many bytes."""
        self._sent -= nbytes
        self._tell()

    def when_room(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback`, once, when no more than `nbytes` wait."""
        self._room = (nbytes, callback)

    # --- sending

    def send(self, frame: bytes, going: _Going = None) -> None:
        """Send a whole frame; `going` as in `send_parts`."""
        if self.closed:
            return
        if self._apart and (behind := self._apart.get(_lane(frame))) is not None:
            behind.append(_Apart(frame, (), going))
            self._size += len(frame)
            return
        if going is not None:
            going()
        self._short.append(frame)
        self._schedule()

    def send_parts(
        self,
        kind: int,
        flags: int,
        number: int,
        meta: bytes,
        rest: Sequence[Buffer],
        going: _Going = None,
    ) -> None:
        """Send a frame with a rest in pieces, which must stay as they are.

        `going` is called when nothing is in its way any more but what was sent already.
        """
        size = sum(map(len, rest))
        if size + len(meta) <= INLINE:
            self.send(b"".join([header(kind, flags, number, len(meta), size), meta, *rest]), going)
            return
        if self.closed:
            return
        head = header(kind, flags | Flag.SHARED, number, len(meta), size)
        content = [meta, *rest]
        self._size += len(head) + len(meta) + size
        lane = _lane(head)
        if len(meta) + size > _APART or lane in self._apart:
            self._apart.setdefault(lane, deque()).append(_Apart(head, content, going))
        else:
            if going is not None:
                going()
            if self._short:
                self._queue_short()
            self._waiting.append((head, content))
        self._schedule()

    def _schedule(self) -> None:
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
        self._apart.clear()
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
                self._write_chunk()
        except BlockingIOError:
            self._block()
        except OSError as error:
            if not self._on_short(error):
                return
        self._fill()
        self._consider()
        self._tell()

    def _tell(self) -> None:
        """Tell those who want to know how much waits now."""
        waiting = self._size + self._sent
        if waiting != self._told and self._on_waiting is not None:
            self._told = waiting
            self._on_waiting(waiting)
        if (room := self._room) is not None and waiting <= room[0]:
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
                    self._filled -= 1
                else:
                    try:
                        self._chunk_files.append(write_file(content))
                    except OSError:
                        if not pieces:
                            raise
                        break
                    self._went(sum(map(len, content)))
            waiting.popleft()
            pieces.append(item)
            size += len(item)
        self._chunk = memoryview(b"".join(pieces) if len(pieces) > 1 else pieces[0])

    def _fill(self) -> None:
        """Write a large file on a thread, unless another one is being written, or waits."""
        if self._filling or self._filled or self.closed or not self._apart:
            return
        lane, items = next(iter(self._apart.items()))
        content = items[0].content
        nbytes = sum(map(len, content))
        self._filling = True
        self._count(nbytes)

        def filled(done: "asyncio.Future[int]") -> None:
            self._filling = False
            self._count(-nbytes)
            error = done.exception()
            if self.closed:
                if error is None:
                    os.close(done.result())
            elif error is None:
                self._went(nbytes)
                self._send_filled(lane, done.result())
            elif isinstance(error, OSError):
                self._on_short(error)
            else:
                log.error("bug while writing a file", exc_info=error)
                self._fail("a bug")

        self._loop.run_in_executor(None, write_file, content).add_done_callback(filled)

    def _send_filled(self, lane: int, descriptor: int) -> None:
        """Send the first frame of a lane, and those behind it up to the next with a large file."""
        items = self._apart.pop(lane)
        while items:
            head, content, going = items.popleft()
            if going is not None:
                going()
            if self._short:
                self._queue_short()
            self._waiting.append((head, descriptor) if content else head)
            if items and items[0].content:
                self._apart[lane] = items
                break
        self._filled += 1
        if not self._blocked:
            self._write()

    def _went(self, nbytes: int) -> None:
        """So many bytes are in a file now."""
        self._size -= nbytes
        if self._on_waiting is not None:
            self._sent += nbytes

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
        if self._on_waiting is None or self.closed:
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


def _lane(frame: bytes) -> int:
    """What a frame waits for: its exchange, or those of all requests."""
    return -1 if frame[0] in _IN_ORDER else number_of(frame)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a link, with room for what is written in a turn of the loop."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends
