"""gRPC over HTTP/2, both sides: the heads of requests, heads and trailers of responses, messages.

A message has a prefix of five bytes: whether it is compressed, and its length. One that comes in
one piece is taken out of the received bytes at once. A longer one is gathered in its place, in
memory that the system hands out as it is written to.

Sans-I/O: deadlines are the caller's to watch.
"""

import re
from binascii import b2a_base64
from enum import Enum
from math import inf
from struct import Struct
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from headrace.core.blocks import BLOCKS
from headrace.core.errors import PayloadTooLarge, ServerError
from headrace.core.tensors import Buffer
from headrace.core.texts import bounded
from headrace.protocol.compression import ANSWER_RATIO, ENCODINGS, decompress
from headrace.protocol.http2.connection import ClientConnection, ClientStream
from headrace.protocol.http2.headers import Headers, RepeatedFields, literal
from headrace.protocol.http2.protocol import ErrorCode, StreamFailure
from headrace.protocol.http2.streams import Fields, Stream
from headrace.protocol.parameters import parse_grpc_timeout

OK, CANCELLED, UNKNOWN, DEADLINE_EXCEEDED = 0, 1, 2, 4
UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 12, 13, 14
# What a status of HTTP means that comes without one of gRPC: from a proxy, for the most part.
_STATUSES = {
    400: INTERNAL, 401: 16, 403: 7, 404: UNIMPLEMENTED, 429: UNAVAILABLE, 502: UNAVAILABLE,
    503: UNAVAILABLE, 504: UNAVAILABLE,
}  # fmt: skip
_LONGEST_TEXT = 4096  # characters of a message
MAX_MESSAGE = (1 << 31) - 1  # bytes; no message of protobuf is longer
PREFIX = 5
unpack_prefix = Struct(">BI").unpack_from
pack_prefix = Struct(">BI").pack
_GRACE_SECS = 0.05  # servers watch deadlines, too
_MOST_DIGITS = 99_999_999  # of a time-out
_MAX_LENGTH_DIGITS = 18

_TYPE = (b"content-type", b"application/grpc")
_ACCEPTED = (b"grpc-accept-encoding", b"identity,deflate,gzip")
RESPONSE_FIELDS: Fields = [(b":status", b"200"), _TYPE, _ACCEPTED]
RESPONSE_HEAD = RepeatedFields(RESPONSE_FIELDS)
_NOT_SENT = (b"te", b"content-type")  # by clients' applications, but by what carries them


# --- heads of requests


def request_fields(secure: bool, authority: str, agent: bytes) -> Fields:
    """Fields that all requests to a server have, apart from the `:path`; see `with_path`."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"https" if secure else b"http"),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        _TYPE,
        (b"user-agent", agent),
        _ACCEPTED,
    ]


def with_path(fields: Headers, path: bytes) -> RepeatedFields:
    """The head of requests to a procedure, made of `request_fields` and others behind them."""
    return RepeatedFields([*fields[:2], (b":path", path), *fields[2:]])


def timeout_field(seconds: float) -> bytes:
    """`grpc-timeout` as a literal; nothing for 0."""
    if not seconds:
        return b""
    for unit, number in ((b"u", seconds * 1e6), (b"m", seconds * 1e3), (b"S", seconds)):
        whole = max(round(number), 1)
        if whole <= _MOST_DIGITS:
            return literal(b"grpc-timeout", b"%d%s" % (whole, unit))
    return b""


class CallHead:
    """The head of a request, made once for a header block that repeats.

    `packing` is how answers are compressed, "" for not at all. `refusal` is a response that answers
    the call at once, without a message.
    """

    timeout: float | None = None  # seconds
    encoding = ""  # of compressed messages; "" for none
    accepts: tuple[str, ...] = ()
    packing = ""
    content_length = -1
    refusal: Fields | None = None

    def __init__(self, headers: Headers) -> None:
        """Raises `StreamFailure` where the request is malformed as HTTP."""
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
        """Take in what is gRPC's; the response to a request that is not."""
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
            # As the client does it.
            self.packing = encoding if encoding in self.accepts else self.preferred
            if encoding not in ENCODINGS:
                text = f"compression {encoding!r} is not supported, only gzip and deflate"
                return refusal(UNIMPLEMENTED, text)
        return None

    @property
    def preferred(self) -> str:
        """The encoding to compress answers with; "" for none."""
        return ENCODINGS[0] if ENCODINGS[0] in self.accepts else next(iter(self.accepts), "")


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("latin-1").lower()


