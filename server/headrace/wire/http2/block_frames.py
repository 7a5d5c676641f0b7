"""HEADERS and CONTINUATION: the frames of a block are put together."""

from headrace.wire.http2.budget import Limits
from headrace.wire.http2.protocol import (
    END_HEADERS,
    PADDED,
    PRIORITISED,
    ConnectionFailure,
    ErrorCode,
)

_BLOCK_FRAMES = 32  # CONTINUATION frames of one header block


class BlockFrames:
    """Owned by its connection. While a block is unfinished, `awaited` is its stream, else 0.

    Subclasses say what becomes of a block.
    """

    def __init__(self, limits: Limits) -> None:
        self.awaited = 0
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
        """Take a whole block of a stream; raises `ConnectionFailure`."""
        raise NotImplementedError
