"""A call of a gRPC client, as the stream that it is: messages out of DATA, and one end.

gRPC's messages have a prefix of five bytes: whether they are compressed, and their length. A
message that comes in one piece is taken out of the received bytes at once; a longer one is put
into its place as it comes, in memory that the system hands out as it is written to.

Sans-I/O: deadlines are the caller's to watch.
"""

from enum import Enum
from math import inf
from struct import Struct
from typing import NamedTuple

from headrace.core.blocks import BLOCKS
from headrace.core.errors import PayloadTooLarge, ServerError
from headrace.core.tensors import Buffer
from headrace.wire.compression import ANSWER_RATIO, decompress
from headrace.wire.grpc_response import (
    INTERNAL,
    OK,
    UNKNOWN,
    ResponseBlock,
)
from headrace.wire.http2.client_connection import ClientConnection, ClientStream
from headrace.wire.http2.protocol import ErrorCode

MAX_MESSAGE = (1 << 31) - 1  # bytes; no message of protobuf is longer
_PREFIX = 5
_unpack_prefix = Struct(">BI").unpack_from
_NOTHING = memoryview(b"")
_GRACE_SECS = 0.05  # servers watch deadlines, too


class Reason(Enum):
    """Why a call has no good end."""

    UNSENT = "the server has not seen it"
    REFUSED = "the server has not begun it"
    STATUS = "the server says so"
    BROKEN = "its answer is none"
    LOST = "it was cut off"
    LATE = "its deadline has passed"
    TOO_LARGE = "its answer has more bytes than it may"
    GROWN = "its answer has, once it is decompressed"


class End(NamedTuple):
    """How a call has failed; `status` is gRPC's, `text` for people."""

    reason: Reason
    status: int
    text: str


def unpacked(data: bytes, encoding: str, largest: int) -> Buffer:
    """A compressed message, which may have `largest` bytes then; raises `ServerError`."""
    return decompress(data, encoding, largest, "answer", max_ratio=ANSWER_RATIO)


def unreadable(error: Exception) -> End:
    """The end of a call whose compressed answer cannot be unpacked."""
    reason = Reason.GROWN if isinstance(error, PayloadTooLarge) else Reason.BROKEN
    return End(reason, INTERNAL, str(error))


def _problem(fields: ResponseBlock) -> End:
    """The end by a head that is not gRPC's, of which the status of HTTP may say enough."""
    reason = Reason.BROKEN if fields.status == UNKNOWN else Reason.STATUS
    return End(reason, fields.status, fields.problem)