# --- heads and trailers of responses


def refusal(status: int, text: str) -> Fields:
    """A response that is nothing but a gRPC status."""
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
    """Text as `grpc-message` carries it: printable ASCII but for `%`, the rest of UTF-8 escaped."""
    data = text.encode(errors="replace")
    return _escaped(lambda found: b"%%%02X" % found[0][0], data)


_escaped = re.compile(rb"[^\x20-\x24\x26-\x7e]").sub


class ResponseBlock:
    """One block. `status` is gRPC's, -1 if it does not say; `text` goes with it.

    `begins` a response, if it has a status of HTTP. `problem` is why messages cannot be read from
    what follows; then `status` is what that means. Messages may be compressed by `encoding`.
    """

    __slots__ = ("begins", "encoding", "problem", "status", "text")

    def __init__(self, headers: Headers) -> None:
        """Raises `StreamFailure` where that is no response at all."""
        fields = dict(headers)
        self.begins = b":status" in fields
        self.problem = ""
        self.encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
        said = fields.get(b"grpc-status")
        self.status = -1 if said is None else _number(said, UNKNOWN)
        text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
        self.text = text[:_LONGEST_TEXT]
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
    """A message that is not here as a whole yet."""

    __slots__ = ("compressed", "filled", "length", "prefix", "view")

    def __init__(self) -> None:
        self.prefix = b""
        self.compressed = 0
        self.length = -1  # of the message, once the prefix is here
        self.view = memoryview(b"")
        self.filled = 0


class MessageStream(Stream):
    """A stream of messages. What subclasses do with one may raise, and is theirs to catch."""

    finished = False  # nothing that comes is of interest any more
    _gathering: Gathering | None = None

    # --- for subclasses

    @property
    def largest(self) -> int:
        """The most bytes of a message; longer ones are given to `begin_message`."""
        raise NotImplementedError

    def message(self, data: Buffer) -> None:
        """Take a message."""
        raise NotImplementedError

    def begin_message(self, compressed: int, length: int, more: int) -> None:
        """Refuse a long or compressed message by its prefix, or expect `more` bytes of it."""
        raise NotImplementedError

    def count(self, nbytes: int, before: int) -> None:
        """Count bytes that have come of the message that is gathered, behind those `before`."""

    def gathered(self, part: Gathering) -> None:
        """Take a message that is complete, and may be compressed, with `stop_gathering`."""
        raise NotImplementedError

    def stop_gathering(self) -> None:
        """Forget the message that is gathered."""
        self._gathering = self.place = None

    # --- events of the stream

    def on_data(self, view: memoryview, start: int, stop: int) -> None:
        """Take messages out of received bytes."""
        if self._gathering is None:
            largest = self.largest
            while stop - start >= PREFIX and not self.finished:
                compressed, length = unpack_prefix(view, start)
                begin = start + PREFIX
                after = begin + length
                if after > stop or compressed or length > largest:
                    break
                start = after
                self.message(view[begin:after].tobytes())
        while start < stop and not self.finished:
            start = self._gather(view, start, stop)

    def on_filled(self, nbytes: int) -> None:
        """More of the message that is being gathered is in its place."""
        part = self._gathering
        assert part is not None, "bytes of no message. This is a bug."
        self.count(nbytes, part.filled)
        self._grew(part, nbytes)

    def _gather(self, view: memoryview, start: int, stop: int) -> int:
        """Take part of a message; the position after it."""
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
            self.begin_message(compressed, length, length - (stop - start))
            if self.finished:
                return start
            part.compressed, part.length = compressed, length  # it was begun, also without memory
            part.view = BLOCKS.block(length)
        size = min(part.length - part.filled, stop - start)
        if size:
            self.count(size, part.filled)
            part.view[part.filled : part.filled + size] = view[start : start + size]
        self._grew(part, size)
        return start + size

    def _grew(self, part: Gathering, nbytes: int) -> None:
        """Count bytes that are in their place; take the message if it is complete."""
        part.filled += nbytes
        if part.filled < part.length:
            self.place = part.view[part.filled :]
        else:
            self.gathered(part)


