"""gRPC over HTTP/2, both sides: request heads, response heads and trailers, messages.

A message has a prefix of five bytes: a compression flag, and its length. A message that arrives in
one piece is a slice of the received bytes. A longer one is gathered in a buffer whose memory the
system provides as it is written.

Sans-I/O: the caller watches deadlines.
"""

import re
from binascii import b2a_base64
from enum import Enum
from math import inf
from struct import Struct
from sys import maxsize
from time import perf_counter
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from headrace.core.blocks import BLOCKS
from headrace.core.errors import PayloadTooLarge, ServerError
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.core.turns import BINARY_BITS, PACKED, PIECE_SECS
from headrace.protocol.compression import ANSWER_RATIO, ENCODINGS, decompress
from headrace.protocol.http2.connection import AnswerTrailers, ClientConnection, ClientStream
from headrace.protocol.http2.headers import Headers, header_block, literal
from headrace.protocol.http2.protocol import ErrorCode, StreamFailure
from headrace.protocol.http2.streams import Fields, Stream
from headrace.protocol.parameters import parse_grpc_timeout
from headrace.protocol.status import BEGUN, begun_told

OK, CANCELLED, UNKNOWN, DEADLINE_EXCEEDED = 0, 1, 2, 4
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
# gRPC statuses for HTTP statuses that come without one, mostly from proxies.
_STATUSES = {
    400: INTERNAL, 401: 16, 403: 7, 404: UNIMPLEMENTED, 429: UNAVAILABLE, 502: UNAVAILABLE,
    503: UNAVAILABLE, 504: UNAVAILABLE,
}  # fmt: skip
_LONGEST_TEXT = 4096  # characters of a status text
MAX_MESSAGE = (1 << 31) - 1  # bytes; protobuf's own maximum
PREFIX = 5
unpack_prefix = Struct(">BI").unpack_from
pack_prefix = Struct(">BI").pack
_GRACE_SECS = 0.05  # added to deadlines, which servers watch, too
_MOST_DIGITS = 99_999_999  # of a timeout
_MAX_LENGTH_DIGITS = 18

_TYPE = (b"content-type", b"application/grpc")
_ACCEPTED = (b"grpc-accept-encoding", b"identity,deflate,gzip")
RESPONSE_FIELDS: Fields = [(b":status", b"200"), _TYPE, _ACCEPTED]
RESPONSE_HEAD = header_block(RESPONSE_FIELDS)
OK_FIELDS: Fields = [(b"grpc-status", b"0")]
# The start of a trailer field in HPACK, up to the length of its value: a literal that changes no
# table, since its value differs from one response to the next.
TIMING_FIELD = b"\x00\x0dserver-timing"
ANSWER_TRAILERS = AnswerTrailers(header_block(OK_FIELDS) + TIMING_FIELD)
_NOT_SENT = (b"te", b"content-type")  # by applications; the transport sets them


# --- request heads


