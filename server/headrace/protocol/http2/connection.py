"""An HTTP/2 connection (RFC 9113), either side: received bytes become callbacks of streams.

Sans-I/O: `receive` is given the received bytes and the time; frames to send collect in `sender`.
Bytes are processed in one pass; payload of DATA is delivered as it arrives, everything else frame
by frame. Priorities are ignored, section 5.3.2. Nothing here raises for what a peer does: a stream
error resets the stream, a connection error sends GOAWAY and sets `closing`.
"""

from collections.abc import Callable
from struct import Struct
from sys import maxsize
from typing import Any, Protocol

from headrace.core.tensors import Buffer
from headrace.core.turns import BINARY_BITS, SMALL
from headrace.protocol.http2.headers import (
    BlockReader,
    Headers,
    check_trailers,
    checked_request,
)
from headrace.protocol.http2.keep_alive import KeepAlive, Strikes
from headrace.protocol.http2.protocol import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    DEFAULT_TABLE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_SIZE,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFailure,
    ErrorCode,
    Limits,
    Setting,
    StreamFailure,
    frame,
    goaway,
    settings_frame,
    unpack_head,
    unpack_setting,
    unpack_word,
)
from headrace.protocol.http2.streams import (
    JOINED,
    DataReader,
    FrameSender,
    Memory,
    Stream,
    Streams,
)

_SMALL_UPDATE = 1024  # bytes; smaller WINDOW_UPDATEs are charged as control frames
_SETTINGS_COST = 5  # in PINGs: each may change the windows of all streams
_BLOCK_FRAMES = 32  # CONTINUATION frames at most for one header block
_BLOCK_UNIT = 7  # bits: 128 bytes of a block, Huffman code in Python, take as long as a frame
OWN_STREAMS = 8  # of a connection, for which no room is reserved
_STEP = 32  # streams for which room is reserved at once
_FIXED_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}

_LAST = MAX_WINDOW - 1  # the highest stream number, section 5.1.1
_DRAIN_PING = b"headrace"
_PREFIX = 5  # of a gRPC message


