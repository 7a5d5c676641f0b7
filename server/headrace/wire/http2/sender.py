"""The sending half of a connection: frames, the peer's windows, and what waits for them.

Frames collect in `out`; whoever has the socket takes them from there, once per turn of its loop.
DATA that a window does not let through stays with its stream as the buffers that it came in, which
are sliced, never joined: the frames of a large buffer go out as views of it, since a copy of memory
that is not in the cache costs more than handling each of them.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from headrace.core.tensors import Buffer
from headrace.wire.http2.protocol import (
    ACK,
    DATA,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    PING,
    SETTINGS,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
    frame,
    pack_head,
    rst_stream,
    window_update,
)
from headrace.wire.http2.stream import Stream

_TURN = 256 << 10  # bytes of one stream before it is another's turn
JOINED = 16 << 10  # buffers below this size are better joined than written one by one


class Table(Protocol):
    """What is known of the peer's decoder."""

    def limit_table(self, size: int) -> None:
        """The peer keeps a table of `size` bytes at most, from now on."""


class Sender:
    """Owned by its connection. Subclasses say what is sent apart from DATA, and ends a stream."""

    def __init__(self, table: Table, wake: Callable[[], None]) -> None:
        """`wake` is called when `out` or a queue stops being empty."""
        self.out: list[Buffer] = []
        self.large = False  # whether `out` holds buffers that are not to be joined
        self.queued = 0  # bytes that wait in streams
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame = DEFAULT_FRAME
        self.table = table
        self.awake = False
        self.frames = 0  # of DATA, sent from queues
        self.pumped = 0  # bytes of DATA, sent from queues
        self.windows = 0  # WINDOW_UPDATEs
        self._wake = wake
        self._ready: deque[Stream] = deque()  # scheduled: something to send, and perhaps a window
        self._blocked = False  # those in `_ready` wait for the connection's window

    # --- what is sent whatever the windows are

    def send(self, data: bytes) -> None:
        """A whole frame, or several."""
        self.out.append(data)
        self.rouse()

    def rouse(self) -> None:
        """See to it that `out` is looked at."""
        if not self.awake:
            self.awake = True
            self._wake()

    def acknowledge_settings(self) -> None:
        """SETTINGS with ACK."""
        self.send(frame(SETTINGS, ACK, 0))

    def answer_ping(self, payload: bytes) -> None:
        """PING with ACK."""
        self.send(frame(PING, ACK, 0, payload))

    def ping(self, payload: bytes) -> None:
        """PING."""
        self.send(frame(PING, 0, 0, payload))

    def give_window(self, stream: int, increment: int) -> None:
        """WINDOW_UPDATE."""
        self.windows += 1
        self.send(window_update(stream, increment))

    def reset(self, stream: int, code: ErrorCode) -> None:
        """RST_STREAM."""
        self.send(rst_stream(stream, code))

    # --- what windows hold back

    def data(self, stream: Stream, message: list[Buffer], size: int) -> None:
        """Send `message`, of `size` bytes altogether, as soon as the windows let it through."""
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.extend(message)
        stream.queued += size
        self.queued += size
        self._schedule(stream)

    def drop(self, stream: Stream) -> None:
        """Forget what is queued for a stream that is no more.

        And the stream itself, which a client may begin anew on another connection.
        """
        if stream.scheduled:
            stream.scheduled = False
            self._ready.remove(stream)
        self.queued -= stream.queued
        stream.queued = 0
        stream.queue = None
        stream.trailers = None
        stream.local_closed = True

    # --- the peer's windows and settings

    def widen(self, increment: int) -> None:
        """The connection's window grows; raises `ConnectionFailure`."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "connection window too large")
        if self._ready:
            self.rouse()

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """A stream's window grows; raises `StreamFailure`."""
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamFailure(ErrorCode.FLOW_CONTROL_ERROR, "stream window too large")
        if stream.queued:
            self._schedule(stream)

    # --- what waits

    def pump(self, limit: int) -> list[Stream]:
        """Move up to about `limit` queued bytes into `out`; the streams that have ended by that.

        Streams take turns.
        """
        ended: list[Stream] = []
        ready = self._ready
        while ready and limit > 0 and self.window > 0:
            stream = ready.popleft()
            stream.scheduled = False
            sent = self._turn(stream, min(limit, _TURN))
            limit -= sent
            if stream.queued:
                if stream.send_window > 0:
                    stream.scheduled = True
                    ready.append(stream)
            elif stream.trailers is not None:
                self._end(stream)
                ended.append(stream)
                continue
            if sent:
                stream.on_sent()
        return ended

    @property
    def can_pump(self) -> bool:
        """Whether something waits that no window holds back."""
        return bool(self._ready) and self.window > 0

    def take(self) -> list[Buffer]:
        """All frames so far; small neighbours are joined."""
        out, self.out = self.out, []
        if not self.large:
            return [b"".join(out)] if len(out) > 1 else out
        self.large = False
        taken: list[Buffer] = []
        small: list[Buffer] = []
        for buffer in out:
            if len(buffer) < JOINED:
                small.append(buffer)
                continue
            if small:
                taken.append(b"".join(small))
                small.clear()
            taken.append(buffer)
        if small:
            taken.append(b"".join(small))
        return taken

    def _turn(self, stream: Stream, limit: int) -> int:
        """Send frames of one stream; how many bytes of DATA."""
        queue = stream.queue
        assert queue is not None
        room = min(stream.send_window, self.window, stream.queued)
        if room > limit:
            room = limit
        left = room
        out = self.out
        while left > 0:
            count = min(left, len(queue[0])) // self.frame
            if count > 1:
                size = count * self.frame
                whole = memoryview(queue.popleft())
                head = pack_head(self.frame << 8 | DATA, 0, stream.number)
                for start in range(0, size, self.frame):
                    out.append(head)
                    out.append(whole[start : start + self.frame])
                if size < len(whole):
                    queue.appendleft(whole[size:])
                self.frames += count
                self.large = True
                left -= size
                continue
            size = min(left, self.frame)
            left -= size
            self.frames += 1
            out.append(pack_head(size << 8 | DATA, 0, stream.number))
            while size > 0:
                buffer = queue.popleft()
                if len(buffer) > size:
                    view = memoryview(buffer)
                    queue.appendleft(view[size:])
                    buffer = view[:size]
                if len(buffer) >= JOINED:
                    self.large = True
                size -= len(buffer)
                out.append(buffer)
        if room > 0:
            stream.send_window -= room
            stream.queued -= room
            self.window -= room
            self.queued -= room
            self.pumped += room
        return max(room, 0)

    def _end(self, stream: Stream) -> None:
        """Send what ends our side of a stream, behind its queue."""
        raise NotImplementedError

    def _schedule(self, stream: Stream) -> None:
        if not stream.scheduled and stream.send_window > 0:
            stream.scheduled = True
            self._ready.append(stream)
        self.rouse()
