"""A server's connection of HTTP/2: its clients open streams, and get responses.

The two ends of most calls are here: a header block that opens a stream, known by its bytes, and a
whole response in as few frames as it can be.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

from headrace.core.tensors import Buffer
from headrace.wire.http2.block_reader import BlockReader, Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.connection import Connection
from headrace.wire.http2.keep_alive import KeepAlive, Strikes
from headrace.wire.http2.protocol import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    PREFACE,
    TIMING_FIELD,
    ConnectionFailure,
    ErrorCode,
    Setting,
    StreamFailure,
    frame,
    goaway,
    settings_frame,
)
from headrace.wire.http2.request_headers import check_trailers, checked_request
from headrace.wire.http2.response_headers import ResponseBlocks
from headrace.wire.http2.sender import JOINED, Sender
from headrace.wire.http2.stream import Fields, Stream
from headrace.wire.http2.streams import Streams

_DRAIN_PING = b"headrace"
# HEADERS of three bytes, the head of DATA, and the prefix of its gRPC message.
_pack_start = Struct(">IBI3sIBIBI").pack
_PREFIX = 5
# HEADERS up to the number of the stream; the block is one byte, a field's name, and its value.
_pack_end = Struct(">5sI1s16s").pack
# Of these, what depends on how many bytes the value has: a short integer in HPACK's form.
_ENDS = [
    (
        Struct(">IB").pack((1 + len(TIMING_FIELD) + 1 + size) << 8 | HEADERS,
                           END_HEADERS | END_STREAM),
        TIMING_FIELD + bytes((size,)),
    )
    for size in range(127)
]  # fmt: skip

OK_FIELDS: Fields = [(b"grpc-status", b"0")]


class Head(Protocol):
    """What the head of a request was understood as; shared by all requests with the same block."""

    @property
    def kind(self) -> Callable[[Any, int], Stream]:
        """Makes the stream that such a request begins, of this head and the stream's number.

        The stream's own side may be closed already.
        """


class ResponseSender(Sender):
    """Owned by its connection."""

    def __init__(self, head: Fields, wake: Callable[[], None]) -> None:
        """`head` are the fields of a good response's head, after the status."""
        self.blocks = ResponseBlocks(head, OK_FIELDS)
        super().__init__(self.blocks, wake)

    def head(self, stream: Stream, extra: Fields | None = None) -> None:
        """The good head of a response; `extra` are further fields, of this response alone."""
        block = self.blocks.good_head()
        if extra:
            block += self.blocks.other(extra)
        self.send(frame(HEADERS, END_HEADERS, stream.number, block))

    def refuse(self, stream: Stream, status: int, fields: Fields) -> None:
        """A response without any message: one HEADERS that ends the stream."""
        block = self.blocks.other(fields, status)
        self._last_headers(stream, block)

    def trailers(self, stream: Stream, fields: Fields) -> None:
        """End the response, behind all that is queued for it."""
        if stream.queued:
            stream.trailers = fields
        else:
            self._trailers(stream, fields)

    def _end(self, stream: Stream) -> None:
        assert stream.trailers is not None
        self._trailers(stream, stream.trailers)

    def _trailers(self, stream: Stream, fields: Fields) -> None:
        blocks = self.blocks
        good = fields[0] is OK_FIELDS[0]  # of which there are more than others: they are known
        block = blocks.good_trailers() + blocks.other(fields[1:]) if good else blocks.other(fields)
        stream.trailers = None
        self._last_headers(stream, block)

    def _last_headers(self, stream: Stream, block: bytes) -> None:
        stream.local_closed = True
        # At most some ten kilobytes, which every peer takes in one frame.
        self.send(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block))


