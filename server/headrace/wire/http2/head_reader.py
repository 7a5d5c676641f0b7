"""HEADERS and CONTINUATION: blocks are put together, decoded, and begin streams or end them."""

from collections.abc import Callable
from typing import Protocol

from headrace.wire.http2.budget import Limits
from headrace.wire.http2.protocol import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITISED,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)
from headrace.wire.http2.request_headers import Headers, RequestBlocks, check_trailers
from headrace.wire.http2.stream import Stream
from headrace.wire.http2.streams import Streams

_BLOCK_FRAMES = 32  # CONTINUATION frames of one header block


class Head(Protocol):
    """What the head of a request was understood as."""

    def open(self, number: int) -> Stream:
        """The stream that such a request begins; its own side may be closed already."""


class HeadReader:
    """Owned by its connection. While a block is unfinished, `awaited` is its stream, else 0."""

    def __init__(
        self, interpret: Callable[[Headers], Head], streams: Streams, limits: Limits
    ) -> None:
        self.awaited = 0
        self._blocks = RequestBlocks(interpret, limits.header_list)
        self._streams = streams
        self._limits = limits
        self._block = bytearray()
        self._flags = 0
        self._frames = 0

    def headers(self, view: memoryview, flags: int, number: int, start: int, stop: int) -> None:
        """Take a HEADERS frame; raises `ConnectionFailure`."""
        if not number & 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & (PADDED | PRIORITISED):
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
            self._complete(bytes(view[start:stop]), flags, number)
            return
        self._block = bytearray(view[start:stop])
        self.awaited, self._flags, self._frames = number, flags, 0

    def continuation(self, view: memoryview, flags: int, start: int, stop: int) -> None:
        """Take a CONTINUATION frame; raises `ConnectionFailure`."""
        number = self.awaited
        if not number:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "unexpected CONTINUATION")
        self._block += view[start:stop]
        self._frames += 1
        if len(self._block) > self._limits.header_block or self._frames > _BLOCK_FRAMES:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self.awaited = 0
            self._complete(block, self._flags, number)

    def _complete(self, block: bytes, flags: int, number: int) -> None:
        streams = self._streams
        if number <= streams.last:
            self._trailers(block, flags, number)
            return
        try:
            head = self._blocks.read(block)
        except StreamFailure as failure:
            if streams.admit(number):
                streams.refuse(number, failure.code)
            return
        if not streams.admit(number):
            return
        stream = head.open(number)
        streams.begin(stream)
        if flags & END_STREAM:
            if stream.expected > 0:
                streams.fail(stream, ErrorCode.PROTOCOL_ERROR)
                return
            streams.received_all(stream)
        elif stream.local_closed:
            streams.sent_all(stream)

    def _trailers(self, block: bytes, flags: int, number: int) -> None:
        """A second block of a stream, which must end it, section 8.1."""
        streams = self._streams
        fields = self._blocks.decode_trailers(block)
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
