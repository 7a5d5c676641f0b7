"""The first bytes of a connection, up to the beginning of a request.

A connection alone wakes no server: clients of gRPC keep one open, and open it anew as often as it
ends. So over HTTP/2 the first request's HEADERS are waited for. Clients send them only once they
have seen SETTINGS, which are answered here, since a server may take longer to start than clients
wait for these; the server's own follow later. Everything else (HTTP/1, TLS) begins a request with
its first byte. No I/O.
"""

from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"  # an empty frame of them
_ACK = b"\0\0\0\x04\x01\0\0\0\0"  # the client's answer, which the server has not asked for
_HEAD = 9  # bytes of a frame's head
_HEADERS = 1
_MOST = 64 << 10  # bytes of HTTP/2 without a request, which no client sends


class Opening:
    """Received bytes, kept until a server takes them."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._greeted = False

    @property
    def http1(self) -> bool:
        """True if the bytes look like a request of HTTP/1."""
        return b" " in self._kept[:16] and not PREFACE.startswith(self._kept[: len(PREFACE)])

    def take(self, data: bytes) -> bytes:
        """Keep received bytes; returns what to send to the client now."""
        self._kept += data
        if self._greeted or not self._kept.startswith(PREFACE):
            return b""
        self._greeted = True
        return SETTINGS

    @property
    def begun(self) -> bool:
        """True if a request has begun."""
        if len(self._kept) > _MOST:
            return True
        if PREFACE.startswith(self._kept[: len(PREFACE)]):
            return any(frame[3] == _HEADERS for frame in self._frames())
        return True

    def for_server(self) -> bytes:
        """The kept bytes, without the answer to our SETTINGS."""
        if not self._greeted:
            return bytes(self._kept)
        frames = list(self._frames())
        rest = self._kept[len(PREFACE) + sum(map(len, frames)) :]
        if _ACK in frames:
            frames.remove(_ACK)
        return b"".join([PREFACE, *frames, rest])

    def _frames(self) -> Iterator[bytes]:
        """The complete frames behind the preface, and an incomplete one with a complete head."""
        start = len(PREFACE)
        while len(self._kept) >= start + _HEAD:
            end = start + _HEAD + int.from_bytes(self._kept[start : start + 3], "big")
            yield bytes(self._kept[start:end])
            start = end
