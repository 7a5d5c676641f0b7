"""Content encodings of HTTP bodies: gzip and deflate, both ways.

A compressed body is unpacked piece by piece, and each piece is counted before the next is unpacked:
so a small body becomes a large one only as far as the limits for large ones let it. How much it
grows is no reason to refuse it: a tensor of ones becomes a thousand times its size.
"""

import gzip
import zlib
from collections.abc import Callable

from headrace.core.errors import InvalidRequest, PayloadTooLarge, UnsupportedEncoding
from headrace.core.tensors import Buffer

ENCODINGS = ("gzip", "deflate")
LARGE = 64 << 10  # bytes of what is packed that take a while
FREE_BYTES = 16 << 20
ANSWER_RATIO = 250  # of other servers' answers, for which nobody is charged
_CHUNK = 1 << 20  # bytes that are unpacked at once
_INPUT = 64 << 10  # bytes that are given to zlib at once, which copies what it leaves
_SMALL = 8 << 10  # bytes of a body that is worth trying at once
_SMALL_OUTPUT = 64 << 10
DEFAULT_LEVEL = 3  # on tensors, higher levels cost several times as much for a few per cent


def _uncounted(nbytes: int) -> None:
    """Where nothing counts but the limit."""


def decompress(
    body: bytes | memoryview,
    encoding: str,
    limit: int,
    what: str = "request body",
    charge: Callable[[int], object] = _uncounted,
    max_ratio: int = 0,
) -> bytes | memoryview:
    """`body` unpacked; `limit` bytes at most.

    `what` it is, is for texts. `charge` is called with the size of each piece, of about a megabyte
    at most, and may raise. With a `max_ratio`, a body may grow to `FREE_BYTES`, or to so many times
    its size. Raises `UnsupportedEncoding` for another encoding, `InvalidRequest` for a damaged or
    cut stream, `PayloadTooLarge` past the limit.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ENCODINGS:
        raise UnsupportedEncoding(
            f"Unsupported compression type '{encoding}', expected one of gzip, deflate, identity"
        )
    # 32 + 15: a gzip or zlib header, told apart by itself; clients mix the two names up.
    unpacker = zlib.decompressobj(47)
    whole = bytearray()  # which grows in its place if it is large
    view, position = memoryview(body), 0
    pending: bytes | memoryview = b""
    try:
        while (pending or position < len(view)) and not unpacker.eof:
            if not pending:
                pending = view[position : position + _INPUT]
                position += len(pending)
            piece = unpacker.decompress(pending, _CHUNK)
            size = len(whole) + len(piece)
            if size > limit:
                raise PayloadTooLarge(too_large(f"decompressed {what}", limit))
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
    """`decompress` a body that is soon unpacked; None for any other, or a wrong one.

    That takes a fraction of a millisecond, and is what nearly all compressed messages are.
    """
    if len(body) > _SMALL or encoding.strip().lower() not in ENCODINGS:
        return None
    unpacker = zlib.decompressobj(47)
    try:
        found = unpacker.decompress(body, _SMALL_OUTPUT)
    except zlib.error:
        return None
    return found if unpacker.eof and not unpacker.unused_data else None


def too_large(what: str, limit: int, size: int | None = None) -> str:
    """The text of every size error; it names the setting that a server's operator can change."""
    got = f" ({size} bytes)" if size is not None else ""
    return (
        f"the {what}{got} exceeds the maximum allowed value of {limit} bytes."
        " Use --max-request-bytes to increase the limit"
    )


def check_size(message: Buffer, limit: int) -> int:
    """The size of a request message; raises `PayloadTooLarge`."""
    if len(message) > limit:
        raise PayloadTooLarge(too_large("request message", limit, len(message)))
    return len(message)


def compress(body: bytes, encoding: str, level: int = DEFAULT_LEVEL) -> bytes:
    """`body` packed as `gzip` or `deflate` (a zlib stream), at one of zlib's levels."""
    if encoding == "gzip":
        return gzip.compress(body, level, mtime=0)
    return zlib.compress(body, level)


def choose_encoding(accept: str) -> str:
    """The encoding that an Accept-Encoding header prefers: gzip, deflate or identity.

    The highest weight wins, the first of equals; unknown names are skipped; default is identity.
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
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        if weight > best_weight:
            best, best_weight = name, weight
    return best