class ClientCall(ClientStream):
    """One call. `deadline` is in seconds of the clock that the connection is given.

    A message of the answer may have `largest` bytes, also once it is decompressed.
    """

    __slots__ = (
        "_compressed", "_encoding", "_filled", "_last", "_length", "_prefix", "_view", "connection",
        "deadline", "largest", "over",
    )  # fmt: skip

    def __init__(self, deadline: float = inf, largest: int = MAX_MESSAGE) -> None:
        super().__init__(0)
        self.deadline = deadline
        self.largest = largest
        self.over = False  # `closed` was called, or `cancel`
        self.connection: ClientConnection | None = None
        self._encoding: str | None = None  # once the head is here
        self._last: ResponseBlock | None = None  # that ends the response
        self._length = -1  # of the message that is being gathered, once its prefix is here
        self._prefix = b""
        self._compressed = 0
        self._view = _NOTHING
        self._filled = 0

    # --- for subclasses

    def received(self, data: Buffer) -> None:
        """A message has come."""
        raise NotImplementedError

    def received_packed(self, data: bytes, encoding: str) -> None:
        """A compressed message has come; unless a subclass does otherwise, it is unpacked now."""
        try:
            message = unpacked(data, encoding, self.largest)
        except ServerError as error:
            self.break_off(unreadable(error))
        else:
            self.received(message)

    def closed(self, end: End | None) -> None:
        """The call has ended, well for None. Nothing is called any more."""
        raise NotImplementedError

    # --- for whoever makes the call

    def begin(self, connection: ClientConnection) -> None:
        """Open the stream; only if the connection has room."""
        self.connection = connection
        connection.streams.number(self)

    def renew(self) -> None:
        """Be as before it was begun."""
        super().renew()
        ClientCall.__init__(self, self.deadline, self.largest)

    def cancel(self) -> None:
        """End the call, and tell nothing."""
        self.over = True
        self._reset()

    def break_off(self, end: End) -> None:
        """End the call, since nothing good can come any more."""
        if not self.over:
            self._reset()
            self._close(end)

    # --- events of the stream

    def on_block(self, fields: ResponseBlock, ends: bool) -> bool:
        """Take the head of the response, or its trailers."""
        if ends:
            self._last = fields
            return fields.begins is (self._encoding is None)
        if self._encoding is not None or not fields.begins:
            return False
        self._encoding = fields.encoding
        if fields.problem:
            self.break_off(_problem(fields))
        return True

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Take messages out of received bytes."""
        if self._encoding is None:
            self.break_off(End(Reason.BROKEN, INTERNAL, "there is data before any head"))
            return
        if self._length < 0 and not self._prefix:
            while stop - start >= _PREFIX and not self.over:
                compressed, length = _unpack_prefix(view, start)
                begin = start + _PREFIX
                after = begin + length
                if after > stop or compressed or length > self.largest:
                    break
                start = after
                self.received(bytes(view[begin:after]))
        while start < stop and not self.over:
            start = self._gather(view, start, stop)

    def on_filled(self, nbytes: int) -> None:
        """More of the message that is being gathered is in its place."""
        self._grew(nbytes)

    def on_end(self) -> None:
        """No more comes."""
        if self.over:
            return
        last = self._last
        if last is None or last.status < 0:
            self._close(End(Reason.BROKEN, UNKNOWN, "the answer ends without a status"))
        elif last.status != OK:
            told = End(Reason.STATUS, last.status, last.text)
            self._close(_problem(last) if last.problem and not last.text else told)
        elif self._length >= 0 or self._prefix:
            self._close(End(Reason.BROKEN, INTERNAL, "the answer ends within a message"))
        else:
            self._close(None)

    def on_gone(self, code: ErrorCode) -> None:
        """The stream was reset."""
        assert self.connection is not None
        late = self.connection.streams.now + _GRACE_SECS >= self.deadline
        if code is ErrorCode.CANCEL and late:
            self._close(End(Reason.LATE, 4, "Deadline Exceeded"))
        else:
            self._close(End(Reason.LOST, INTERNAL, f"the stream was reset: {code.name}"))

    def on_refused(self) -> None:
        """The server has not looked at the stream."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.UNSENT if connection.streams.leaving else Reason.REFUSED
        self._close(End(reason, 14, connection.said or "the stream was refused"))

    def on_lost(self) -> None:
        """The connection is no more."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.LOST if self.number <= connection.streams.written else Reason.UNSENT
        text = connection.failure or connection.said or "the connection was lost"
        self._close(End(reason, 14, text))

    # --- gathering

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Take part of a message; the position after it."""
        if self._length < 0:
            size = min(_PREFIX - len(self._prefix), stop - start)
            self._prefix += bytes(view[start : start + size])
            start += size
            if len(self._prefix) == _PREFIX:
                self._begin_message(stop - start)
        if self._length >= 0:
            size = min(self._length - self._filled, stop - start)
            self._view[self._filled : self._filled + size] = view[start : start + size]
            start += size
            self._grew(size)
        return start

    def _begin_message(self, here: int) -> None:
        assert self.connection is not None
        compressed, length = _unpack_prefix(self._prefix)
        if length > self.largest:
            text = f"the answer has a message of {length} bytes, more than {self.largest}"
            self.break_off(End(Reason.TOO_LARGE, INTERNAL, text))
            return
        self._compressed, self._length, self._filled = compressed, length, 0
        self._view = BLOCKS.block(length)
        if length > here:
            self.connection.data.expect(self, length - here)

    def _grew(self, nbytes: int) -> None:
        """So much more of the message is in its place; hand it on if that is all of it."""
        self._filled += nbytes
        if self._filled < self._length:
            self.place = self._view[self._filled :]
            return
        data: Buffer = self._view
        self.place, self._view, self._length, self._prefix = None, _NOTHING, -1, b""
        if self._compressed:
            self.received_packed(bytes(data), self._encoding or "")
        else:
            self.received(data)

    def _reset(self) -> None:
        self.place = None  # the rest of a message that is coming in goes nowhere
        connection = self.connection
        if connection is not None and not self.remote_closed and not connection.closing:
            connection.streams.reset(self, ErrorCode.CANCEL)

    def _close(self, end: End | None) -> None:
        if not self.over:
            self.over = True
            self.closed(end)
