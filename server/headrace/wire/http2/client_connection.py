"""A client's connection of HTTP/2: we open streams, and the server answers."""

from collections.abc import Callable

from headrace.wire.http2.block_frames import BlockFrames
from headrace.wire.http2.block_reader import BlockReader, Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.client_streams import ClientStreams
from headrace.wire.http2.connection import Connection
from headrace.wire.http2.protocol import (
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_WINDOW,
    PREFACE,
    TIMING_FIELD,
    ErrorCode,
    Setting,
    StreamFailure,
    settings_frame,
    unpack_word,
)
from headrace.wire.http2.request_sender import RequestSender


class ResponseHeads(BlockFrames):
    """The header blocks that a client gets: heads of responses, and trailers."""

    def __init__(
        self, interpret: Callable[[Headers], object], streams: ClientStreams, limits: Limits
    ) -> None:
        super().__init__(limits)
        self._blocks = BlockReader(interpret, limits.header_list, TIMING_FIELD)
        self._streams = streams

    def _complete(self, block: bytes, flags: int, number: int) -> None:
        streams = self._streams
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
        heads = ResponseHeads(interpret, self.streams, limits)
        super().__init__(self.sender, self.streams, heads, limits, b"")
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
