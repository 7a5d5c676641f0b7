"""HTTP requests written byte by byte, and their responses."""

import json
import select
import socket
from dataclasses import dataclass
from http.client import HTTPMessage, parse_headers
from typing import Any, Self

EVENTS = "text/event-stream; charset=utf-8"  # the content type of server-sent events


@dataclass(frozen=True)
class RawAnswer:
    """One response."""

    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def error(self) -> str:
        """Text of an error in the protocol's form, which it must have."""
        assert self.headers["content-type"] == "application/json"
        document: dict[str, Any] = json.loads(self.body)
        assert list(document) == ["error"]
        text: str = document["error"]
        return text

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object in the body."""
        assert self.status == 200, self.body
        document: dict[str, Any] = json.loads(self.body)
        return document


class HttpSocket:
    """One connection to a server."""

    def __init__(self, address: str, seconds: float = 30, receive_buffer: int = 0) -> None:
        """`receive_buffer` bytes are all that the system takes in unread, unless it is 0."""
        host, _, port = address.rpartition(":")
        self._socket = socket.socket()
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(seconds)
        self._socket.connect((host, int(port)))
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Write bytes unchanged."""
        self._socket.sendall(data)

    def receive(self, head: bool = False) -> RawAnswer:
        """Read one response; one to HEAD has no body, for any headers."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), f"no status line but {line!r}"
        status = int(line.split()[1])
        headers = parse_headers(self._file)
        if head or status == 100:
            return RawAnswer(status, headers, b"")
        if headers["transfer-encoding"] == "chunked":
            return RawAnswer(status, headers, self._chunks())
        return RawAnswer(status, headers, self._file.read(int(headers["content-length"])))

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> RawAnswer:
        """Send one request with the length of its body, and read the response."""
        self.send(request(method, path, body, **headers))
        return self.receive(head=method == "HEAD")

    def readable(self) -> bool:
        """True if data has arrived."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def at_end(self) -> bool:
        """Wait until the server sends or closes; true if it closed."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            self._file.readline()
        self._file.readline()
        return body


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as bytes; `Accept_Encoding="gzip"` is a header. Without a body it has no length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    if (body or method == "POST") and "Content_Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def ask(address: str, method: str, path: str, body: bytes = b"", **headers: str) -> RawAnswer:
    """One request on a connection of its own."""
    with HttpSocket(address) as connection:
        return connection.ask(method, path, body, **headers)


def events(answer: RawAnswer) -> list[dict[str, Any]]:
    """The server-sent events of a response in chunks."""
    assert answer.headers["content-type"] == EVENTS
    assert answer.headers["transfer-encoding"] == "chunked"
    pieces = answer.body.decode().split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: {") for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]
