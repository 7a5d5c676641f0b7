"""HTTP/1.1 as a load generator needs it: requests built ahead, answers parsed with few steps.

Strategy: nearly every answer arrives whole and in one piece, so a piece is first looked at as a
whole. Where something is missing, pieces are collected until there are as many bytes as the answer
is known to need.
"""

from collections.abc import Mapping

from benchmarks.wire import Answer, ProtocolError

_END = b"\r\n\r\n"
_MAX_HEAD = 64 << 10


def build_request(host: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A POST request, complete."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode("latin-1") + _END + body


class HttpWire:
    """One connection; answers come in the order of requests."""

    def __init__(self) -> None:
        self.ready = True
        self._sent = 0
        self._answered = 0
        self._pieces: list[bytes] = []
        self._held = 0
        self._needed = 0

    def start(self) -> bytes:
        """The bytes before the first request: none."""
        return b""

    def send(self, message: bytes) -> tuple[int, bytes]:
        """Begin a request that `build_request` has made."""
        self._sent += 1
        return self._sent, message

    def receive(self, data: bytes) -> tuple[list[Answer], bytes]:
        """Parse what came; raises `ProtocolError`."""
        if self._pieces:
            self._pieces.append(data)
            self._held += len(data)
            if self._held < self._needed:
                return [], b""
            data = b"".join(self._pieces)
            self._pieces.clear()
        answers: list[Answer] = []
        while data:
            parsed = parse_response(data)
            if isinstance(parsed, int):
                self._pieces, self._held, self._needed = [data], len(data), parsed
                break
            status, head, body, size = parsed
            self._answered += 1
            if self._answered > self._sent:
                raise ProtocolError("an answer came that nobody asked for")
            error = "" if status == 200 else f"HTTP {status}: {body[:200].decode(errors='replace')}"
            answers.append(Answer(self._answered, error, body, head))
            data = data[size:]
        return answers, b""


def parse_response(data: bytes) -> tuple[int, bytes, bytes, int] | int:
    """Status, lower-case head, body and total size of the response that `data` begins with.

    Only a number where something is missing: how many bytes there must be at least before it is
    worth another look. Raises `ProtocolError`.
    """
    end = data.find(_END)
    if end < 0:
        if len(data) > _MAX_HEAD:
            raise ProtocolError("the head of an answer does not end")
        return len(data) + 1
    if data[:7] != b"HTTP/1." or not data[9:12].isdigit():
        raise ProtocolError(f"not an HTTP/1.1 answer: {data[:40]!r}")
    status = int(data[9:12])
    head = data[: end + 2].lower()
    begin = end + 4
    length = header(head, b"content-length")
    if length is not None:
        if not length.isdigit():
            raise ProtocolError(f"bad Content-Length: {length[:40]!r}")
        size = begin + int(length)
        return (status, head, data[begin:size], size) if len(data) >= size else size
    if header(head, b"transfer-encoding") == b"chunked":
        chunks = _chunks(data, begin)
        return len(data) + 1 if chunks is None else (status, head, *chunks)
    raise ProtocolError("an answer has neither Content-Length nor chunks")


def header(head: bytes, name: bytes) -> bytes | None:
    """The value of a header; `head` and `name` in lower case."""
    begin = head.find(b"\r\n" + name + b":")
    if begin < 0:
        return None
    begin += len(name) + 3
    return head[begin : head.index(b"\r\n", begin)].strip()


def _chunks(data: bytes, position: int) -> tuple[bytes, int] | None:
    """The chunks' contents and the position behind the last one; None if it has not come yet."""
    pieces: list[bytes] = []
    while True:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return None
        try:
            size = int(data[position:line_end].partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError(f"bad chunk size: {data[position:line_end][:40]!r}") from None
        position = line_end + 2
        if len(data) < position + size + 2:
            return None
        if not size:
            # Trailers, if any, end with an empty line.
            last = position if data.startswith(b"\r\n", position) else data.find(_END, position) + 2
            return (b"".join(pieces), last + 2) if last >= position else None
        pieces.append(data[position : position + size])
        position += size + 2
