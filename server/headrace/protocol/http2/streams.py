"""Streams of one connection: their states, and flow control of their DATA in both directions.

Frames to send collect in `FrameSender.out`; the owner of the socket takes them once per turn of its
loop. DATA held back by a window stays with its stream in its original buffers, which are sliced,
never joined: the frames of a large buffer are sent as views of it, since copying uncached memory
costs more than handling each of them.

Received bytes are charged to a window when their frame's head arrives, and returned to it in large
steps once the stream has consumed them, section 6.9.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from struct import Struct
from sys import maxsize

from headrace.core.tensors import Buffer
from headrace.protocol.http2.headers import NO_TABLE, header_block
from headrace.protocol.http2.protocol import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    Budget,
    ConnectionFailure,
    ErrorCode,
    Limits,
    StreamFailure,
    frame,
    pack_head,
    rst_stream,
    unpack_head,
    window_update,
)

Fields = list[tuple[bytes, bytes]]

_NO_TRAILERS: Fields = []


class Stream:
    """One stream from its HEADERS to its end. Subclasses handle its events.

    `send_window` is the peer's, `window` this side's; `consumed` counts received bytes that were
    not yet returned to the peer's window. `kept` counts bytes of whole messages that wait for more,
    until `on_keep` was called. `place`, if set, is the buffer for the next bytes. A stream lives
    until both sides are closed. Most streams are short, so initial values are class attributes:
    those that never change are never set.
    """

    send_window = 0
    window = 0
    consumed = 0
    place: memoryview | None = None
    kept = 0
    unary = False  # true if the peer sends exactly one message
    keeps_window = False  # do not return window to the peer for now
    expected = -1  # DATA bytes still expected by content-length; -1: unknown
    remote_closed = False
    local_closed = False
    queue: deque[Buffer] | None = None  # data held back by windows
    queued = 0
    scheduled = False
    trailers: Fields | None = None  # trailers to send after the queue; [] for none

    def __init__(self, number: int) -> None:
        self.number = number

    def take_last(self, view: memoryview, start: int, stop: int) -> bool:
        """Receive all data of the peer at once, `view[start:stop]`, and its end of stream.

        False means that nothing was done; `on_data` and `on_end` are called instead. An
        implementation sets `remote_closed` first, and ends the stream like any that the peer has
        closed.
        """
        return False

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Receive `view[start:stop]`, which is valid during this call only."""

    def on_filled(self, nbytes: int) -> None:
        """The first `nbytes` of `place` have been received."""

    def on_keep(self) -> None:
        """Messages are kept, and the peer has not ended its side."""

    def on_end(self) -> None:
        """The peer has ended its side."""

    def on_gone(self, code: ErrorCode) -> None:
        """The stream was reset by the peer, failed, or lost with its connection."""

    def on_lost(self) -> None:
        """The connection was lost."""
        self.on_gone(ErrorCode.CANCEL)

    def look(self, now: float) -> bool:
        """Apply time limits, at `now` seconds; false if none will concern the stream any more."""
        return False

    def on_sent(self) -> None:
        """Called after part of the queue has been sent."""


Memory = memoryview | bytearray  # to receive bytes in

_TURN = 256 << 10  # bytes of one stream before the next one's turn
JOINED = 16 << 10  # smaller buffers are joined rather than written one by one


# The head of DATA, and its gRPC message prefix.
_pack_data = Struct(">IBIBI").pack
_PREFIX = 5


