"""The head of a gRPC request: from its fields to what is to be done with it.

A head is made once for a header block that repeats, so it holds nothing that belongs to one call.
It belongs to one connection.
"""

import re
from binascii import b2a_base64
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from headrace.core.texts import bounded
from headrace.transports.grpc.access import UNIMPLEMENTED
from headrace.wire.compression import ENCODINGS
from headrace.wire.http2.block_reader import Headers
from headrace.wire.http2.protocol import ErrorCode, StreamFailure
from headrace.wire.http2.stream import Fields
from headrace.wire.timing import parse_grpc_timeout

if TYPE_CHECKING:
    from headrace.transports.grpc.native.link import Link
    from headrace.transports.grpc.native.rpc import Rpc

ACCEPTED = b"identity,deflate,gzip"
RESPONSE_HEAD: Fields = [
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ACCEPTED),
]
_NOT_SENT = (b"te", b"content-type")  # by clients' applications, but by what carries them
_MAX_LENGTH_DIGITS = 18


class CallHead:
    """What a call's HEADERS say. `kind` is how it is run; `refusal` answers it at once instead."""

    link: "Link"
    kind: "type[Rpc]"
    handler: object = None
    timeout: float | None = None  # seconds
    encoding = ""  # of compressed messages; "" for none
    accepts: tuple[str, ...] = ()
    packing = ""  # how answers are compressed; "" for not at all
    content_length = -1
    refusal: tuple[int, Fields] | None = None  # HTTP status and fields

    def __init__(self, path: str) -> None:
        self.path = path
        self.answers: list[int] = []  # counts by status of calls with this head
        self.metadata: dict[str, str] = {}


def read_head(headers: Headers) -> CallHead:
    """What is to be known of a request apart from who handles it.

    Raises `StreamFailure` where the request is malformed as HTTP.
    """
    fields = dict(headers)
    head = CallHead(fields[b":path"].decode("latin-1"))
    for name, value in headers:
        if not (name.startswith((b":", b"grpc-")) or name.endswith(b"-bin") or name in _NOT_SENT):
            text = value.decode("latin-1")
            key = name.decode("latin-1")
            known = head.metadata.get(key)
            head.metadata[key] = text if known is None else f"{known}, {text}"
    if (length := fields.get(b"content-length")) is not None:
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            raise StreamFailure(ErrorCode.PROTOCOL_ERROR, "bad content-length")
        head.content_length = int(length)
    if fields[b":method"] != b"POST":
        head.refusal = (405, [(b"allow", b"POST")])
        return head
    kind = fields.get(b"content-type", b"").lower()
    if kind != b"application/grpc" and not kind.startswith(
        (b"application/grpc+proto", b"application/grpc;")
    ):
        head.refusal = (415, [(b"accept-post", b"application/grpc")])
        return head
    if (timeout := fields.get(b"grpc-timeout")) is not None:
        head.timeout = parse_grpc_timeout(timeout.decode("latin-1"))
        if head.timeout is None:
            head.refusal = refusal(13, "bad grpc-timeout")
            return head
    head.accepts = tuple(
        item
        for item in map(str.strip, _text(fields, b"grpc-accept-encoding").split(","))
        if item in ENCODINGS
    )
    encoding = _text(fields, b"grpc-encoding").strip()
    if encoding not in ("", "identity"):
        head.encoding = encoding
        # As the client does it.
        head.packing = encoding if encoding in head.accepts else preferred(head.accepts)
        if encoding not in ENCODINGS:
            head.refusal = refusal(
                UNIMPLEMENTED, f"compression {encoding!r} is not supported, only gzip and deflate"
            )
    return head


def preferred(accepts: tuple[str, ...]) -> str:
    """How to compress for whoever accepts this; "" for not at all."""
    return ENCODINGS[0] if ENCODINGS[0] in accepts else next(iter(accepts), "")


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("latin-1").lower()


def refusal(status: int, text: str) -> tuple[int, Fields]:
    """An answer that is nothing but a gRPC status."""
    return 200, [*RESPONSE_HEAD, *status_fields(status, bounded(text))]


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
    if _plain(data):
        return data
    return b"".join(
        [bytes((c,)) if 0x20 <= c <= 0x7E and c != 0x25 else b"%%%02X" % c for c in data]
    )


def percent_decoded(data: bytes) -> str:
    """What `percent_encoded` was given."""
    return unquote_to_bytes(data).decode()


_plain = re.compile(rb"[\x20-\x24\x26-\x7e]*\Z").match
