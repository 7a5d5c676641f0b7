"""DATA as it comes: in parts, padded, or for streams that do not take it; and our own windows.

Bytes count against a window when their frame's head is here, and go back to it, many at once, when
the stream has taken them, section 6.9.
"""

import numpy as np

from headrace.wire.http2.budget import Limits
from headrace.wire.http2.protocol import (
    DATA,
    END_STREAM,
    HEAD_SIZE,
    MAX_WINDOW,
    PADDED,
    ConnectionFailure,
    ErrorCode,
    unpack_head,
)
from headrace.wire.http2.sender import Sender
from headrace.wire.http2.stream import Stream
from headrace.wire.http2.streams import Streams

_MANY = 4  # frames of equal size in a row, from which on they are copied as one


class DataReader:
    """Owned by its connection, which deals with whole, unpadded frames of open streams itself.

    `left` bytes of the current frame's payload are still to come, then `skip` bytes of no interest.
    `window` is the connection's; below `low` it is to be given back.
    """

    __slots__ = (
        "_ends", "_half", "_limits", "_sender", "_stream", "_streams", "left", "low", "skip",
        "window",
    )  # fmt: skip

    def __init__(self, streams: Streams, sender: Sender, limits: Limits) -> None:
        self.left = 0
        self.skip = 0
        self.window = limits.connection_window
        self.low = limits.connection_window >> 1
        self._streams = streams
        self._sender = sender
        self._limits = limits
        self._half = limits.stream_window >> 1
        self._stream: Stream | None = None  # whose frame `left` is about; None if it goes nowhere
        self._ends = False

    def begin(
        self, view: memoryview, flags: int, number: int, start: int, stop: int, end: int
    ) -> int:
        """Take a frame with the payload `view[start:stop]`, as far as it is before `end`.

        The position after what was taken; -1 if the frame is needed again once there is more of it.
        Raises `ConnectionFailure`.
        """
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
        """Put the rest of the current frame, and those after it, into the stream's place.

        A large message comes in many frames, and what is received at once holds some of them and
        parts of others: one loop takes them all, up to the last that lies within the place. The
        position after them; what is unusual is left to be taken by itself.
        """
        place = stream.place
        assert place is not None, "bytes without a place. This is a bug."
        number, left = stream.number, self.left
        room, largest = len(place), self._limits.frame
        window = min(self.window, stream.window)
        if stream.expected >= 0:
            window = min(window, stream.expected)
        filled = spent = 0
        while True:
            if left:
                nbytes = min(left, end - position)
                place[filled : filled + nbytes] = view[position : position + nbytes]
                filled += nbytes
                position += nbytes
                left -= nbytes
            if left or end - position < HEAD_SIZE:
                break
            high, low, kind, flags, owner = unpack_head(view, position)
            length = high << 8 | low
            if kind != DATA or flags or owner != number:
                break
            if not 0 < length <= min(largest, room - filled, window - spent):
                break
            stride = HEAD_SIZE + length
            count = min(end - position, room - filled, window - spent) // stride
            if count >= _MANY and (count := _alike(view, position, count, stride)) >= _MANY:
                _copy(view, position, place, filled, count, length)
                filled += count * length
                spent += count * length
                position += count * stride
                continue
            spent += length
            left = length
            position += HEAD_SIZE
        self.left = left
        self._stream = stream if left else None
        self._ends = False
        self.window -= spent
        stream.window -= spent
        if stream.expected >= 0:
            stream.expected -= spent
        if filled:
            stream.on_filled(filled)
            self.credit(stream, filled)
        return position

    def resume(self, view: memoryview, position: int, end: int) -> int:
        """Take what is here of the current frame; the position after it."""
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
        """A stream has taken bytes: give them back to its window when they are many."""
        if stream.kept:
            stream.on_keep()
        stream.consumed += nbytes
        if stream.consumed >= self._half and not stream.keeps_window and not stream.remote_closed:
            self._sender.give_window(stream.number, stream.consumed)
            stream.window += stream.consumed
            stream.consumed = 0

    def credit_connection(self) -> None:
        """Give back what all streams together have taken."""
        full = self._limits.connection_window
        self._sender.give_window(0, full - self.window)
        self.window = full

    def expect(self, stream: Stream, nbytes: int) -> None:
        """So many more bytes will be taken for sure: let the peer send them without waiting."""
        if stream.window < nbytes and not stream.remote_closed:
            increment = min(nbytes, MAX_WINDOW) - stream.window
            stream.window += increment
            stream.consumed -= increment  # given in advance
            self._sender.give_window(stream.number, increment)

    def _accept(self, stream: Stream, length: int, nbytes: int, flags: int) -> bool:
        """Whether the stream may have `nbytes` of a frame of `length`; resets it if not."""
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
        """DATA for a stream that is not open, section 5.1."""
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


def _alike(view: memoryview, position: int, count: int, stride: int) -> int:
    """How many of `count` frames, `stride` bytes from one another, begin as the first does."""
    head = view[position : position + HEAD_SIZE]
    for index in range(1, count):
        position += stride
        if view[position : position + HEAD_SIZE] != head:
            return index
    return count


def _copy(
    view: memoryview, position: int, place: memoryview, start: int, count: int, length: int
) -> None:
    """Put the payload of `count` frames of `length` bytes each where it belongs, in one pass."""
    frames = np.frombuffer(view, np.uint8, count * (HEAD_SIZE + length), position)
    payload = np.frombuffer(place, np.uint8, count * length, start)
    payload.reshape(count, length)[:] = frames.reshape(count, -1)[:, HEAD_SIZE:]
