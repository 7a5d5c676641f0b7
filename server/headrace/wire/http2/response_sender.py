"""What a server sends: responses, in as few frames as they can be."""

from collections.abc import Callable
from struct import Struct

from headrace.core.tensors import Buffer
from headrace.wire.http2.protocol import END_HEADERS, END_STREAM, HEADERS, TIMING_FIELD, frame
from headrace.wire.http2.response_headers import ResponseBlocks
from headrace.wire.http2.sender import JOINED, Sender
from headrace.wire.http2.stream import Fields, Stream

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


class ResponseSender(Sender):
    """Owned by its connection."""

    def __init__(self, head: Fields, wake: Callable[[], None]) -> None:
        """`head` are the fields of a good response's head, after the status."""
        self.blocks = ResponseBlocks(head, OK_FIELDS)
        super().__init__(self.blocks, wake)

    def answer(self, stream: Stream, message: list[Buffer], size: int, timing: bytes) -> bool:
        """A whole good response of one uncompressed message, if it can go at once and as usual.

        `timing`, of less than 127 bytes, is the trailer `server-timing`. False if not: then nothing
        was done. It is for the caller to `rouse`, or to take `out`.
        """
        nbytes = size + _PREFIX
        blocks = self.blocks
        if (
            nbytes > self.frame
            or nbytes > stream.send_window
            or nbytes > self.window
            or blocks.head is None
            or blocks.trailers is None
        ):
            return False
        self.window -= nbytes
        number = stream.number
        out = self.out
        out.append(_pack_start(769, 4, number, blocks.head, nbytes << 8, 0, number, 0, size))
        out += message
        begins, name = _ENDS[len(timing)]
        out.append(_pack_end(begins, number, blocks.trailers, name))
        out.append(timing)
        if size > JOINED:
            self.large = True
        stream.local_closed = True
        return True

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
