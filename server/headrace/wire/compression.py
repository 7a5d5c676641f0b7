"""Content encodings of HTTP bodies: gzip and deflate, both ways.

A compressed body is unpacked piece by piece and dropped as soon as it grows past the limit, so that
a small body can never become a large one in memory. It may grow to `FREE_BYTES` whatever it was,
and to `MAX_RATIO` times its size: honest tensors do not get there, except those of a constant.
"""

import gzip
import zlib

from headrace.core.errors import InvalidRequest, PayloadTooLarge, UnsupportedEncoding

ENCODINGS = ("gzip", "deflate")
FREE_BYTES = 16 << 20
MAX_RATIO = 250
_CHUNK = 1 << 20
LARGE = 64 << 10  # bytes of what is packed that take a while, and up to `FREE_BYTES` at most
DEFAULT_LEVEL = 3  # on tensors, higher levels cost several times as much for a few per cent


def decompress(
    body: bytes | memoryview, encoding: str, limit: int, what: str = "request body"
) -> bytes | memoryview:
    """`body` unpacked; `limit` bytes at most, and no more than its size can honestly give.

    `what` it is, is for texts. Raises `UnsupportedEncoding` for another encoding, `InvalidRequest`
    for a damaged or cut stream, `PayloadTooLarge` past the limit.
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
    pieces: list[bytes] = []
    size = 0
    pending: bytes | memoryview = body
    try:
        while pending and not unpacker.eof:
            piece = unpacker.decompress(pending, _CHUNK)
            size += len(piece)
            if size > limit:
                raise PayloadTooLarge(too_large(f"decompressed {what}", limit))
            if size > FREE_BYTES and size > MAX_RATIO * len(body):
                raise PayloadTooLarge(
                    f"the {what} grows to more than {MAX_RATIO} times its compressed size"
                    f" ({len(body)} bytes), which is allowed up to {FREE_BYTES} bytes only"
                )
            pieces.append(piece)
            pending = unpacker.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"the {what} is not valid {encoding}: {error}") from None
    if not unpacker.eof:
        raise InvalidRequest(f"the {encoding} {what} ends before its end marker")
    if unpacker.unused_data:
        raise InvalidRequest(
            f"the {encoding} {what} has {len(unpacker.unused_data)} bytes after its end marker"
        )
    return b"".join(pieces)


def too_large(what: str, limit: int, size: int | None = None) -> str:
    """The text of every size error; it names the setting that a server's operator can change."""
    got = f" ({size} bytes)" if size is not None else ""
    return (
        f"the {what}{got} exceeds the maximum allowed value of {limit} bytes."
        " Use --max-request-bytes to increase the limit"
    )


def compress(body: bytes, encoding: str, level: int = DEFAULT_LEVEL) -> bytes:
    """`body` packed as `gzip` or `deflate` (a zlib stream), at one of zlib's levels."""
    if encoding == "gzip":
        return gzip.compress(body, level, mtime=0)
    return zlib.compress(body, level)


def choose_encoding(accept: str) -> str:
    """What an Accept-Encoding header asks for among gzip, deflate and identity.

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