class Http2Connection:
    """One connection, with a subclass for each side. Owned by the event-loop thread."""

    # True if the payload of GOAWAY is ignored and need not arrive as a whole.
    skips_goaway = False
    says_first = b""  # the client's preface, sent before its settings

    def __init__(
        self,
        sender: FrameSender,
        streams: Streams,
        interpret: Callable[[Headers], Any],
        limits: Limits,
        preface: bytes = b"",
        passed_over: bytes = b"",
    ) -> None:
        """`preface` is expected as the peer's first bytes, before its SETTINGS.

        `interpret` and `passed_over` are those of `BlockReader`.
        """
        self.limits = limits
        self.sender = sender
        self.streams = streams
        self.data = DataReader(streams, sender, limits)
        self.settled = False  # the peer's preface and settings have arrived
        self.failure = ""  # the reason if this side has ended the connection
        self.more = False  # received frames were left for a later turn of the loop
        self._blocks = BlockReader(interpret, limits.header_list, passed_over)
        self._preface = preface  # the part that is still expected
        self._failed = False
        self._awaited = 0  # the stream with an unfinished header block, else 0
        self._block = bytearray()
        self._block_flags = 0
        self._block_frames = 0

    @property
    def closing(self) -> bool:
        """True if the socket is to be closed once everything is written."""
        return self.streams.over

    def receive(self, view: memoryview, end: int, now: float, share: int = maxsize) -> int:
        """Process `view[:end]`; returns the number of bytes consumed.

        The rest, an incomplete frame other than DATA, must be passed again before later bytes; so
        must frames beyond the `share` of one turn of the loop, even if no bytes follow (`more`).
        DATA that ends a stream counts by its size alone, as its head was counted. `now` is in
        seconds of a monotonic clock.

        The most frequent frames are handled inline, without further calls: whole DATA frames of
        open streams, and whole header blocks.
        """
        if self._failed:
            return end
        streams, data = self.streams, self.data
        streams.now = now
        streams.work = share
        streams.spent = 0
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
                            position = stop
                            share -= length >> BINARY_BITS
                            continue
                        if stream.expected > 0:
                            stream.expected -= length
                        stream.on_data(view, start, stop)
                        data.credit(stream, length)
                        position = stop
                    else:
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
                    share -= length >> _BLOCK_UNIT
                share -= 1
                if share <= streams.spent:
                    self.more = position < end
                    break
        except ConnectionFailure as failure:
            self.fail(failure.code, str(failure))
            return end
        if data.window < data.low:
            data.credit_connection()
        return position

    def scatter(
        self,
        read: Callable[[list[Memory]], int],
        now: float,
        taken: int = 0,
        head: bytes = b"",
    ) -> tuple[bytes, bool]:
        """`DataReader.scatter`, at the time `now`; instead of `receive` while data is `regular`."""
        data = self.data
        if self._failed:
            data.regular = False
            return b"", False
        self.streams.now = now
        found = data.scatter(read, taken, head)
        if data.window < data.low:
            data.credit_connection()
        return found

    def start(self) -> None:
        """Send this side's preface, section 3.4."""
        limits, own = self.limits, self._own_settings()
        own |= {
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: limits.frame,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_list,
        }
        self.sender.send(self.says_first + settings_frame(own))
        self.sender.give_window(0, limits.connection_window - DEFAULT_WINDOW)

    def forget_heads(self) -> None:
        """Forget what header blocks mean; further ones are interpreted anew."""
        self._blocks.known.clear()

    def lost(self, most: int = maxsize) -> bool:
        """End at most `most` streams, since the connection was lost; true if others are left."""
        self._failed = True
        self._blocks.known.clear()  # heads that refer to the connection
        return self.streams.lose(most)

    def fail(self, code: ErrorCode, text: str = "") -> None:
        """End the connection with a connection error, section 5.4.1."""
        if not self._failed:
            self.failure = f"{code.name}: {text}"
            self.sender.send(goaway(self._opened(), code, text))
            self.lost(SMALL)  # the rest with the socket

    def release(self, stream: Stream) -> None:
        """Return the flow-control window that `held` has kept back."""
        stream.keeps_window = False
        self.data.credit(stream, 0)

    def pump(self, limit: int) -> None:
        """Let the sender send queued data, about `limit` bytes."""
        for stream in self.sender.pump(limit):
            self.streams.sent_all(stream)

    # --- frames

    def _read_preface(self, view: memoryview, end: int) -> int:
        position = min(len(self._preface), end)
        if view[:position] != self._preface[:position]:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "not HTTP/2")
        self._preface = self._preface[position:]
        return position

    def _headers(self, view: memoryview, flags: int, number: int, start: int, stop: int) -> None:
        """Process a HEADERS frame that is not exactly one header block."""
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
        """Process a complete header block of a stream; raises `ConnectionFailure`."""
        raise NotImplementedError

    def _check(self, kind: int, length: int) -> None:
        """Refuse frames of a wrong size before they have arrived, section 4.2.

        Also any first frame other than SETTINGS, section 3.4. Frames buffered as a whole have at
        most `DEFAULT_FRAME` bytes, so that they fit into the receive buffer.
        """
        if not self.settled and kind != SETTINGS:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS expected")
        wrong = _FIXED_SIZES.get(kind, length) != length
        if wrong or (kind == SETTINGS and length % 6):
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"frame of type {kind}: bad size")
        if kind == PUSH_PROMISE:  # never sent by clients, and by servers only if enabled
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
            self.sender.widen(increment)
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
                self.sender.widen_stream(stream, increment)
            except StreamFailure as failure:
                streams.fail(stream, failure.code)

    def _ping(self, flags: int, payload: bytes) -> None:
        self.streams.count_control(1)
        if flags & ACK:
            self._on_pong(payload)
        else:
            self._on_ping(payload)

    def _on_ping(self, payload: bytes) -> None:
        self.sender.send(frame(PING, ACK, 0, payload))

    def _on_pong(self, payload: bytes) -> None:
        """Called for the answer to a PING of this side."""

    def _on_goaway(self, view: memoryview, start: int, stop: int) -> None:
        """Process a GOAWAY: the peer accepts, or opens, no more streams."""

    def _opened(self) -> int:
        """The last stream that the peer has opened."""
        return 0

    def _own_settings(self) -> dict[Setting, int]:
        """Settings specific to this side."""
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
        # The last value of each counts; applying all of them would reward frames full of
        # duplicates.
        values = dict(unpack_setting(view, position) for position in range(start, stop, 6))
        for name, value in values.items():
            self._setting(name, value)
        self.sender.send(frame(SETTINGS, ACK, 0))

    def _setting(self, name: int, value: int) -> None:
        sender = self.sender
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
            change, sender.initial_window = value - sender.initial_window, value
            for stream in self.streams.open.values() if change else ():
                try:
                    sender.widen_stream(stream, change)
                except StreamFailure as failure:  # here it is a connection error
                    raise ConnectionFailure(failure.code, str(failure)) from None
        elif name == Setting.MAX_FRAME_SIZE:
            if not DEFAULT_FRAME <= value < 1 << 24:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "bad maximum frame size")
            sender.frame = value
            self._frame_allowed()
        elif name == Setting.HEADER_TABLE_SIZE:
            sender.shrinks = sender.shrinks or value < DEFAULT_TABLE
        elif name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "bad value of ENABLE_PUSH")

    def _frame_allowed(self) -> None:
        """The peer has told the size of the frames that it accepts."""


