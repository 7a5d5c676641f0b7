"""A connection of HTTP/2 (RFC 9113), on either side: received bytes become calls of streams.

Sans-I/O: `receive` is given what has arrived and the time; frames to send collect in `sender`. One
pass over the bytes; payload of DATA is handed on as it comes, everything else frame by frame.
Priorities are ignored, section 5.3.2. Nothing here raises for what a peer does: an error of a
stream resets it, one of the connection sends GOAWAY and sets `closing`.
"""

from headrace.wire.http2.budget import Limits
from headrace.wire.http2.data_reader import DataReader
from headrace.wire.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_SIZE,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFailure,
    ErrorCode,
    Setting,
    StreamFailure,
    goaway,
    unpack_head,
    unpack_setting,
    unpack_word,
)
from headrace.wire.http2.sender import Sender
from headrace.wire.http2.stream import Stream
from headrace.wire.http2.streams import Streams

_SMALL_UPDATE = 1024  # bytes; WINDOW_UPDATEs of less mean nothing by themselves
_SETTINGS_COST = 5  # PINGs: each may change the windows of all streams
_BLOCK_FRAMES = 32  # CONTINUATION frames of one header block
_FIXED_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


class Connection:
    """One connection. Owned by the thread of its event loop. Subclasses are its two sides."""

    # Whether a GOAWAY means nothing to us, and need not be here as a whole.
    skips_goaway = False

    def __init__(self, sender: Sender, streams: Streams, limits: Limits, preface: bytes) -> None:
        """`preface` is what the peer's first bytes have to be, before its SETTINGS."""
        self.limits = limits
        self.streams = streams
        self.data = DataReader(streams, sender, limits)
        self.settled = False  # the peer's preface and settings are here
        self.failure = ""  # why we ended it, if we did
        self._sender = sender
        self._preface = preface  # what of it is still to come
        self._failed = False
        self._awaited = 0  # the stream whose header block is unfinished, else 0
        self._block = bytearray()
        self._block_flags = 0
        self._block_frames = 0

    @property
    def closing(self) -> bool:
        """Whether the socket is to be closed once what was sent is written."""
        return self.streams.over

    def receive(self, view: memoryview, end: int, now: float) -> int:
        """Take in `view[:end]`; how many bytes of it were consumed.

        The rest, less than a frame other than DATA, has to come again before what follows it.
        `now` is in seconds of any clock that does not go back.

        What most bytes are is done in here, without a call of its own: whole frames of DATA for
        open streams, and whole header blocks.
        """
        if self._failed:
            return end
        streams, data = self.streams, self.data
        streams.now = now
        opened = streams.open
        largest = self.limits.frame
        try:
            position = self._read_preface(view, end) if self._preface else 0
            if data.left or data.skip:
                position = data.resume(view, position, end)
            while end - position >= HEAD_SIZE:
                high, low, kind, flags, number = unpack_head(view, position)
                length = high << 8 | low
                number &= MAX_WINDOW
                start = position + HEAD_SIZE
                stop = start + length
                if length > largest:
                    raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "frame too large")
                if self._awaited and (kind != CONTINUATION or number != self._awaited):
                    raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION expected")
                if kind == DATA:
                    stream = opened.get(number)
                    if (
                        stream is not None
                        and flags <= END_STREAM
                        and stop <= end
                        and stream.place is None
                        and not stream.remote_closed
                        and 0 < length <= data.window
                        and length <= stream.window
                        and (
                            stream.expected in (-1, length)
                            or (stream.expected > length and not flags)
                        )
                    ):
                        data.window -= length
                        stream.window -= length
                        if flags:
                            if not stream.take_last(view, start, stop):
                                stream.on_data(view, start, stop)
                                streams.received_all(stream)
                        else:
                            if stream.expected > 0:
                                stream.expected -= length
                            stream.on_data(view, start, stop)
                            data.credit(stream, length)
                        position = stop
                        continue
                    after = position
                    if stream is not None and stream.place is not None:
                        after = data.fill(stream, view, position, end)
                    if after == position:
                        after = data.begin(view, flags, number, start, stop, end)
                        if after < 0:
                            break
                    position = after
                elif stop > end:
                    self._check(kind, length)
                    if kind > CONTINUATION or (kind == GOAWAY and self.skips_goaway):
                        streams.count_control(1)
                        data.skip = stop - end
                        position = end
                    break
                else:
                    if kind == HEADERS and self.settled:
                        if (
                            length > DEFAULT_FRAME
                            or not number & 1
                            or not flags & END_HEADERS
                            or flags & (PADDED | PRIORITISED)
                        ):
                            self._headers(view, flags, number, start, stop)
                        else:
                            self._on_block(view[start:stop].tobytes(), flags, number)
                    else:
                        self._other(view, kind, flags, number, start, stop)
                    position = stop
        except ConnectionFailure as failure:
            self.fail(failure.code, str(failure))
            return end
        if data.window < data.low:
            data.credit_connection()
        return position

    def lost(self) -> None:
        """The connection is no more."""
        self._failed = True
        self.streams.lose_all()

    def fail(self, code: ErrorCode, text: str = "") -> None:
        """End the connection with an error, section 5.4.1."""
        if not self._failed:
            self.failure = f"{code.name}: {text}"
            self._sender.send(goaway(self._opened(), code, text))
            self.lost()

    def release(self, stream: Stream) -> None:
        """Give the window back to the peer that `held` has kept."""
        stream.keeps_window = False
        self.data.credit(stream, 0)

    def pump(self, limit: int) -> None:
        """Let the sender send what waits, about `limit` bytes."""
        for stream in self._sender.pump(limit):
            self.streams.sent_all(stream)

    # --- frames

    def _read_preface(self, view: memoryview, end: int) -> int:
        position = min(len(self._preface), end)
        if view[:position] != self._preface[:position]:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "not HTTP/2")
        self._preface = self._preface[position:]
        return position

    def _headers(self, view: memoryview, flags: int, number: int, start: int, stop: int) -> None:
        """Take a HEADERS frame that is more, or less, than a header block."""
        self._check(HEADERS, stop - start)
        if not number & 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & PADDED:
            if start >= stop:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short")
            stop -= view[start]
            start += 1
        if flags & PRIORITISED:
            start += 5
        if start > stop:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than HEADERS")
        if flags & END_HEADERS:
            self._on_block(view[start:stop].tobytes(), flags, number)
            return
        self._block = bytearray(view[start:stop])
        self._awaited, self._block_flags, self._block_frames = number, flags, 0

    def _continuation(self, view: memoryview, flags: int, start: int, stop: int) -> None:
        number = self._awaited
        if not number:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "unexpected CONTINUATION")
        self._block += view[start:stop]
        self._block_frames += 1
        if len(self._block) > self.limits.header_block or self._block_frames > _BLOCK_FRAMES:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self._awaited = 0
            self._on_block(block, self._block_flags, number)

    def _on_block(self, block: bytes, flags: int, number: int) -> None:
        """Take a whole header block of a stream; raises `ConnectionFailure`."""
        raise NotImplementedError

    def _check(self, kind: int, length: int) -> None:
        """Refuse frames of a wrong size before they are here as a whole, section 4.2.

        And any but SETTINGS as the first, section 3.4. What is awaited as a whole has at most
        `DEFAULT_FRAME` bytes: more need not fit into what is received at once.
        """
        if not self.settled and kind != SETTINGS:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS expected")
        wrong = _FIXED_SIZES.get(kind, length) != length
        if wrong or (kind == SETTINGS and length % 6):
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"frame of type {kind}: bad size")
        if kind == PUSH_PROMISE:  # which clients never send, and servers only if they may
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE")
        if kind == GOAWAY and length < 8:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY: bad size")
        if (
            length > DEFAULT_FRAME
            and kind <= CONTINUATION
            and not (kind == GOAWAY and self.skips_goaway)
        ):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, f"frame of type {kind}: too large")

    def _other(
        self, view: memoryview, kind: int, flags: int, number: int, start: int, stop: int
    ) -> None:
        self._check(kind, stop - start)
        if kind == WINDOW_UPDATE:
            self._window_update(number, unpack_word(view, start)[0] & MAX_WINDOW)
        elif kind == RST_STREAM:
            self._rst_stream(number, unpack_word(view, start)[0])
        elif kind == PING:
            _on_connection(number)
            self._ping(flags, view[start:stop].tobytes())
        elif kind == SETTINGS:
            _on_connection(number)
            self._settings(flags, view, start, stop)
        elif kind == CONTINUATION:
            self._continuation(view, flags, start, stop)
        elif kind == PRIORITY:
            if not number:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
            self.streams.count_control(1)
        else:  # unknown types are ignored, section 5.5
            self.streams.count_control(1)
            if kind == GOAWAY:
                _on_connection(number)
                self._on_goaway(view, start, stop)

    def _rst_stream(self, number: int, code: int) -> None:
        streams = self.streams
        stream = streams.open.get(number)
        if stream is not None:
            known = code <= ErrorCode.HTTP_1_1_REQUIRED
            streams.reset_by_peer(stream, ErrorCode(code) if known else ErrorCode.CANCEL)
            return
        if streams.is_idle(number):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        streams.count_control(1)

    def _window_update(self, number: int, increment: int) -> None:
        streams = self.streams
        if increment < _SMALL_UPDATE:
            streams.count_control(1)
        if not number:
            if not increment:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self._sender.widen(increment)
            return
        stream = streams.open.get(number)
        if stream is None:
            if streams.is_idle(number):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE: idle stream")
            streams.count_control(1)
        elif not increment:
            streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
        else:
            try:
                self._sender.widen_stream(stream, increment)
            except StreamFailure as failure:
                streams.fail(stream, failure.code)

    def _ping(self, flags: int, payload: bytes) -> None:
        self.streams.count_control(1)
        if flags & ACK:
            self._on_pong(payload)
        else:
            self._on_ping(payload)

    def _on_ping(self, payload: bytes) -> None:
        self._sender.answer_ping(payload)

    def _on_pong(self, payload: bytes) -> None:
        """A PING of ours was answered."""

    def _on_goaway(self, view: memoryview, start: int, stop: int) -> None:
        """The peer takes, or opens, no more streams."""

    def _opened(self) -> int:
        """The last stream that the peer has opened."""
        raise NotImplementedError

    def _settings(self, flags: int, view: memoryview, start: int, stop: int) -> None:
        if flags & ACK:
            if start != stop:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with values")
            if not self.settled:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS expected")
            self.streams.count_control(1)
            return
        self.streams.count_control(_SETTINGS_COST)
        self.settled = True
        # The last value of each counts; applying every one would be work for a frame full of them.
        values = dict(unpack_setting(view, position) for position in range(start, stop, 6))
        for name, value in values.items():
            self._setting(name, value)
        self._sender.acknowledge_settings()

    def _setting(self, name: int, value: int) -> None:
        sender = self._sender
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
            change, sender.initial_window = value - sender.initial_window, value
            for stream in self.streams.open.values() if change else ():
                try:
                    sender.widen_stream(stream, change)
                except StreamFailure as failure:  # here it is the connection's error
                    raise ConnectionFailure(failure.code, str(failure)) from None
        elif name == Setting.MAX_FRAME_SIZE:
            if not DEFAULT_FRAME <= value < 1 << 24:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "bad maximum frame size")
            sender.frame = value
        elif name == Setting.HEADER_TABLE_SIZE:
            sender.table.limit_table(value)
        elif name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "bad value of ENABLE_PUSH")


def _on_connection(number: int) -> None:
    if number:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"frame on stream {number}, not on 0")