def request_fields(secure: bool, authority: str, agent: bytes) -> Fields:
    """Fields common to all requests to a server, without `:path`; see `with_path`."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"https" if secure else b"http"),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        _TYPE,
        (b"user-agent", agent),
        _ACCEPTED,
    ]


def with_path(fields: Headers, path: bytes) -> bytes:
    """The head of requests to a procedure: `request_fields`, the path, and further fields."""
    return header_block([*fields[:2], (b":path", path), *fields[2:]])


def timeout_field(seconds: float) -> bytes:
    """`grpc-timeout` as an HPACK literal; empty for 0."""
    if not seconds:
        return b""
    for unit, number in ((b"u", seconds * 1e6), (b"m", seconds * 1e3), (b"S", seconds)):
        whole = max(round(number), 1)
        if whole <= _MOST_DIGITS:
            return literal(b"grpc-timeout", b"%d%s" % (whole, unit))
    return b""


class CallHead:
    """The decoded head of a request; shared by all requests with the same header block.

    `packing` is the compression of answers, "" for none. `refusal` is a complete response that
    answers the call at once, without a message.
    """

    timeout: float | None = None  # seconds
    encoding = ""  # of compressed messages; "" for none
    accepts: tuple[str, ...] = ()
    packing = ""
    content_length = -1
    refusal: Fields | None = None

    def __init__(self, headers: Headers) -> None:
        """Raises `StreamFailure` if the request is malformed as HTTP."""
        fields = dict(headers)
        self.path = fields[b":path"].decode("latin-1")
        self.metadata: dict[str, str] = {}
        for name, value in headers:
            if not (
                name.startswith((b":", b"grpc-")) or name.endswith(b"-bin") or name in _NOT_SENT
            ):
                text = value.decode("latin-1")
                key = name.decode("latin-1")
                known = self.metadata.get(key)
                self.metadata[key] = text if known is None else f"{known}, {text}"
        if (length := fields.get(b"content-length")) is not None:
            if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
                raise StreamFailure(ErrorCode.PROTOCOL_ERROR, "bad content-length")
            self.content_length = int(length)
        self.refusal = self._read(fields)

    def _read(self, fields: dict[bytes, bytes]) -> Fields | None:
        """Read gRPC's fields; returns the refusal of a request that is not gRPC."""
        if fields[b":method"] != b"POST":
            return [(b":status", b"405"), (b"allow", b"POST")]
        kind = fields.get(b"content-type", b"").lower()
        if kind != b"application/grpc" and not kind.startswith(
            (b"application/grpc+proto", b"application/grpc;")
        ):
            return [(b":status", b"415"), (b"accept-post", b"application/grpc")]
        if (timeout := fields.get(b"grpc-timeout")) is not None:
            self.timeout = parse_grpc_timeout(timeout.decode("latin-1"))
            if self.timeout is None:
                return refusal(INTERNAL, "bad grpc-timeout")
        accepts = map(str.strip, _text(fields, b"grpc-accept-encoding").split(","))
        self.accepts = tuple(item for item in accepts if item in ENCODINGS)
        encoding = _text(fields, b"grpc-encoding").strip()
        if encoding not in ("", "identity"):
            self.encoding = encoding
            # As gRPC's own client does.
            self.packing = encoding if encoding in self.accepts else self.preferred
            if encoding not in ENCODINGS:
                text = f"compression {encoding!r} is not supported, only gzip and deflate"
                return refusal(UNIMPLEMENTED, text)
        return None

    @property
    def preferred(self) -> str:
        """The preferred encoding for answers; "" for none."""
        return ENCODINGS[0] if ENCODINGS[0] in self.accepts else next(iter(self.accepts), "")


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("latin-1").lower()


# --- response heads and trailers


def refusal(status: int, text: str) -> Fields:
    """A response that consists of a gRPC status only."""
    return [*RESPONSE_FIELDS, *status_fields(status, bounded(text))]


def status_fields(status: int, text: str, details: bytes = b"") -> Fields:
    """`grpc-status`, `grpc-message` and `grpc-status-details-bin`."""
    fields: Fields = [(b"grpc-status", b"%d" % status)]
    if text:
        fields.append((b"grpc-message", percent_encoded(text)))
    if details:
        fields.append((b"grpc-status-details-bin", b2a_base64(details, newline=False).rstrip(b"=")))
    return fields


def percent_encoded(text: str) -> bytes:
    """Encode text for `grpc-message`: printable ASCII except `%`, the rest of UTF-8 escaped."""
    data = text.encode(errors="replace")
    # A client may choose what an error quotes: a substitution by a function takes ten times this.
    return data if _PLAIN(data) else b"".join(map(_ESCAPED.__getitem__, data))


_PLAIN = re.compile(rb"[\x20-\x24\x26-\x7e]*").fullmatch
_ESCAPED = [bytes([n]) if _PLAIN(bytes([n])) else b"%%%02X" % n for n in range(256)]


_BEGUN = BEGUN.encode()


class ResponseBlock:
    """A header block of a response. `status` is the gRPC status, -1 if absent; `text` its message.

    `begins` is true for a block with an HTTP status. `problem` is the reason why no messages can be
    read from the response; `status` is then set accordingly. `encoding` is that of compressed
    messages. `begun` is as in `End`.
    """

    __slots__ = ("begins", "begun", "encoding", "problem", "status", "text")

    def __init__(self, headers: Headers) -> None:
        """Raises `StreamFailure` if the block is not a response."""
        fields = dict(headers)
        self.begins = b":status" in fields
        self.problem = ""
        self.encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
        said = fields.get(b"grpc-status")
        self.status = -1 if said is None else _number(said, UNKNOWN)
        text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
        self.text = text[:_LONGEST_TEXT]
        self.begun = begun_told(fields[_BEGUN]) if _BEGUN in fields else None
        if self.begins and said is None:
            self._look(_number(fields[b":status"], 0), fields.get(b"content-type", b""))

    def _look(self, http: int, kind: bytes) -> None:
        if not 200 <= http <= 999:
            raise StreamFailure(ErrorCode.PROTOCOL_ERROR, "no status of a response")
        if http != 200:
            self.status = _STATUSES.get(http, UNKNOWN)
            self.problem = f"the answer has the HTTP status {http}"
        elif not kind.lower().startswith(b"application/grpc"):
            self.status = UNKNOWN
            shown = kind.decode("latin-1")[:100]
            self.problem = f"the answer is not gRPC: its content-type is {shown!r}"


