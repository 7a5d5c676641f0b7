"""The header blocks that a server gets: they begin streams, or end their clients' side."""

from collections.abc import Callable
from typing import Protocol

from headrace.wire.http2.block_frames import BlockFrames
from headrace.wire.http2.block_reader import BlockReader, Headers
from headrace.wire.http2.budget import Limits
from headrace.wire.http2.protocol import (
    END_STREAM,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)
from headrace.wire.http2.request_headers import check_trailers, checked_request
from headrace.wire.http2.stream import Stream
from headrace.wire.http2.streams import Streams


class Head(Protocol):
    """What the head of a request was understood as."""

    def open(self, number: int) -> Stream:
        """The stream that such a request begins; its own side may be closed already."""


class HeadReader(BlockFrames):
    """Owned by its connection."""

    def __init__(
        self, interpret: Callable[[Headers], Head], streams: Streams, limits: Limits
    ) -> None:
        """`interpret` is given the fields of a request that are as section 8.1.1 wants them."""
        super().__init__(limits)
        self._streams = streams
        self._interpret = interpret
        self._blocks = BlockReader(self._checked, limits.header_list)

    def _checked(self, headers: Headers) -> Head:
        return self._interpret(checked_request(headers))

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
