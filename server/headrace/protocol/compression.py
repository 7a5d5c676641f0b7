"""Content encodings of HTTP bodies: gzip and deflate, both ways.

A compressed body is unpacked piece by piece, and each piece is charged before the next is unpacked,
so that a small body grows only as far as the limits for large ones allow. A high compression ratio
alone is no reason for refusal: a tensor of ones grows a thousandfold.
"""

import gzip
import zlib

from headrace.core.errors import InvalidRequest, PayloadTooLarge, UnsupportedEncoding
from headrace.core.limits import Charge, uncharged
from headrace.core.tensors import Buffer

ENCODINGS = ("gzip", "deflate")
LARGE = 64 << 10  # compressed bytes from which on unpacking takes noticeably long
FREE_BYTES = 16 << 20
ANSWER_RATIO = 250  # for upstreams' answers, which no client is charged for
_CHUNK = 1 << 20  # bytes unpacked per step
_INPUT = 64 << 10  # bytes passed to zlib per step; zlib copies unconsumed input
_SMALL = 8 << 10  # compressed bytes up to which unpacking is tried on the event loop
_SMALL_OUTPUT = 64 << 10
DEFAULT_LEVEL = 3  # on tensors, higher levels cost several times as much for a few percent


def decompress(
    body: bytes | memoryview,
    encoding: str,
    limit: int,
    what: str = "request body",
    charge: Charge = uncharged,
    max_ratio: int = 0,
    fixed: bool = False,
) -> bytes | memoryview:
    """Unpack `body` to at most `limit` bytes.

    `what` names the body in error texts. `charge` is called with the size of each piece, at most
    about a megabyte, and may raise. With a `max_ratio`, the body may grow to `FREE_BYTES`, or to
    that multiple of its size. `fixed` as in `too_large`. Raises `UnsupportedEncoding` for an
    unknown encoding, `InvalidRequest` for a damaged or truncated stream, `PayloadTooLarge` beyond
    the limit.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ENCODINGS:
        raise UnsupportedEncoding(
            f"Unsupported compression type '{encoding}', expected one of gzip, deflate, identity"
        )
    # 32 + 15: zlib detects a gzip or zlib header; clients mix up the two names.
    unpacker = zlib.decompressobj(47)
    whole = bytearray()  # grows in place if it is large
    view, position = memoryview(body), 0
    pending: bytes | memoryview = b""
    try:
        while (pending or position < len(view)) and not unpacker.eof:
            if not pending:
                pending = view[position : position + _INPUT]
                position += len(pending)
            # One byte beyond the limit suffices to refuse.
            piece = unpacker.decompress(pending, min(_CHUNK, limit - len(whole) + 1))
            size = len(whole) + len(piece)
            if size > limit:
                raise PayloadTooLarge(too_large(f"decompressed {what}", limit, fixed=fixed))
            if max_ratio and size > max(FREE_BYTES, max_ratio * len(body)):
                raise PayloadTooLarge(
                    f"the {what} grows to more than {max_ratio} times its compressed size"
                    f" ({len(body)} bytes), which is allowed up to {FREE_BYTES} bytes only"
                )
            charge(len(piece))
            whole += piece
            pending = unpacker.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"the {what} is not valid {encoding}: {error}") from None
    if not unpacker.eof:
        raise InvalidRequest(f"the {encoding} {what} ends before its end marker")
    if left := len(unpacker.unused_data) + len(view) - position:
        raise InvalidRequest(f"the {encoding} {what} has {left} bytes after its end marker")
    return memoryview(whole)


def decompress_small(body: bytes | memoryview, encoding: str) -> bytes | None:
    """`decompress` a body that is fast to unpack; None for any other or invalid body.

    Takes a fraction of a millisecond, which suffices for nearly all compressed messages.
    """
    if len(body) > _SMALL or encoding.strip().lower() not in ENCODINGS:
        return None
    unpacker = zlib.decompressobj(47)
    try:
        found = unpacker.decompress(body, _SMALL_OUTPUT)
    except zlib.error:
        return None
    return found if unpacker.eof and not unpacker.unused_data else None


def too_large(what: str, limit: int, size: int | None = None, fixed: bool = False) -> str:
    """The text of every size error.

    Names the setting that the operator can change, unless the limit is `fixed`: an operation's own.
    """
    got = f" ({size} bytes)" if size is not None else ""
    if fixed:
        return f"the {what}{got} exceeds the maximum of {limit} bytes for this operation"
    return (
        f"the {what}{got} exceeds the maximum allowed value of {limit} bytes."
        " Use --max-request-bytes to increase the limit"
    )


def check_size(message: Buffer, limit: int, fixed: bool = False) -> int:
    """Return the size of a request message; raises `PayloadTooLarge`; `fixed` as in `too_large`."""
    if len(message) > limit:
        raise PayloadTooLarge(too_large("request message", limit, len(message), fixed))
    return len(message)


def compress(body: bytes, encoding: str, level: int = DEFAULT_LEVEL) -> bytes:
    """Compress `body` as `gzip` or `deflate` (a zlib stream), at one of zlib's levels."""
    if encoding == "gzip":
        return gzip.compress(body, level, mtime=0)
    return zlib.compress(body, level)


def weight_of(text: str) -> float:
    """The weight that an `Accept` header gives as `q`; 0 for anything but a number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def choose_encoding(accept: str) -> str:
    """The encoding that an Accept-Encoding header prefers: gzip, deflate or identity.

    The highest weight wins, the first among equals; unknown names are skipped; default: identity.
    """
    best, best_weight = "identity", 0.0
    for item in accept.split(","):
        name, _, parameters = item.partition(";")
        name = name.strip().lower()
        if name not in (*ENCODINGS, "identity"):
            continue
        weight = 1.0
        for parameter in parameters.split(";"):
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "q":
                weight = weight_of(value)
        if weight > best_weight:
            best, best_weight = name, weight
    return best