def _number(data: bytes, otherwise: int) -> int:
    return int(data) if data.isdigit() and len(data) <= 3 else otherwise


# --- messages


class Gathering:
    """A message that has arrived in part; the rest of a refused one is `dropped`."""

    __slots__ = ("compressed", "dropped", "filled", "length", "prefix", "view")

    def __init__(self) -> None:
        self.prefix = b""
        self.dropped = False
        self.compressed = 0
        self.length = -1  # of the message; -1 until the prefix has arrived
        self.view = memoryview(b"")
        self.filled = 0


class MessageStream(Stream):
    """A stream of messages. Methods of subclasses that take messages must catch their errors."""

    finished = False  # further data is ignored
    waits = False  # further data has to wait
    _gathering: Gathering | None = None

    # --- for subclasses

    @property
    def largest(self) -> int:
        """The largest message delivered at once; `begin_message` is asked about longer ones."""
        raise NotImplementedError

    def message(self, data: Buffer) -> None:
        """Receive a message."""
        raise NotImplementedError

    def begin_message(self, compressed: int, length: int, more: int) -> None:
        """Refuse a long or compressed message by its prefix, or expect `more` bytes of it."""
        raise NotImplementedError

    def memory(self, length: int, first: memoryview) -> memoryview:
        """Uninitialised memory for a message of `length` bytes that begins with `first`."""
        return BLOCKS.block(length)

    def count(self, nbytes: int, before: int) -> None:
        """Charge `nbytes` received of the gathered message, after `before` earlier ones."""

    def refused(self, error: ServerError) -> None:
        """Answer a message that was refused before its end, or raise: then the stream has failed.

        The rest of the message is dropped as it arrives.
        """
        raise error

    def gathered(self, part: Gathering) -> None:
        """Receive a complete, possibly compressed message; followed by `stop_gathering`."""
        raise NotImplementedError

    def stop_gathering(self) -> None:
        """Drop the message being gathered."""
        self._gathering = self.place = None

    # --- events of the stream

    def split(self, view: memoryview, start: int, stop: int, most: int) -> tuple[int, int]:
        """Split received bytes into at most `most` messages.

        Returns the position after them, before `stop` if data is ignored or has to wait, and the
        rest of `most`: 0 after `PIECE_SECS`, since a message may take a hundred times another. With
        `maxsize`, all are split.
        """
        until, number = perf_counter() + PIECE_SECS if most < maxsize else inf, 0
        if self._gathering is None:
            largest = self.largest
            while stop - start >= PREFIX and most > 0 and not (self.finished or self.waits):
                compressed, length = unpack_prefix(view, start)
                begin = start + PREFIX
                after = begin + length
                if after > stop or compressed or length > largest:
                    break
                start = after
                most -= 1 + (length >> BINARY_BITS)
                self.message(view[begin:after].tobytes())
                number += 1
                if not number & 7 and perf_counter() > until:
                    most = 0
        while start < stop and most > 0 and not (self.finished or self.waits):
            most -= PACKED if self._gathering is None and view[start] else 1
            start = self._gather(view, start, stop)
            if perf_counter() > until:  # also for what other streams have received
                most = 0
        return start, most

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Split received bytes into messages."""
        self.split(view, start, stop, maxsize)

    def on_filled(self, nbytes: int) -> None:
        """Account for bytes received into the buffer of the gathered message."""
        part = self._gathering
        assert part is not None, "bytes of no message. This is a bug."
        if self._counts(part, nbytes):
            self._grew(part, nbytes)

    def _counts(self, part: Gathering, nbytes: int) -> bool:
        """Charge further bytes of a message; false if it is refused for them, and dropped."""
        try:
            self.count(nbytes, part.filled)
        except ServerError as error:
            self._drop(error, part.length - part.filled - nbytes)
            return False
        return True

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Copy part of a message; returns the position after it."""
        part = self._gathering
        if part is None:
            part = self._gathering = Gathering()
        if part.length < 0:
            size = min(PREFIX - len(part.prefix), stop - start)
            part.prefix += bytes(view[start : start + size])
            start += size
            if len(part.prefix) < PREFIX:
                return start
            compressed, length = unpack_prefix(part.prefix)
            try:
                self.begin_message(compressed, length, length - (stop - start))
            except ServerError as error:
                if compressed > 1 or length > MAX_MESSAGE:
                    raise  # nothing that follows is likely to be a message
                self._drop(error, length)
                return start
            if self.finished:
                return start
            # Set even if allocating the memory fails.
            part.compressed, part.length = compressed, length
            part.view = self.memory(length, view[start:stop])
        size = min(part.length - part.filled, stop - start)
        if size and not part.dropped:
            if not self._counts(part, size):
                return start + size
            part.view[part.filled : part.filled + size] = view[start : start + size]
        self._grew(part, size)
        return start + size

    def _grew(self, part: Gathering, nbytes: int) -> None:
        """Count bytes in the buffer; deliver the message if it is complete."""
        part.filled += nbytes
        if part.filled < part.length:
            self.place = None if part.dropped else part.view[part.filled :]
        elif part.dropped:
            self.stop_gathering()
        else:
            self.gathered(part)

    def skip(self, start: int, stop: int) -> int:
        """Drop bytes of a refused message, which need no turn; returns the position after them."""
        part = self._gathering
        if part is None or not part.dropped:
            return start
        size = min(part.length - part.filled, stop - start)
        self._grew(part, size)
        return start + size

    def _drop(self, error: ServerError, rest: int) -> None:
        """Refuse the message being gathered, of which `rest` bytes are still to come."""
        self.stop_gathering()
        if rest:
            part = self._gathering = Gathering()
            part.length, part.dropped = rest, True
        self.refused(error)


