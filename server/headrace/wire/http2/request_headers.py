"""The rules that the fields of requests, and of trailers, obey."""

import re

from headrace.wire.http2.block_reader import Headers
from headrace.wire.http2.protocol import ErrorCode, StreamFailure

_REQUIRED = {b":method", b":scheme", b":path"}
_PSEUDO = _REQUIRED | {b":authority"}
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_bad_name = re.compile(rb"[\x00-\x20A-Z\x7f-\xff:]").search
_bad_value = re.compile(rb"[\x00\r\n]").search
_BLANKS = b" \t"


def checked_request(headers: Headers) -> Headers:
    """A request's fields, held against sections 8.2 and 8.3; raises `StreamFailure`.

    Blanks around a value are taken away, though section 8.2.1 has no place for them: clients of
    gRPC send metadata as applications give it, and other servers take it so.
    """
    blanks = False
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise _malformed(f"misplaced pseudo-header {name!r}")
            if value != value.strip(_BLANKS):
                raise _malformed(f"bad value of {name!r}")
            pseudo.add(name)
        else:
            regular = True
            check_field(name, value)
            blanks = blanks or value != value.strip(_BLANKS)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")
    if not pseudo >= _REQUIRED:
        raise _malformed("a pseudo-header is missing")
    return [(name, value.strip(_BLANKS)) for name, value in headers] if blanks else headers


def check_trailers(headers: Headers) -> None:
    """Hold trailing fields against section 8.1; raises `StreamFailure`."""
    for name, value in headers:
        check_field(name, value)
        if _bad_value(value):
            raise _malformed(f"bad value of {name!r}")


def check_field(name: bytes, value: bytes) -> None:
    """Hold a field's name against section 8.2; raises `StreamFailure`."""
    if not name or _bad_name(name):
        raise _malformed(f"bad field name {name!r}")
    if name in _HOP_BY_HOP or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed(f"connection-specific field {name!r}")


def _malformed(text: str) -> StreamFailure:
    return StreamFailure(ErrorCode.PROTOCOL_ERROR, text)
