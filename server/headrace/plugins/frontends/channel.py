"""One end of a link: frames over a socket pair, with large ones in files passed along.

Frames sent within a turn of the event loop are written together at its end. Files are created when
their frame is next, so that few are open however much is queued. While a large one is written on a
thread, later frames of its exchange wait for it, as requests do for one another; all others go on.
Owned by the event loop.
"""

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

from headrace.core.errors import Unavailable
from headrace.core.process import collect_young
from headrace.core.tensors import Buffer
from headrace.core.turns import PIECE_SECS
from headrace.engine.workbench import run_in_pool
from headrace.ipc.frame_socket import CLOEXEC, READ, SPACE, FrameSocket
from headrace.ipc.frames import (
    IN_FILE,
    INLINE,
    BrokenFrame,
    FrameReader,
    Header,
    frame,
    pack_header,
)
from headrace.ipc.memory import map_file, write_file
from headrace.plugins.frontends.link_infer import LinkKind

log = logging.getLogger(__name__)

_READS = 16  # reads per turn of the loop, which ends after `PIECE_SECS`
_FILES = 32  # files per message, and open at a time
_CHUNK = 256 << 10  # bytes per write
_BACKLOG = 8 << 20  # queued bytes above which the channel stops reading
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ETOOMANYREFS)
_AGAIN_SECS = 0.01

_APART = 1 << 20  # file bytes from which on a thread writes it
# A header with its meta, and the content of a file, or the file.
_Long = tuple[bytes, Sequence[Buffer] | int]
_Received = tuple[Header[LinkKind], bytes, Buffer]
_Going = Callable[[], None] | None  # called when a frame is about to be sent
_IN_ORDER = (
    LinkKind.INFER,
    LinkKind.CANCEL,
    LinkKind.PAUSE,
    LinkKind.GO_ON,
)  # kept in order across all exchanges


class _Apart(NamedTuple):
    """A header with its meta and the content of a large file, or a frame queued behind one."""

    head: bytes
    content: Sequence[Buffer]
    going: _Going


