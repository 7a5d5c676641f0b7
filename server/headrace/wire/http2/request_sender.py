"""What a client sends: requests, in as few frames as they can be."""

from collections.abc import Callable
from struct import Struct

from headrace.core.tensors import Buffer
from headrace.wire.http2.protocol import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    pack_head,
)
from headrace.wire.http2.request_blocks import RequestBlocks, RequestHead
from headrace.wire.http2.sender import JOINED, Sender
from headrace.wire.http2.stream import Fields, Stream

# The head of DATA, and the prefix of its gRPC message.
_pack_data = Struct(">IBIBI").pack
_PREFIX = 5
_NO_TRAILERS: Fields = []


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
