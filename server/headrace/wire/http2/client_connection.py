"""A client's connection of HTTP/2: we open streams, and the server answers."""

from collections.abc import Callable
from struct import Struct
from typing import Any

from headrace.core.tensors import Buffer
from headrace.wire.http2.block_reader import BlockReader, Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.connection import Connection
from headrace.wire.http2.protocol import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
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
    pack_head,
    settings_frame,
    unpack_word,
)
from headrace.wire.http2.request_blocks import RequestBlocks, RequestHead
from headrace.wire.http2.sender import JOINED, Sender
from headrace.wire.http2.stream import Fields, Stream
from headrace.wire.http2.streams import Streams

_LAST = MAX_WINDOW - 1  # numbers end there, section 5.1.1
_REMEMBERED = 4096  # streams that were reset by us
# The head of DATA, and the prefix of its gRPC message.
_pack_data = Struct(">IBIBI").pack
_PREFIX = 5
_NO_TRAILERS: Fields = []


class ClientStream(Stream):
    """One stream, opened by us."""

    def renew(self) -> None:
        """Be as before it was opened; only once the stream is no more."""
        self.consumed = self.kept = 0
        self.keeps_window = self.remote_closed = self.local_closed = False
        self.place = None

    def on_block(self, fields: Any, ends: bool) -> bool:
        """Take the head of the response, or its trailers; False if it cannot be either.

        `ends` says that the next call is that of `on_end`.
        """
        raise NotImplementedError

    def on_lost(self) -> None:
        """The stream is no more, with its connection."""

    def on_refused(self) -> None:
        """The stream is no more: the peer says that it has not looked at it."""


class ClientStreams(Streams):
    """Owned by its connection. `last` is the highest that we have opened.

    `limit` streams may be open at once, as the peer says. `leaving` means that no more can be
    opened, since the peer wants none, or there are no numbers any more. What was sent for streams
    up to `written` may have reached the peer.
    """

    open: dict[int, ClientStream]  # type: ignore[assignment]

    def __init__(self, sender: Sender, limits: Limits) -> None:
        super().__init__(sender, limits)
        self.last = -1
        self.limit = MAX_WINDOW
        self.leaving = False
        self.written = -1
        self._cancelled: dict[int, None] = {}  # of which answers may still be on their way

    @property
    def room(self) -> int:
        """How many more streams may be opened now."""
        return 0 if self.leaving else self.limit - len(self.open)

    def number(self, stream: ClientStream) -> None:
        """Open a stream; only if there is room."""
        self.last += 2
        stream.number = self.last
        stream.send_window = self._sender.initial_window
        stream.window = self._limits.stream_window
        self.open[stream.number] = stream
        if self.last >= _LAST - 1:
            self.leave()

    def leave(self) -> None:
        """Open no more streams; the connection is over when those that are open have ended."""
        self.leaving = True
        self.look_if_drained()

    def refused_from(self, number: int) -> None:
        """The peer has not looked at any stream after `number`, and will not."""
        refused = [stream for stream in self.open.values() if stream.number > number]
        for stream in refused:
            self._drop(stream)
        for stream in refused:
            stream.on_refused()

    def reset_by_peer(self, stream: Stream, code: ErrorCode) -> None:
        """The peer has reset a stream."""
        assert isinstance(stream, ClientStream)
        self._drop(stream)
        if code is ErrorCode.REFUSED_STREAM:
            stream.on_refused()
        else:
            stream.on_gone(code)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream from our side."""
        super().reset(stream, code)
        cancelled = self._cancelled
        if len(cancelled) >= _REMEMBERED:
            del cancelled[next(iter(cancelled))]
        cancelled[stream.number] = None

    def was_reset(self, number: int) -> bool:
        """Whether we ended this stream, perhaps before the peer knew."""
        return number in self._cancelled

    def received_all(self, stream: Stream) -> None:
        """The peer's side of a stream is closed, unless that was reset meanwhile."""
        if stream.remote_closed:
            return
        if not stream.local_closed:  # it does not want to know the rest
            self.reset(stream, ErrorCode.CANCEL)
        else:
            stream.remote_closed = True
            self.forget(stream)
        stream.on_end()

    def sent_all(self, stream: Stream) -> None:
        """Our side of a stream is closed."""

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        self.open.pop(stream.number, None)
        if self.leaving:
            self.look_if_drained()

    def lose_all(self) -> None:
        """The connection is no more."""
        self.leaving = self.over = True
        streams, self.open = self.open, {}
        for stream in streams.values():
            self._sender.drop(stream)
            stream.remote_closed = True
            stream.on_lost()

    def is_idle(self, number: int) -> bool:
        """Whether we have not opened this stream, so that nothing may come for it."""
        return not number & 1 or number > self.last

    def refuse(self, number: int, code: ErrorCode) -> None:
        """What comes for a stream that is over is dropped: the peer may not know that it is."""
        self.count_control(1)

    def count_reset(self) -> None:
        """What the peer resets was ours to open."""

    def closed(self, number: int) -> None:
        """Something has come for a stream that is not open; raises `ConnectionFailure`."""
        if self.is_idle(number):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a response to no request")
        if not self.was_reset(number):
            self.count_control(1)

    def _drop(self, stream: Stream) -> None:
        self._sender.drop(stream)
        stream.remote_closed = True
        self.forget(stream)