# --- calls of a client


class Reason(Enum):
    """The reason why a call failed."""

    UNSENT = "the server has not seen it"
    REFUSED = "the server has not begun it"
    STATUS = "the server says so"
    BROKEN = "its answer is none"
    LOST = "it was cut off"
    LATE = "its deadline has passed"
    TOO_LARGE = "its answer has more bytes than it may"
    GROWN = "its answer has, once it is decompressed"


class End(NamedTuple):
    """The failure of a call; `status` is the gRPC status, `text` its message.

    `begun` is the server's own word on whether a model has begun the call, None without one.
    """

    reason: Reason
    status: int
    text: str
    begun: bool | None = None


def unpacked(data: bytes, encoding: str, largest: int) -> Buffer:
    """Unpack a compressed message to at most `largest` bytes; raises `ServerError`."""
    return decompress(data, encoding, largest, "answer", max_ratio=ANSWER_RATIO)


def unreadable(error: Exception) -> End:
    """The failure of a call whose compressed answer cannot be unpacked."""
    reason = Reason.GROWN if isinstance(error, PayloadTooLarge) else Reason.BROKEN
    return End(reason, INTERNAL, str(error))


def _problem(fields: ResponseBlock) -> End:
    """The failure for a response that is not gRPC; the HTTP status may be conclusive."""
    reason = Reason.BROKEN if fields.status == UNKNOWN else Reason.STATUS
    return End(reason, fields.status, fields.problem)