class FrameChannel:
    """Sends frames, and passes received ones to `take`, until `lost` is called, at most once.

    `take` may raise `BrokenFrame`, which ends the channel, as invalid bytes do. The end with
    `on_waiting` stops reading while the other end does not read: only one of the two may have it,
    or both could wait for each other.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Header[LinkKind], bytes, Buffer], None],
        lost: Callable[[str], None],
        on_waiting: Callable[[int], object] | None = None,
        count: Callable[[int], object] = int,
    ) -> None:
        """`take` receives the header, meta and rest of a frame.

        `count` is called with the change of bytes held twice while they are copied to a file.
        `on_waiting` is called when `waiting` changes; the other end reports files as `taken`.
        """
        sock.setblocking(False)
        self._socket = FrameSocket(sock)
        self._feed = FrameReader(LinkKind).feed
        self._take = take
        self._lost = lost
        self._on_waiting = on_waiting
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._urgent: list[bytes] = []  # frames before all others
        self._short: list[bytes] = []  # frames since the last long one
        self._waiting: deque[bytes | _Long] = deque()
        self._apart: dict[int, deque[_Apart]] = {}  # by lane; the first of each has a file
        self._filling = False  # the file of the first one is being written
        self._filled = 0  # written files that wait to be sent
        self._chunk: memoryview | None = None  # the buffer being written, and its files
        self._chunk_files: list[int] = []
        self._size = 0  # bytes queued here
        self._sent = 0  # bytes of files sent but not yet taken
        self._told = 0
        self._scheduled = False
        self._blocked = False  # the socket's buffer is full
        self._paused = False
        self._later: Iterator[_Received] | None = None  # frames left for the next turn
        self._room: tuple[int, Callable[[], None]] | None = None
        self.closed = False
        self._loop.add_reader(sock, self._on_readable)

    @property
    def waiting(self) -> int:
        """Bytes queued for the other end."""
        return self._size + self._sent

    def taken(self, nbytes: int) -> None:
        """Note that the other end has taken a file of `nbytes`."""
        self._sent -= nbytes
        self._tell()

    def when_room(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback`, once, when at most `nbytes` are queued."""
        self._room = (nbytes, callback)

    # --- sending

    def send(self, kind: LinkKind, number: int = 0, meta: bytes = b"", rest: bytes = b"") -> None:
        """Send a small frame."""
        self._send_short(kind, number, frame(kind, meta, number, rest), None)

    def send_first(self, kind: LinkKind, number: int, meta: bytes, rest: bytes = b"") -> None:
        """Send a small frame before all that is queued."""
        if not self.closed:
            self._urgent.append(frame(kind, meta, number, rest))
            self._schedule()

    def _send_short(self, kind: int, number: int, frame: bytes, going: _Going) -> None:
        if self.closed:
            return
        if self._apart and (behind := self._apart.get(_lane(kind, number))) is not None:
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
        """Send a frame whose rest is in pieces, which must not change.

        `going` is called when only frames that were already sent are ahead of it.
        """
        size = sum(map(len, rest))
        if size <= INLINE:
            head = pack_header(kind, flags, number, len(meta), size)
            self._send_short(kind, number, b"".join([head, meta, *rest]), going)
            return
        if self.closed:
            return
        head = pack_header(kind, flags | IN_FILE, number, len(meta), size) + meta
        self._size += len(head) + size
        lane = _lane(kind, number)
        if size > _APART or lane in self._apart:
            self._apart.setdefault(lane, deque()).append(_Apart(head, rest, going))
        else:
            if going is not None:
                going()
            if self._short:
                self._queue_short()
            self._waiting.append((head, rest))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the socket; queued frames are dropped, and `lost` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.sock)
        self._loop.remove_writer(self._socket.sock)
        self._socket.close()
        filled = [i[1] for i in self._waiting if not isinstance(i, bytes) and isinstance(i[1], int)]
        for descriptor in (*self._chunk_files, *filled):
            os.close(descriptor)
        self._chunk_files.clear()
        self._waiting.clear()
        self._apart.clear()
        self._short.clear()
        self._urgent.clear()

    def _queue_short(self) -> None:
        short, self._short = self._short, []
        joined = b"".join(short) if len(short) > 1 else short[0]
        self._size += len(joined)
        if len(joined) <= _CHUNK:
            self._waiting.append(joined)
        else:
            self._waiting += short  # urgent frames may go between

    def _flush(self) -> None:
        self._scheduled = False
        if self._short:
            self._queue_short()
        # Once closed, `on_waiting` would count bytes that nobody takes any more.
        if not (self._blocked or self.closed):
            self._write()

    def _write(self) -> None:
        try:
            while self._chunk is not None or self._waiting or self._urgent:
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
        """Report the queued bytes to `on_waiting` and the callback of `when_room`."""
        waiting = self._size + self._sent
        if waiting != self._told and self._on_waiting is not None:
            self._told = waiting
            self._on_waiting(waiting)
        if (room := self._room) is not None and waiting <= room[0]:
            self._room = None
            room[1]()

    def _on_short(self, error: OSError) -> bool:
        """Retry soon if the system lacks a resource (True), otherwise close the channel (False)."""
        if error.errno not in _SHORT_OF:
            self._fail(str(error))
            return False
        self._blocked = True
        self._loop.call_later(_AGAIN_SECS, self._on_writable)
        return True

    def _next_chunk(self) -> None:
        pieces, self._urgent = self._urgent, []
        size = sum(map(len, pieces))
        self._size += size  # as if they had been queued
        waiting = self._waiting
        while waiting and size < _CHUNK and len(self._chunk_files) < _FILES:
            item = waiting[0]
            if not isinstance(item, bytes):
                item, content = item
                if isinstance(content, int):
                    self._chunk_files.append(content)
                    self._filled -= 1
                else:
                    nbytes = sum(map(len, content))
                    try:
                        self._chunk_files.append(write_file(content, nbytes))
                    except OSError:
                        if not pieces:
                            raise
                        break
                    self._went(nbytes)
            waiting.popleft()
            pieces.append(item)
            size += len(item)
        self._chunk = memoryview(b"".join(pieces) if len(pieces) > 1 else pieces[0])

    def _fill(self) -> None:
        """Write a large file, unless one is being written or waits to be sent.

        On a thread, or at once if none can be started.
        """
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

        write = partial(write_file, content, nbytes)
        try:
            done = run_in_pool(None, write)
        except Unavailable:  # all links wait meanwhile, but no frame waits for a thread
            done = self._loop.create_future()
            try:
                done.set_result(write())
            except Exception as error:
                done.set_exception(error)
        done.add_done_callback(filled)

    def _send_filled(self, lane: int, descriptor: int) -> None:
        """Send the first frame of a lane, and those behind it up to the next large file."""
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
        """Account for `nbytes` written to a file."""
        self._size -= nbytes
        if self._on_waiting is not None:
            self._sent += nbytes

    def _write_chunk(self) -> None:
        assert self._chunk is not None
        sent = self._socket.send(self._chunk, self._chunk_files)
        for descriptor in self._chunk_files:
            os.close(descriptor)
        self._chunk_files.clear()
        self._size -= sent
        self._chunk = self._chunk[sent:] if sent < len(self._chunk) else None

    def _block(self) -> None:
        if not self._blocked:
            self._blocked = True
            self._loop.add_writer(self._socket.sock, self._on_writable)

    def _on_writable(self) -> None:
        if self.closed:
            return
        self._loop.remove_writer(self._socket.sock)
        self._blocked = False
        self._write()

    def _consider(self) -> None:
        """Read only while not too much is queued."""
        if self._on_waiting is None or self.closed:
            return
        if self._size > _BACKLOG and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._socket.sock)
        elif self._paused and self._size <= _BACKLOG // 2:
            self._paused = False
            self._read_on()

    # --- receiving

    def _on_readable(self) -> None:
        until = perf_counter() + PIECE_SECS
        for _ in range(_READS):
            if self.closed or self._paused:
                return
            try:
                received, control, told, _ = self._socket.sock.recvmsg(READ, SPACE, CLOEXEC)
                self._socket.keep(control, told)
                if not received:
                    self._fail("the other end has closed")
                    return
                frames = self._feed(received)
            except BlockingIOError:
                return
            except (BrokenFrame, OSError) as error:
                self._fail(str(error))
                return
            collect_young(len(frames))
            if not self._hand_on(iter(frames), until) or len(received) < READ:
                return

    def _hand_on(self, frames: Iterator[_Received], until: float) -> bool:
        """Hand frames on until then; False if there are more of them, or the channel has failed.

        Some hundred small responses come in one read, and each is encoded and sent at once.
        """
        try:
            for header, meta, rest in frames:
                if self.closed:
                    return False
                if header.flags & IN_FILE:
                    rest = self._file(header)
                self._take(header, meta, rest)
                # A request that a front end no longer holds comes next: it is always charged.
                if perf_counter() > until and header.kind is not LinkKind.HELD:
                    self._later = frames
                    self._loop.remove_reader(self._socket.sock)
                    self._loop.call_soon(self._go_on)
                    return False
        except (BrokenFrame, OSError) as error:
            self._fail(str(error))
            return False
        except Exception:
            # Frames behind it are lost; their receivers would wait forever.
            log.exception("bug while taking a frame")
            self._fail("a bug")
            return False
        return True

    def _file(self, header: Header[LinkKind]) -> memoryview:
        if not self._socket.files:
            raise BrokenFrame("a file that has not come")
        return memoryview(map_file(self._socket.files.popleft(), header.data, populate=True))

    def _go_on(self) -> None:
        frames, self._later = self._later, None
        if frames is None or self._hand_on(frames, perf_counter() + PIECE_SECS):
            self._read_on()

    def _read_on(self) -> None:
        if not (self.closed or self._paused) and self._later is None:
            self._loop.add_reader(self._socket.sock, self._on_readable)

    def _fail(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._lost(reason)


def _lane(kind: int, number: int) -> int:
    """The lane of a frame, within which order is kept: its exchange, or all requests."""
    return -1 if kind in _IN_ORDER else number