class ServerConnection(Connection):
    """One client's connection. Owned by the thread of its event loop."""

    skips_goaway = True  # the client will end by itself

    def __init__(
        self,
        interpret: Callable[[Headers], Head],
        response_head: Fields,
        wake: Callable[[], None],
        limits: Limits,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        """`interpret` makes something of a request's fields, which are as section 8.1.1 wants them.

        `response_head` and `wake` are the sender's.

        Without `keep_alive`, the peer may PING as often as its budget for such frames lets it.
        """
        self.sender = ResponseSender(response_head, wake)
        super().__init__(self.sender, Streams(self.sender, limits), limits, PREFACE)
        self._blocks = BlockReader(
            lambda headers: interpret(checked_request(headers)), limits.header_list
        )
        self._strikes = None if keep_alive is None else Strikes(keep_alive)
        self._draining = False

    def answer(self, stream: Stream, message: list[Buffer], timing: bytes) -> bool:
        """End a stream by a good response of one uncompressed message, if it can go as a whole.

        `timing` is the trailer `server-timing`. False if it cannot go at once and as usual: then
        nothing was done. It is for the caller to `rouse` the sender, or to take its `out`.
        """
        sender = self.sender
        blocks = sender.blocks
        size = sum(map(len, message))
        nbytes = size + _PREFIX
        if (
            nbytes > sender.frame
            or nbytes > stream.send_window
            or nbytes > sender.window
            or blocks.head is None
            or blocks.trailers is None
        ):
            return False
        sender.window -= nbytes
        number = stream.number
        begins, name = _ENDS[len(timing)]
        sender.out += [
            _pack_start(769, 4, number, blocks.head, nbytes << 8, 0, number, 0, size),
            *message,
            _pack_end(begins, number, blocks.trailers, name),
            timing,
        ]
        if size > JOINED:
            sender.large = True
        stream.local_closed = True
        streams = self.streams
        if stream.remote_closed and streams.drain_to == MAX_WINDOW:
            streams.open.pop(number, None)
        else:
            streams.sent_all(stream)
        return True

    @property
    def sent(self) -> int:
        """Grows with what is sent to the peer; an answer counts from when its call began."""
        sender = self.sender
        return self.streams.last + sender.frames + sender.windows

    def start(self) -> None:
        """Send the server's preface, section 3.4."""
        limits = self.limits
        values = {
            Setting.MAX_CONCURRENT_STREAMS: limits.streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: limits.frame,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_list,
            Setting.NO_RFC7540_PRIORITIES: 1,
        }
        self.sender.send(settings_frame(values))
        self.sender.give_window(0, limits.connection_window - DEFAULT_WINDOW)

    def drain(self, text: str = "") -> None:
        """Take no more streams, as soon as the peer knows of it, section 6.8."""
        if not self._draining and not self._failed:
            self._draining = True
            self.sender.send(goaway(MAX_WINDOW, ErrorCode.NO_ERROR, text))
            self.sender.ping(_DRAIN_PING)

    @property
    def drained(self) -> bool:
        """Whether the peer knows that it can open no more streams, or is no more."""
        return self.streams.drain_to != MAX_WINDOW or self._failed

    def finish_drain(self) -> None:
        """Ignore streams opened from now on; the answer to `drain`'s PING does this by itself."""
        streams = self.streams
        if self._draining and streams.drain_to == MAX_WINDOW and not self._failed:
            streams.drain_to = streams.last
            self.sender.send(goaway(streams.last, ErrorCode.NO_ERROR))
            streams.look_if_drained()

    def _on_ping(self, payload: bytes) -> None:
        streams, strikes = self.streams, self._strikes
        if strikes is not None and strikes.ping(streams.now, bool(streams.open), self.sent):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.sender.answer_ping(payload)

    def _on_pong(self, payload: bytes) -> None:
        if payload == _DRAIN_PING:
            self.finish_drain()

    def _opened(self) -> int:
        return self.streams.last

    def _on_block(self, block: bytes, flags: int, number: int) -> None:
        """Begin a stream with the head that a block of fields says, or take a stream's trailers."""
        streams = self.streams
        if number <= streams.last:
            self._trailers(block, flags, number)
            return
        head: Head | None = self._blocks.known.get(block)
        refusal = ErrorCode.REFUSED_STREAM
        if head is None:
            try:
                head = self._blocks.read(block)
            except StreamFailure as failure:
                refusal = failure.code
        if number > streams.drain_to:
            return
        streams.last = number
        limits = self.limits
        if head is None or len(streams.open) >= limits.streams:  # section 5.1.2
            streams.refuse(number, refusal)
            return
        stream = head.kind(head, number)
        streams.open[number] = stream
        stream.send_window = self.sender.initial_window
        stream.window = limits.stream_window
        if flags & END_STREAM:
            if stream.expected > 0:
                streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
            else:
                streams.received_all(stream)
        elif stream.local_closed:
            streams.sent_all(stream)

    def _trailers(self, block: bytes, flags: int, number: int) -> None:
        """A second block of a stream, which must end it, section 8.1."""
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
