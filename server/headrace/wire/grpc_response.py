"""What a gRPC client reads from the header blocks of a response (gRPC over HTTP/2).

A block is the head of a response, its trailers, or both: then nothing else comes.
"""

from urllib.parse import unquote_to_bytes

from headrace.wire.http2.block_reader import Headers
from headrace.wire.http2.protocol import ErrorCode, StreamFailure

OK, UNKNOWN, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 2, 8, 12, 13
# What a status of HTTP means that comes without one of gRPC: from a proxy, for the most part.
_STATUSES = {
    400: INTERNAL, 401: 16, 403: 7, 404: UNIMPLEMENTED, 429: 14, 502: 14, 503: 14, 504: 14,
}  # fmt: skip
_LONGEST_TEXT = 4096  # characters of a message


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
