"""A server's connection of HTTP/2: its clients open streams."""

from collections.abc import Callable

from headrace.wire.http2.block_reader import Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.connection import Connection
from headrace.wire.http2.head_reader import Head, HeadReader
from headrace.wire.http2.keep_alive import KeepAlive, Strikes
from headrace.wire.http2.protocol import (
    DEFAULT_WINDOW,
    MAX_WINDOW,
    PREFACE,
    ConnectionFailure,
    ErrorCode,
    Setting,
    goaway,
    settings_frame,
)
from headrace.wire.http2.response_sender import ResponseSender
from headrace.wire.http2.stream import Fields
from headrace.wire.http2.streams import Streams

_DRAIN_PING = b"headrace"


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
        """`interpret` makes something of a request's fields; `wake` is the sender's.

        Without `keep_alive`, the peer may PING as often as its budget for such frames lets it.
        """
        self.sender = ResponseSender(response_head, wake)
        streams = Streams(self.sender, limits)
        heads = HeadReader(interpret, streams, limits)
        super().__init__(self.sender, streams, heads, limits, PREFACE)
        self._strikes = None if keep_alive is None else Strikes(keep_alive)
        self._draining = False

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
