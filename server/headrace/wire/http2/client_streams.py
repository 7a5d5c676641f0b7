"""The streams of a client's connection: which are open, and how many may be."""

from typing import Any

from headrace.wire.http2.budget import Limits
from headrace.wire.http2.protocol import MAX_WINDOW, ConnectionFailure, ErrorCode
from headrace.wire.http2.sender import Sender
from headrace.wire.http2.stream import Stream
from headrace.wire.http2.streams import Streams

_LAST = MAX_WINDOW - 1  # numbers end there, section 5.1.1
_REMEMBERED = 4096  # streams that were reset by us


class ClientStream(Stream):
    """One stream, opened by us."""

    __slots__ = ()

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
        self.begin(stream)
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
        self.leaving = True
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