class ClientCall(MessageStream, ClientStream):
    """One call. `deadline` is in seconds of the connection's clock.

    A response message may have at most `most` bytes, also once it is decompressed.
    """

    connection: ClientConnection | None = None
    _encoding: str | None = None  # set by the response head
    _last: ResponseBlock | None = None  # the block that ends the response

    def __init__(self, deadline: float = inf, most: int = MAX_MESSAGE) -> None:
        super().__init__(0)
        self.deadline = deadline
        self.most = most

    # --- for subclasses

    def message_packed(self, data: bytes, encoding: str) -> None:
        """Unpack a compressed message and receive it; subclasses may do so on a thread."""
        try:
            message = unpacked(data, encoding, self.most)
        except ServerError as error:
            self.break_off(unreadable(error))
        else:
            self.message(message)

    def closed(self, end: End | None) -> None:
        """End of the call; `end` is None on success. The last callback."""
        raise NotImplementedError

    # --- for the caller

    def begin(self, connection: ClientConnection) -> None:
        """Open the stream; the connection must have a free stream."""
        self.connection = connection
        connection.streams.number(self)

    def renew(self) -> None:
        """Reset the call to its state before `begin`."""
        super().renew()
        self.finished = False
        self._gathering = self._encoding = self._last = self.connection = None

    def cancel(self) -> None:
        """Cancel the call without a callback."""
        self.finished = True
        self._reset()

    def break_off(self, end: End) -> None:
        """Cancel the call and report `end`, since no valid answer can follow."""
        if not self.finished:
            self._reset()
            self._close(end)

    # --- messages

    @property
    def largest(self) -> int:
        """The largest response message in bytes."""
        return self.most

    def begin_message(self, compressed: int, length: int, more: int) -> None:
        """Fail the call if the message is too long."""
        if length > self.most:
            text = f"the answer has a message of {length} bytes, more than {self.most}"
            self.break_off(End(Reason.TOO_LARGE, INTERNAL, text))
        elif more > 0:
            assert self.connection is not None
            self.connection.data.expect(self, more)

    def gathered(self, part: Gathering) -> None:
        """Deliver the message."""
        self.stop_gathering()
        if part.compressed:
            self.message_packed(bytes(part.view), self._encoding or "")
        else:
            self.message(part.view)

    # --- events of the stream

    def on_block(self, fields: ResponseBlock, ends: bool) -> bool:
        """Process the response's head, or its trailers."""
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
        """Split received bytes into messages."""
        if self._encoding is None:
            self.break_off(End(Reason.BROKEN, INTERNAL, "there is data before any head"))
            return
        try:
            super().on_data(view, start, stop)
        except MemoryError as error:
            self._lose_answer(error)

    def on_filled(self, nbytes: int) -> None:
        """Account for bytes received into the buffer of the gathered message."""
        try:
            super().on_filled(nbytes)
        except MemoryError as error:
            self._lose_answer(error)

    def on_end(self) -> None:
        """Fail the call if the response ended early, or report its status."""
        if self.finished:
            return
        last = self._last
        if last is None or last.status < 0:
            self._close(End(Reason.BROKEN, UNKNOWN, "the answer ends without a status"))
        elif last.status != OK:
            told = End(Reason.STATUS, last.status, last.text, last.begun)
            self._close(_problem(last) if last.problem and not last.text else told)
        elif self._gathering is not None:
            self._close(End(Reason.BROKEN, INTERNAL, "the answer ends within a message"))
        else:
            self._close(None)

    def on_gone(self, code: ErrorCode) -> None:
        """Fail the call: the stream was reset."""
        assert self.connection is not None
        late = self.connection.streams.now + _GRACE_SECS >= self.deadline
        if code is ErrorCode.CANCEL and late:
            self._close(End(Reason.LATE, DEADLINE_EXCEEDED, "Deadline Exceeded"))
        else:
            self._close(End(Reason.LOST, INTERNAL, f"the stream was reset: {code.name}"))

    def on_refused(self) -> None:
        """Fail the call: the server has not processed the stream."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.UNSENT if connection.streams.leaving else Reason.REFUSED
        self._close(End(reason, UNAVAILABLE, connection.said or "the stream was refused"))

    def on_lost(self) -> None:
        """Fail the call: the connection was lost."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.LOST if self.number <= connection.streams.written else Reason.UNSENT
        text = connection.failure or connection.said or "the connection was lost"
        self._close(End(reason, UNAVAILABLE, text))

    def _lose_answer(self, error: MemoryError) -> None:
        """Fail the call alone: the connection's other calls may have smaller answers."""
        text = f"there is no memory for the answer: {error}"
        self.break_off(End(Reason.LOST, INTERNAL, text))

    def _reset(self) -> None:
        self.stop_gathering()  # the rest of a message in transit is dropped
        connection = self.connection
        if connection is not None and not self.remote_closed and not connection.closing:
            connection.streams.reset(self, ErrorCode.CANCEL)

    def _close(self, end: End | None) -> None:
        if not self.finished:
            self.finished = True
            self.closed(end)