class FrameSender:
    """Frames to be sent by one connection, and the peer's windows. Owned by the connection."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake` is called when `out` or a queue stops being empty."""
        self.out: list[Buffer] = []
        self.large = False  # true if `out` has buffers that must not be joined, or after `_framed`
        self._framed: list[Buffer] = []  # frames of large buffers, to be written before `out`
        self.queued = 0  # bytes queued in streams
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame = DEFAULT_FRAME
        self.shrinks = False  # the next header block has to say that the peer's table is unused
        self.awake = False
        self.frames = 0  # DATA frames sent from queues
        self.pumped = 0  # DATA bytes sent from queues
        self.windows = 0  # WINDOW_UPDATE frames sent
        self._wake = wake
        self._ready: deque[Stream] = deque()  # scheduled streams: with data, and possibly a window

    # --- not subject to flow control

    def send(self, data: bytes) -> None:
        """Send one or more complete frames."""
        self.out.append(data)
        self.rouse()

    def rouse(self) -> None:
        """Schedule a flush of `out`, unless one is scheduled."""
        if not self.awake:
            self.awake = True
            self._wake()

    def ping(self, payload: bytes) -> None:
        self.send(frame(PING, 0, 0, payload))

    def give_window(self, stream: int, increment: int) -> None:
        """Send WINDOW_UPDATE."""
        self.windows += 1
        self.send(window_update(stream, increment))

    def reset(self, stream: int, code: ErrorCode) -> None:
        """Send RST_STREAM."""
        self.send(rst_stream(stream, code))

    def head(self, stream: Stream, block: bytes) -> None:
        """Send the head of a stream; messages follow as `data`."""
        self._headers(stream.number, block)

    # --- subject to flow control

    def data(self, stream: Stream, message: list[Buffer], size: int) -> None:
        """Send `message`, of `size` bytes altogether, as soon as the windows allow it."""
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.extend(message)
        stream.queued += size
        self.queued += size
        self._schedule(stream)

    def request(
        self,
        stream: Stream,
        block: bytes,
        message: list[Buffer],
        size: int,
        packed: bool = False,
    ) -> None:
        """Send a whole request with one message of `size` bytes, `packed` if compressed."""
        number = stream.number
        nbytes = size + _PREFIX
        if (
            self.shrinks
            or len(block) > DEFAULT_FRAME
            or nbytes > self.frame
            or nbytes > stream.send_window
            or nbytes > self.window
        ):
            self._headers(number, block)
            prefix = packed.to_bytes() + size.to_bytes(4)
            stream.trailers = _NO_TRAILERS
            self.data(stream, [prefix, *message], nbytes)
            return
        self.window -= nbytes
        stream.local_closed = True
        out = self.out
        out.append(pack_head(len(block) << 8 | HEADERS, END_HEADERS, number))
        out.append(block)
        out.append(_pack_data(nbytes << 8 | DATA, END_STREAM, number, packed, size))
        out += message
        if size > JOINED:
            self.large = True
        self.rouse()

    def finish(self, stream: Stream, trailers: Fields = _NO_TRAILERS) -> None:
        """End this side of a stream, after everything queued for it."""
        if stream.queued:
            stream.trailers = trailers
        else:
            self._end(stream, trailers)

    def drop(self, stream: Stream) -> None:
        """Drop everything queued for a stream that is closed.

        And the stream itself, which a client may reopen on another connection.
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
        """Widen the connection's window; raises `ConnectionFailure`."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "connection window too large")
        if self._ready:
            self.rouse()

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """Widen a stream's window; raises `StreamFailure`."""
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamFailure(ErrorCode.FLOW_CONTROL_ERROR, "stream window too large")
        if stream.queued:
            self._schedule(stream)

    # --- queued data

    def pump(self, limit: int) -> list[Stream]:
        """Move about `limit` queued bytes into `out`; returns the streams that have ended.

        Streams take turns.
        """
        ended: list[Stream] = []
        ready = self._ready
        while ready and limit > 0 and self.window > 0:
            stream = ready.popleft()
            stream.scheduled = False
            sent = self._turn(stream, min(limit, _TURN) if ready else limit)
            limit -= sent
            if stream.queued:
                if stream.send_window > 0:
                    stream.scheduled = True
                    ready.append(stream)
            elif stream.trailers is not None:
                self._end(stream, stream.trailers)
                ended.append(stream)
                continue
            if sent:
                stream.on_sent()
        return ended

    @property
    def can_pump(self) -> bool:
        """True if queued data is not held back by a window."""
        return bool(self._ready) and self.window > 0

    def take(self) -> list[Buffer]:
        """Take all frames so far; small neighbours are joined."""
        self._frame_out()
        taken, self._framed = self._framed, []
        return taken

    def clear(self) -> None:
        """Drop all frames so far."""
        self.out, self._framed, self.large = [], [], False

    def _frame_out(self) -> None:
        """Move `out` to the framed buffers, with small neighbours joined."""
        out, self.out = self.out, []
        framed = self._framed
        if self.large:
            self.large = False
            small: list[Buffer] = []
            for buffer in out:
                if len(buffer) < JOINED:
                    small.append(buffer)
                    continue
                if small:
                    framed.append(b"".join(small))
                    small.clear()
                framed.append(buffer)
            out = small
        if out:
            framed.append(b"".join(out))

    def _turn(self, stream: Stream, limit: int) -> int:
        """Send frames of one stream; returns the number of DATA bytes."""
        queue = stream.queue
        assert queue is not None
        room = min(stream.send_window, self.window, stream.queued)
        if room > limit:
            room = limit
        left = room
        out = self.out
        while left > 0:
            largest = self.frame
            count = min(left, len(queue[0])) // largest
            if count > 1:
                size = count * largest
                whole = memoryview(queue.popleft())
                head = pack_head(largest << 8 | DATA, 0, stream.number)
                out.append(head)
                self._frame_out()
                out = self.out
                # By turns payloads and heads, beginning and ending with a payload.
                pieces: list[Buffer] = [head] * (2 * count - 1)
                pieces[::2] = [whole[at : at + largest] for at in range(0, size, largest)]
                self._framed += pieces
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

    def _end(self, stream: Stream, trailers: Fields) -> None:
        stream.trailers = None
        stream.local_closed = True
        if trailers:
            self._headers(stream.number, header_block(trailers), END_STREAM)
        else:
            self.send(frame(DATA, END_STREAM, stream.number))

    def _headers(self, number: int, block: bytes, flags: int = 0) -> None:
        kind = HEADERS
        if self.shrinks:
            self.shrinks, block = False, NO_TABLE + block
        while len(block) > DEFAULT_FRAME:
            self.send(frame(kind, flags, number, block[:DEFAULT_FRAME]))
            kind, flags, block = CONTINUATION, 0, block[DEFAULT_FRAME:]
        self.send(frame(kind, flags | END_HEADERS, number, block))

    def _schedule(self, stream: Stream) -> None:
        if not stream.scheduled and stream.send_window > 0:
            stream.scheduled = True
            self._ready.append(stream)
        self.rouse()