class RequestSender(Sender):
    """Owned by its connection."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.blocks = RequestBlocks()
        super().__init__(self.blocks, wake)

    def request(
        self,
        stream: Stream,
        head: RequestHead,
        own: bytes,
        message: list[Buffer],
        size: int,
        packed: bool = False,
    ) -> None:
        """A whole request of one message of `size` bytes, `packed` if it is compressed.

        `own` are further fields, as literals.
        """
        number = stream.number
        block = self.blocks.block(head) + own
        nbytes = size + _PREFIX
        if (
            len(block) > DEFAULT_FRAME
            or nbytes > self.frame
            or nbytes > stream.send_window
            or nbytes > self.window
        ):
            self._open(number, block)
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

    def open(self, stream: Stream, head: RequestHead, own: bytes) -> None:
        """The head of a request whose messages follow, each as `data`."""
        self._open(stream.number, self.blocks.block(head) + own)

    def finish(self, stream: Stream) -> None:
        """No more messages of a request."""
        stream.trailers = _NO_TRAILERS
        if not stream.queued:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        stream.trailers = None
        stream.local_closed = True
        self.send(frame(DATA, END_STREAM, stream.number))

    def _open(self, number: int, block: bytes) -> None:
        kind = HEADERS
        while len(block) > DEFAULT_FRAME:
            self.send(frame(kind, 0, number, block[:DEFAULT_FRAME]))
            kind, block = CONTINUATION, block[DEFAULT_FRAME:]
        self.send(frame(kind, END_HEADERS, number, block))


class ClientConnection(Connection):
    """One connection to a server. Owned by the thread of its event loop.

    Streams may be opened when it is `settled`, while `streams` has room.
    """

    def __init__(
        self, interpret: Callable[[Headers], object], wake: Callable[[], None], limits: Limits
    ) -> None:
        """`interpret` makes something of a block's fields, or raises `StreamFailure`.

        `wake` is the sender's.
        """
        self.sender = RequestSender(wake)
        self.streams: ClientStreams = ClientStreams(self.sender, limits)
        super().__init__(self.sender, self.streams, limits, b"")
        self._blocks = BlockReader(interpret, limits.header_list, TIMING_FIELD)
        self.said = ""  # by the peer, when it did not want to go on

    def start(self) -> None:
        """Send the client's preface, section 3.4."""
        limits = self.limits
        values = {
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: limits.frame,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_list,
        }
        self.sender.send(PREFACE + settings_frame(values))
        self.sender.give_window(0, limits.connection_window - DEFAULT_WINDOW)

    def fail(self, code: ErrorCode, text: str = "") -> None:
        """End the connection with an error, section 5.4.1."""
        if not self._failed:
            # Calls that were not written are told that they were not sent, and may go elsewhere.
            self.sender.out.clear()
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
        self.streams.leaving = True
        self.streams.refused_from(last)
        self.streams.leave()

    def _opened(self) -> int:
        return 0

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