def _on_connection(number: int) -> None:
    if number:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"frame on stream {number}, not on 0")


class RequestHead(Protocol):
    """A decoded request head, from `interpret`; shared by all requests with the same block."""

    @property
    def kind(self) -> Callable[[Any, int], Stream]:
        """Constructor of the stream for such a request, from this head and the stream number.

        The stream's local side may already be closed.
        """


class AnswerTrailers:
    """The trailers that `ServerConnection.answer` sends, packed ahead for any last value.

    That saves 90 ns of each answer. By the length of the value, a short integer in HPACK's form:
    HEADERS up to the stream number, and from the block to the value.
    """

    __slots__ = ("pack", "parts")

    def __init__(self, block: bytes) -> None:
        """`block` ends with the last field's name."""
        pack, flags = Struct(">IB").pack, END_HEADERS | END_STREAM
        self.parts = [
            (pack((len(block) + 1 + size) << 8 | HEADERS, flags), block + bytes((size,)))
            for size in range(127)
        ]
        self.pack = Struct(f">5sI{len(block) + 1}s").pack


class ServerConnection(Http2Connection):
    """The server's side of one connection. Owned by the event-loop thread."""

    skips_goaway = True  # the client closes the connection itself

    def __init__(
        self,
        interpret: Callable[[Headers], RequestHead],
        response_head: bytes,
        trailers: AnswerTrailers,
        wake: Callable[[], object],
        limits: Limits,
        keep_alive: KeepAlive | None = None,
        reserve: Callable[[int], bool] | None = None,
    ) -> None:
        """`interpret` converts a request's fields, which conform to section 8.1.1.

        `response_head` is the block of successful responses, which `answer` uses with `trailers`;
        `wake` is the sender's. Without `keep_alive`, the peer's PINGs are limited by its budget for
        control frames only. With `reserve`, it is asked before more than `OWN_STREAMS` are open,
        for a number of further ones at a time; false refuses them.
        """
        sender = FrameSender(wake)
        super().__init__(
            sender, Streams(sender, limits), lambda fields: interpret(checked_request(fields)),
            limits, PREFACE,
        )  # fmt: skip
        # HEADERS with that block, the head of DATA, and its gRPC message prefix.
        self._pack_start = Struct(f">IBI{len(response_head)}sIBIBI").pack
        self._response_head = response_head
        self._response = len(response_head) << 8 | HEADERS
        self._ends = trailers
        self._strikes = None if keep_alive is None else Strikes(keep_alive)
        self._draining = False
        self._largest_answer = maxsize  # bytes
        self._at_once = sender.frame  # bytes that `answer` sends
        self._reserve = reserve
        self._room = limits.streams if reserve is None else min(limits.streams, OWN_STREAMS)

    def answer(self, stream: Stream, message: list[Buffer], last: bytes) -> bool:
        """End a stream by a successful response with one uncompressed message, if it fits at once.

        `last` is the value of the last trailer, of less than 127 bytes. Returns False, and does
        nothing, if the general path is needed. The caller must `rouse` the sender, or take its
        `out`.
        """
        sender = self.sender
        size = sum(map(len, message))
        nbytes = size + _PREFIX
        if (
            nbytes > self._at_once
            or nbytes > stream.send_window
            or nbytes > sender.window
            or sender.shrinks
        ):
            return False
        sender.window -= nbytes
        number, head, ends = stream.number, self._response_head, self._ends
        begins, block = ends.parts[len(last)]
        sender.out += [
            self._pack_start(self._response, 4, number, head, nbytes << 8, 0, number, 0, size),
            *message,
            ends.pack(begins, number, block),
            last,
        ]
        if size > JOINED:
            sender.large = True
        stream.local_closed = True
        streams = self.streams
        if stream.remote_closed and not streams.leaving:
            streams.open.pop(number, None)
        else:
            streams.sent_all(stream)
        return True

    def limit_answers(self, nbytes: int) -> None:
        """Bound the messages that `answer` sends to `nbytes`."""
        self._largest_answer = nbytes
        self._frame_allowed()

    def _frame_allowed(self) -> None:
        self._at_once = min(self.sender.frame, self._largest_answer + _PREFIX)

    @property
    def sent(self) -> int:
        """Grows with every answer, DATA frame and WINDOW_UPDATE sent to the peer."""
        streams, sender = self.streams, self.sender
        # Answers sent in one step have no counter of their own, to keep their path short: their
        # streams are no longer open.
        ended = (streams.last + 1) // 2 - len(streams.open)
        return ended + sender.frames + sender.windows

    def drain(self, text: str = "") -> None:
        """Accept no more streams once the peer knows, section 6.8."""
        if not self._draining and not self._failed:
            self._draining = True
            self.sender.send(goaway(MAX_WINDOW, ErrorCode.NO_ERROR, text))
            self.sender.ping(_DRAIN_PING)

    @property
    def drained(self) -> bool:
        """True if the peer knows that it can open no more streams, or is gone."""
        return self.streams.drain_to != MAX_WINDOW or self._failed

    def finish_drain(self) -> None:
        """Ignore streams opened from now on; called for the answer to `drain`'s PING, too."""
        streams = self.streams
        if self._draining and streams.drain_to == MAX_WINDOW and not self._failed:
            streams.drain_to = streams.last
            self.sender.send(goaway(streams.last, ErrorCode.NO_ERROR))
            streams.leave()

    def _on_ping(self, payload: bytes) -> None:
        streams, strikes = self.streams, self._strikes
        if strikes is not None and strikes.ping(streams.now, bool(streams.open), self.sent):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.sender.send(frame(PING, ACK, 0, payload))

    def _on_pong(self, payload: bytes) -> None:
        if payload == _DRAIN_PING:
            self.finish_drain()

    def _opened(self) -> int:
        return self.streams.last

    def _own_settings(self) -> dict[Setting, int]:
        return {
            Setting.MAX_CONCURRENT_STREAMS: self.limits.streams,
            Setting.NO_RFC7540_PRIORITIES: 1,
        }

    def _on_block(self, block: bytes, flags: int, number: int) -> None:
        """Open a stream with the head in a header block, or process a stream's trailers."""
        streams = self.streams
        if number <= streams.last:
            self._trailers(block, flags, number)
            return
        head: RequestHead | None = self._blocks.known.get(block)
        refusal = ErrorCode.REFUSED_STREAM
        if head is None:
            try:
                head = self._blocks.read(block)
            except StreamFailure as failure:
                refusal = failure.code
        if number > streams.drain_to:
            return
        streams.last = number
        if head is None or (len(streams.open) >= self._room and not self._has_room()):
            if head is None or len(streams.open) >= self.limits.streams:  # section 5.1.2
                streams.refuse(number, refusal)
            else:  # others have taken the room, which is no error of this peer
                streams.send_reset(number, refusal)
            return
        stream = head.kind(head, number)
        streams.open[number] = stream
        stream.send_window = self.sender.initial_window
        stream.window = self.limits.stream_window
        if flags & END_STREAM:
            if stream.expected > 0:
                streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
            else:
                streams.received_all(stream)
        elif stream.local_closed:
            streams.sent_all(stream)

    def _has_room(self) -> bool:
        """Reserve room for further streams; false if there is none."""
        step = min(_STEP, self.limits.streams - self._room)
        if step <= 0 or self._reserve is None or not self._reserve(step):
            return False
        self._room += step
        return True

    def spare_room(self) -> int:
        """Give room back that is not needed for now; the number of streams."""
        unused = self._room - max(len(self.streams.open), OWN_STREAMS)
        if self._reserve is None or unused < _STEP:
            return 0
        self._room -= unused
        return unused

    @property
    def reserved(self) -> int:
        """The number of streams for which room was reserved."""
        return max(self._room - OWN_STREAMS, 0) if self._reserve is not None else 0

    def _trailers(self, block: bytes, flags: int, number: int) -> None:
        """Process a second block of a stream, which must end it, section 8.1."""
        streams = self.streams
        fields = self._blocks.decode(block)
        stream = streams.open.get(number)
        if stream is None:
            if not streams.was_reset(number):
                raise ConnectionFailure(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            return
        if stream.remote_closed:
            streams.fail(stream, ErrorCode.STREAM_CLOSED)
            return
        try:
            check_trailers(fields)
        except StreamFailure as failure:
            streams.fail(stream, failure.code)
            return
        if not flags & END_STREAM or stream.expected > 0:
            streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
            return
        streams.received_all(stream)


class ClientStream(Stream):
    """A stream opened by this side."""

    def renew(self) -> None:
        """Reset to the state before the stream was opened; only once it is closed."""
        self.consumed = self.kept = 0
        self.keeps_window = self.remote_closed = self.local_closed = False
        self.place = None

    def on_block(self, fields: Any, ends: bool) -> bool:
        """Process the response's head, or its trailers; False if it is neither.

        `ends` means that `on_end` follows.
        """
        raise NotImplementedError

    def on_refused(self) -> None:
        """The stream is closed, and the peer has not processed it."""


class ClientStreams(Streams):
    """Streams opened by this side. `last` is the highest number.

    `limit` is the peer's maximum of open streams. `leaving` is set once the peer accepts no more,
    or stream numbers are used up. Data of streams up to `written` may have reached the peer.
    """

    open: dict[int, ClientStream]  # type: ignore[assignment]

    def __init__(self, sender: FrameSender, limits: Limits) -> None:
        super().__init__(sender, limits)
        self.last = -1
        self.limit = MAX_WINDOW
        self.written = -1

    @property
    def room(self) -> int:
        """The number of streams that can be opened now."""
        return 0 if self.leaving else self.limit - len(self.open)

    def number(self, stream: ClientStream) -> None:
        """Open a stream; `room` must not be 0."""
        self.last += 2
        stream.number = self.last
        stream.send_window = self._sender.initial_window
        stream.window = self._limits.stream_window
        self.open[stream.number] = stream
        if self.last >= _LAST - 1:
            self.leave()

    def refused_from(self, number: int) -> None:
        """Refuse all streams after `number`, which the peer has not processed."""
        self.leaving = True
        refused = [stream for stream in self.open.values() if stream.number > number]
        for stream in refused:
            self._drop(stream)
        for stream in refused:
            stream.on_refused()
        self.leave()

    def reset_by_peer(self, stream: Stream, code: ErrorCode) -> None:
        """Process the peer's reset of a stream."""
        assert isinstance(stream, ClientStream)
        self._drop(stream)
        if code is ErrorCode.REFUSED_STREAM:
            stream.on_refused()
        else:
            stream.on_gone(code)

    def received_all(self, stream: Stream) -> None:
        """The peer's side is closed, unless the stream was reset meanwhile."""
        if stream.remote_closed:
            return
        if not stream.local_closed:  # the peer ignores the rest
            self.reset(stream, ErrorCode.CANCEL)
        else:
            stream.remote_closed = True
            self.forget(stream)
        stream.on_end()

    def sent_all(self, stream: Stream) -> None:
        """Do nothing: the stream ends with the peer's side."""

    def refuse(self, number: int, code: ErrorCode) -> None:
        """Ignore frames of a closed stream: the peer may not know that it is closed."""
        self.count_control(1)

    def count_reset(self) -> None:
        """Count nothing: streams that the peer resets were opened by this side."""

    def closed(self, number: int) -> None:
        """Process a frame of a stream that is not open; raises `ConnectionFailure`."""
        if self.is_idle(number):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a response to no request")
        if not self.was_reset(number):
            self.count_control(1)


class ClientConnection(Http2Connection):
    """The client's side of one connection. Owned by the event-loop thread.

    Streams may be opened once it is `settled`, while `streams` has room.
    """

    streams: ClientStreams
    says_first = PREFACE

    def __init__(
        self,
        interpret: Callable[[Headers], object],
        wake: Callable[[], object],
        limits: Limits,
        passed_over: bytes = b"",
    ) -> None:
        """`interpret` converts a block's fields, or raises `StreamFailure`.

        `wake` is the sender's; `passed_over` is the start of a field that is not read.
        """
        sender = FrameSender(wake)
        streams = ClientStreams(sender, limits)
        super().__init__(sender, streams, interpret, limits, passed_over=passed_over)
        self.said = ""  # the peer's text in its GOAWAY

    def fail(self, code: ErrorCode, text: str = "") -> None:
        """End the connection with a connection error, section 5.4.1."""
        if not self._failed:
            # Calls that were not written yet are reported as unsent, so that they may be retried.
            self.sender.clear()
        super().fail(code, text)

    def _setting(self, name: int, value: int) -> None:
        if name == Setting.MAX_CONCURRENT_STREAMS:
            self.streams.limit = min(value, MAX_WINDOW)
        else:
            super()._setting(name, value)

    def _on_goaway(self, view: memoryview, start: int, stop: int) -> None:
        last, code = unpack_word(view, start)[0] & MAX_WINDOW, unpack_word(view, start + 4)[0]
        text = bytes(view[start + 8 : min(stop, start + 264)]).decode("utf-8", "replace")
        known = code <= ErrorCode.HTTP_1_1_REQUIRED
        self.said = f"{ErrorCode(code).name if known else code}: {text}"
        self.streams.refused_from(last)

    def _own_settings(self) -> dict[Setting, int]:
        return {Setting.ENABLE_PUSH: 0}

    def _on_block(self, block: bytes, flags: int, number: int) -> None:
        streams = self.streams
        stream = streams.open.get(number)
        try:
            fields = self._blocks.read(block)
        except StreamFailure as failure:
            if stream is None:
                streams.closed(number)
            else:
                streams.fail(stream, failure.code)
            return
        if stream is None:
            streams.closed(number)
        elif not stream.on_block(fields, bool(flags & END_STREAM)):
            streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
        elif flags & END_STREAM:
            streams.received_all(stream)