_WORK = 8  # control frames credited for a new stream
_FRAME_WORK = 3  # ... and for each DATA frame sent
# Numbers in a block of reset streams, and blocks that are remembered: a client may have a thousand
# streams reset at once, each with frames under way.
_RESET_BLOCK, _RESET_BLOCKS = 1024, 32


class Streams:
    """Streams of one connection that its peer opens. Owned by the connection.

    Invariant: a stream is in `open` from its HEADERS until both of its sides are closed.
    """

    def __init__(self, sender: FrameSender, limits: Limits) -> None:
        self.open: dict[int, Stream] = {}
        self.last = 0  # the highest stream opened
        self.work = maxsize  # messages that may still be processed in this turn of the loop
        self.spent = 0  # units of this turn's share that were taken besides those of frames
        self.now = 0.0  # seconds; arrival of the bytes being processed
        self.drain_to = MAX_WINDOW  # higher streams are ignored
        self.leaving = False  # no more may be opened; `over` once all open ones have ended
        self.over = False
        self._sender = sender
        self._limits = limits
        # Streams reset lately, for which frames may still arrive: a bit for each of their numbers.
        self._reset: dict[int, int] = {}
        self._control = Budget(limits.control, limits.control_rate)
        self._resets = Budget(limits.resets, limits.resets_rate)
        self._earned_at = 0

    def refuse(self, number: int, code: ErrorCode) -> None:
        """Reset a stream that was never opened, or is closed, for an error of the peer."""
        self.count_reset()
        self.send_reset(number, code)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream, without or after a complete response."""
        self.send_reset(stream.number, code)
        self._drop(stream)

    def fail(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream for an error of the peer, and notify it."""
        self.count_reset()
        self.reset(stream, code)
        stream.on_gone(code)

    def reset_by_peer(self, stream: Stream, code: ErrorCode) -> None:
        """Process the peer's reset of a stream."""
        self.count_reset()
        self._drop(stream)
        stream.on_gone(code)

    def sent_all(self, stream: Stream) -> None:
        """This side of the stream is closed."""
        if stream.remote_closed:
            self.forget(stream)
        else:  # section 8.1: the rest of the request is ignored
            self.reset(stream, ErrorCode.NO_ERROR)

    def received_all(self, stream: Stream) -> None:
        """The peer's side is closed, unless the stream was reset meanwhile."""
        if stream.remote_closed:
            return
        stream.remote_closed = True
        stream.on_end()
        if stream.local_closed:
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Remove a closed stream."""
        self.open.pop(stream.number, None)
        if self.leaving:
            self._look_if_drained()

    def leave(self) -> None:
        """Open no more streams; the connection is over when the open ones have ended."""
        self.leaving = True
        self._look_if_drained()

    def lose(self, most: int) -> bool:
        """End at most `most` streams, since the connection was lost; true if others are left."""
        self.leaving = self.over = True
        for number in list(islice(self.open, most)):
            if (stream := self.open.pop(number, None)) is not None:
                self._sender.drop(stream)
                stream.remote_closed = True
                stream.on_lost()
        return bool(self.open)

    def _look_if_drained(self) -> None:
        if not self.open:
            self.over = True
            self._sender.rouse()

    def _drop(self, stream: Stream) -> None:
        self._sender.drop(stream)
        stream.remote_closed = True
        self.forget(stream)

    def send_reset(self, number: int, code: ErrorCode) -> None:
        """Reset a stream by its number, without counting it against the peer."""
        self._sender.reset(number, code)
        block, bit = divmod(number, _RESET_BLOCK)
        self._reset[block] = self._reset.pop(block, 0) | 1 << bit  # the latest is the last
        if len(self._reset) > _RESET_BLOCKS:
            del self._reset[next(iter(self._reset))]

    # --- frames for streams that are not open

    def is_idle(self, number: int) -> bool:
        """True if the peer has not opened this stream; one beyond a drain may have been opened.

        Stream 0 is never opened, nor are those with even numbers.
        """
        return not number & 1 or (self.last < number <= self.drain_to)

    def was_reset(self, number: int) -> bool:
        """True if this side has reset the stream, possibly unknown to the peer, or ignores it."""
        block, bit = divmod(number, _RESET_BLOCK)
        return bool(self._reset.get(block, 0) >> bit & 1) or number > self.drain_to

    # --- budgets

    def count_control(self, cost: int) -> None:
        """Charge a control frame; raises `ConnectionFailure` if there are too many."""
        # Peers answer DATA with WINDOW_UPDATEs, and measure the connection by PINGs.
        work = self.last // 2 * _WORK + self._sender.frames * _FRAME_WORK
        earned, self._earned_at = work - self._earned_at, work
        if not self._control.spend(cost, self.now, earned):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many frames of no use")

    def count_reset(self) -> None:
        """Count a reset stream; raises `ConnectionFailure` if there are too many."""
        if not self._resets.spend(1, self.now):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")


_REGULAR = 4 << 10  # bytes; smaller frames are not worth buffers of their own
# Bytes read at once: fewer, larger reads save system calls, and the acknowledgements that each
# causes. In one turn of the loop 1 MiB: half of what a transport reads, for the sake of others.
_READ = 256 << 10
_SCATTERED = 4
_FILLED = 4  # frames received in place that take as long as one otherwise
_FURTHER = 2  # frames that may have come meanwhile
_MOST_PADDING = 256  # bytes of a frame, with its length


def _leading(heads: list[bytearray], expected: bytes, count: int) -> int:
    """The number of heads before the first that is not as expected, of `count`."""
    if b"".join(heads[:count]) == expected * count:  # mostly
        return count
    return next(n for n, head in enumerate(heads) if head != expected)


class DataReader:
    """Parser of DATA frames; the connection itself handles whole unpadded ones of open streams.

    `left` bytes of the current frame's payload are still expected, then `skip` bytes to ignore.
    `window` is the connection's; it is replenished below `low`. `regular` is true while a long
    message arrives in frames like each other: within one of them, `scatter` may read what follows.
    """

    __slots__ = (
        "_again", "_ahead", "_ends", "_half", "_limits", "_number", "_sender", "_size", "_stream",
        "_streams", "left", "low", "regular", "skip", "window",
    )  # fmt: skip

    def __init__(self, streams: Streams, sender: FrameSender, limits: Limits) -> None:
        self.left = 0
        self.skip = 0
        self.window = limits.connection_window
        self.low = limits.connection_window >> 1
        self._streams = streams
        self._sender = sender
        self._limits = limits
        self._half = limits.stream_window >> 1
        self._stream: Stream | None = None  # the current frame's stream; None to ignore it
        self._ends = False
        self.regular = False
        # The stream and the length of the last frame received in place; true if the one before it
        # was like it.
        self._number = self._size = 0
        self._again = False
        self._ahead = _READ  # frames to read at once, at most

    def begin(
        self, view: memoryview, flags: int, number: int, start: int, stop: int, end: int
    ) -> int:
        """Start a frame with the payload `view[start:stop]`, as far as it is before `end`.

        Returns the position after the consumed bytes; -1 if the frame must be passed again with
        more data. Raises `ConnectionFailure`.
        """
        self.regular = False
        length = stop - start
        padding = 0
        if flags & PADDED:
            if not length:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "DATA too short")
            if start >= end:
                return -1
            if view[start] >= length:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than DATA")
            padding = view[start] + 1
            start += 1
        self.window -= length
        if self.window < 0:
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
        stream = self._streams.open.get(number)
        if stream is None or stream.remote_closed:
            self._stray(number, stream)
            stream = None
        elif not self._accept(stream, length, length - padding, flags):
            stream = None
        self._stream = stream
        self._ends = bool(flags & END_STREAM)
        self.left = length - padding
        self.skip = max(padding - 1, 0)
        if stream is not None and padding:
            self.credit(stream, padding)
        if not self.left:
            self._finish()
        return self.resume(view, start, end)

    def fill(self, stream: Stream, view: memoryview, position: int, end: int) -> int:
        """Receive the rest of the current frame, and those after it, into the stream's place.

        A large message arrives in many frames, and a received chunk holds some whole and some
        partial ones: one loop takes them, up to the last that fits into the place, but no more than
        take as long as one frame of another kind. Returns the position after them; unusual frames
        are left to the general path.
        """
        place = stream.place
        assert place is not None, "bytes without a place. This is a bug."
        number, left = stream.number, self.left
        room, largest = len(place), self._limits.frame
        window = min(self.window, stream.window)
        if stream.expected >= 0:
            window = min(window, stream.expected)
        filled = spent = frames = 0
        last, again = (self._size, self._again) if self._number == number else (0, False)
        while True:
            if left:
                nbytes = min(left, end - position)
                place[filled : filled + nbytes] = view[position : position + nbytes]
                filled += nbytes
                position += nbytes
                left -= nbytes
            if left or end - position < HEAD_SIZE or frames == _FILLED:
                break
            frames += 1
            high, low, kind, flags, owner = unpack_head(view, position)
            length = high << 8 | low
            if kind != DATA or flags or owner != number:
                break
            if not 0 < length <= min(largest, room - filled, window - spent):
                break
            spent += length
            left = length
            again, last = length == last, length
            position += HEAD_SIZE
        self._ends = False
        self._number, self._size, self._again = number, last, again
        self._filled(stream, filled, spent, left)
        return position

    @property
    def missing(self) -> int:
        """Bytes of a message that is received in place, while data is `regular`, still to come."""
        stream = self._streams.open.get(self._number) if self.regular else None
        return 0 if stream is None or stream.place is None else len(stream.place)

    def next_place(self) -> memoryview | None:
        """The place of the current frame's rest, while data is `regular`; None between frames.

        The number of bytes received there is passed to `scatter`.
        """
        stream, left = self._stream, self.left
        if stream is None or stream.place is None or stream.remote_closed:
            return None
        return stream.place[:left] if 0 < left <= len(stream.place) else None

    def scatter(
        self, read: Callable[[list[Memory]], int], taken: int = 0, head: bytes = b""
    ) -> tuple[bytes, bool]:
        """Read the rest of the frame, and frames like it, each payload to its place.

        `read` fills buffers, in order, and returns the number of bytes. A frame's head goes to
        memory of its own and is compared with the expected one: bytes from another one on are
        returned, to be processed as usual. Also returns true if there is nothing more to read for
        now. Reads at most `_SCATTERED` times, after `taken` bytes in `next_place`, or between
        frames after the next one's `head`.
        """
        self.regular = False
        size, left = self._size, self.left
        stream = self._stream if left else self._streams.open.get(self._number)
        if stream is None or stream.place is None or stream.remote_closed:
            return head, True
        place, expected = stream.place, pack_head(size << 8 | DATA, 0, stream.number)
        allowed = min(len(place) - left, self.window, stream.window)
        if stream.expected >= 0:
            allowed = min(allowed, stream.expected)
        if allowed < 0:  # its message ends before the frame does
            return head, True
        if left:
            filled, spent, left = taken, 0, left - taken
        elif head == expected and size <= allowed:
            filled, spent, left = 0, size, size
        else:
            return head, True
        unit = size + HEAD_SIZE
        rest, drained = b"", False
        for _ in range(_SCATTERED):
            first = min(left, _READ)
            most = min((_READ - first) // unit, (allowed - spent) // size)
            if not (first or most):
                break
            # Slices for about as many frames as came last time: a client that sends while this side
            # reads is mostly some frames ahead.
            count = min(most, self._ahead)
            begin = filled + first
            stop = begin + count * size
            heads = [bytearray(HEAD_SIZE) for _ in range(count)]
            # The rest of the frame, then by turns heads and payloads.
            targets: list[Memory] = [place[filled:begin]] * (1 + 2 * count)
            targets[1::2] = heads
            targets[2::2] = [place[at : at + size] for at in range(begin, stop, size)]
            wanted = first + count * unit
            end = HEAD_SIZE + allowed - spent - count * size
            if count == most and end < unit and end <= _READ - wanted:
                # A last, shorter frame would otherwise wait for the next turn of the loop.
                targets.append(bytearray(end))
                wanted += end
            nbytes = read(targets)
            drained = nbytes < wanted
            if nbytes <= first:
                filled += nbytes
                left -= nbytes
            else:
                begun = -(-(nbytes - first - HEAD_SIZE + 1) // unit)  # frames with a whole head
                good = _leading(heads, expected, min(begun, count))
                beyond = nbytes - first - good * unit
                spent += good * size
                filled = begin + good * size + min(beyond, 0)
                left = max(-beyond, 0)
                if beyond > 0:
                    rest = b"".join(targets[1 + 2 * good :])[:beyond]
                    self._again = False
                self._ahead = good + _FURTHER if drained else 2 * count + 1
            if drained or rest:
                break
        self._filled(stream, filled, spent, left)
        return rest, drained

    def _filled(self, stream: Stream, filled: int, spent: int, left: int) -> None:
        """Count bytes in a stream's place, and frames of `spent` bytes; `left` are to come."""
        self.left = left
        self._stream = stream if left else None
        self.regular = self._again and self._size >= _REGULAR
        self.window -= spent
        stream.window -= spent
        if stream.expected >= 0:
            stream.expected -= spent
        if filled:
            stream.on_filled(filled)
            self.credit(stream, filled)

    def resume(self, view: memoryview, position: int, end: int) -> int:
        """Continue the current frame; returns the position after the consumed bytes."""
        left = self.left
        stream = self._stream
        if (
            stream is not None
            and stream.place is not None
            and left <= len(stream.place)
            and not (self._ends or self.skip)
        ):
            return self.fill(stream, view, position, end)
        if left:
            nbytes = min(left, end - position)
            self.left = left - nbytes
            self._hand_on(view, position, nbytes)
            position += nbytes
            if not self.left:
                self._finish()
        if self.skip and not self.left:
            passed = min(self.skip, end - position)
            self.skip -= passed
            position += passed
        return position

    def credit(self, stream: Stream, nbytes: int) -> None:
        """Count bytes consumed by a stream; returns them to its window when they are many."""
        if stream.kept:
            stream.on_keep()
        stream.consumed += nbytes
        if stream.consumed >= self._half and not stream.keeps_window and not stream.remote_closed:
            place = stream.place if stream.unary else None
            if place is not None and len(place) + _MOST_PADDING <= stream.window:
                return  # the rest of all that the peer sends fits
            self._sender.give_window(stream.number, stream.consumed)
            stream.window += stream.consumed
            stream.consumed = 0

    def credit_connection(self) -> None:
        """Return what all streams together have consumed to the connection's window."""
        full = self._limits.connection_window
        self._sender.give_window(0, full - self.window)
        self.window = full

    def expect(self, stream: Stream, nbytes: int) -> None:
        """Widen a stream's window by `nbytes` that are certain to be consumed."""
        if stream.window < nbytes and not stream.remote_closed:
            increment = min(nbytes, MAX_WINDOW) - stream.window
            stream.window += increment
            stream.consumed -= increment  # returned in advance
            self._sender.give_window(stream.number, increment)

    def _accept(self, stream: Stream, length: int, nbytes: int, flags: int) -> bool:
        """True if the stream accepts `nbytes` of a frame of `length`; resets it if not."""
        stream.window -= length
        if stream.window < 0:
            self._streams.fail(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return False
        if not nbytes and not flags & END_STREAM:
            self._streams.count_control(1)
        if stream.expected >= 0:  # by the request's content-length, section 8.1.1
            stream.expected -= nbytes
            if stream.expected < 0 or (flags & END_STREAM and stream.expected):
                self._streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
                return False
        return True

    def _stray(self, number: int, stream: Stream | None) -> None:
        """Process DATA of a stream that is not open, section 5.1."""
        streams = self._streams
        if streams.was_reset(number):
            return
        if stream is not None:
            streams.fail(stream, ErrorCode.STREAM_CLOSED)
        elif streams.is_idle(number):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        else:
            streams.refuse(number, ErrorCode.STREAM_CLOSED)

    def _hand_on(self, view: memoryview, position: int, nbytes: int) -> None:
        stream = self._stream
        if stream is None or not nbytes:
            return
        if stream.remote_closed:  # it was reset meanwhile
            self._stream = None
            return
        stream.on_data(view, position, position + nbytes)
        if self.left or not self._ends:
            self.credit(stream, nbytes)

    def _finish(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._ends:
            self._streams.received_all(stream)