# --- calls of a client


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
    """The failure of a call; `status` is gRPC's, `text` for people."""

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


class ClientCall(MessageStream, ClientStream):
    """One call. `deadline` is in seconds of the clock that the connection is given.

    A message of the answer may have `most` bytes, also once it is decompressed.
    """

    connection: ClientConnection | None = None
    _encoding: str | None = None  # once the head is here
    _last: ResponseBlock | None = None  # that ends the response

    def __init__(self, deadline: float = inf, most: int = MAX_MESSAGE) -> None:
        super().__init__(0)
        self.deadline = deadline
        self.most = most

    # --- for subclasses

    def message_packed(self, data: bytes, encoding: str) -> None:
        """Take a compressed message, which is unpacked now unless a subclass does otherwise."""
        try:
            message = unpacked(data, encoding, self.most)
        except ServerError as error:
            self.break_off(unreadable(error))
        else:
            self.message(message)

    def closed(self, end: End | None) -> None:
        """The call has ended, well for None. Nothing is called any more."""
        raise NotImplementedError

    # --- for whoever makes the call

    def begin(self, connection: ClientConnection) -> None:
        """Open the stream; only if the connection has room."""
        self.connection = connection
        connection.streams.number(self)

    def renew(self) -> None:
        """Reset the call to what it was before it was begun."""
        super().renew()
        self.finished = False
        self._gathering = self._encoding = self._last = self.connection = None

    def cancel(self) -> None:
        """End the call, and tell nothing."""
        self.finished = True
        self._reset()

    def break_off(self, end: End) -> None:
        """End the call, since nothing good can come any more."""
        if not self.finished:
            self._reset()
            self._close(end)

    # --- messages

    @property
    def largest(self) -> int:
        """The most bytes of a message of the answer."""
        return self.most

    def begin_message(self, compressed: int, length: int, more: int) -> None:
        """End the call if its message is too long."""
        if length > self.most:
            text = f"the answer has a message of {length} bytes, more than {self.most}"
            self.break_off(End(Reason.TOO_LARGE, INTERNAL, text))
        elif more > 0:
            assert self.connection is not None
            self.connection.data.expect(self, more)

    def gathered(self, part: Gathering) -> None:
        """Hand the message on."""
        self.stop_gathering()
        if part.compressed:
            self.message_packed(bytes(part.view), self._encoding or "")
        else:
            self.message(part.view)

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
        super().on_data(view, start, stop)

    def on_end(self) -> None:
        """No more comes."""
        if self.finished:
            return
        last = self._last
        if last is None or last.status < 0:
            self._close(End(Reason.BROKEN, UNKNOWN, "the answer ends without a status"))
        elif last.status != OK:
            told = End(Reason.STATUS, last.status, last.text)
            self._close(_problem(last) if last.problem and not last.text else told)
        elif self._gathering is not None:
            self._close(End(Reason.BROKEN, INTERNAL, "the answer ends within a message"))
        else:
            self._close(None)

    def on_gone(self, code: ErrorCode) -> None:
        """The stream was reset."""
        assert self.connection is not None
        late = self.connection.streams.now + _GRACE_SECS >= self.deadline
        if code is ErrorCode.CANCEL and late:
            self._close(End(Reason.LATE, DEADLINE_EXCEEDED, "Deadline Exceeded"))
        else:
            self._close(End(Reason.LOST, INTERNAL, f"the stream was reset: {code.name}"))

    def on_refused(self) -> None:
        """The server has not looked at the stream."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.UNSENT if connection.streams.leaving else Reason.REFUSED
        self._close(End(reason, UNAVAILABLE, connection.said or "the stream was refused"))

    def on_lost(self) -> None:
        """The connection is no more."""
        assert self.connection is not None
        connection = self.connection
        reason = Reason.LOST if self.number <= connection.streams.written else Reason.UNSENT
        text = connection.failure or connection.said or "the connection was lost"
        self._close(End(reason, UNAVAILABLE, text))

    def _reset(self) -> None:
        self.stop_gathering()  # the rest of a message that is coming in goes nowhere
        connection = self.connection
        if connection is not None and not self.remote_closed and not connection.closing:
            connection.streams.reset(self, ErrorCode.CANCEL)

    def _close(self, end: End | None) -> None:
        if not self.finished:
            self.finished = True
            self.closed(end)
