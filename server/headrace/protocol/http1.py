"""HTTP/1.1 client codec, sans-I/O: requests to bytes, and received bytes to responses.

The owner of the socket receives into `ResponseReader.buffer()` and reports the byte count. A body
of known length is received directly into its final buffer; heads and chunks are bounded and pass
through one small buffer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httptools

from headrace.core.blocks import BLOCKS
from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.core.tensors import Buffer

LARGEST_HEAD = 64 << 10
LARGEST_BODY = 1 << 31  # as protobuf's largest message
_MOST_INTERIM = 32  # informational (1xx) heads before a response
_JOINED = 64 << 10  # body bytes up to which joining is cheaper than several pieces
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request, without the headers common to all requests to a server.

    `path` is quoted. The buffers of `body` are sent one after the other.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response; header names are in lower case. `reusable` refers to the connection."""

    status: int
    headers: Mapping[bytes, bytes]
    body: Buffer
    reusable: bool


def header_lines(headers: Sequence[tuple[str, str]]) -> str:
    """Headers in wire format; raises `InvalidRequest` for an invalid value."""
    for name, value in headers:
        if not _VALUE.fullmatch(value):
            raise InvalidRequest(f"the value of the header '{name}' cannot be sent over HTTP")
    return "".join([f"{name}: {value}\r\n" for name, value in headers])


def request_pieces(request: HttpRequest, common: str) -> list[Buffer]:
    """The bytes of a request; `common` are the header lines of all requests to this server."""
    size = sum(map(len, request.body))
    lines = [f"{request.method} {request.path} HTTP/1.1\r\n{common}"]
    lines += [f"{name}: {value}\r\n" for name, value in request.headers.items()]
    if request.method == "POST":
        lines.append(f"content-length: {size}\r\n")
    lines.append("\r\n")
    head = "".join(lines).encode("latin-1")
    if size <= _JOINED:
        return [b"".join([head, *request.body])]
    return [head, *request.body]


class ResponseReader:
    """Parses the responses on one connection.

    A `sink` receives the body of a successful response of unknown length piece by piece. Raises
    `InvalidRequest` for malformed responses, and `PayloadTooLarge` for a body of more than
    `largest_body` bytes.
    """

    sink: Callable[[bytes], None] | None = None

    def __init__(self, largest_body: int = LARGEST_BODY) -> None:
        self._largest = largest_body
        self._view = memoryview(bytearray(LARGEST_HEAD))
        self._end = 0  # end of the unread bytes in the buffer
        self._head: _Head | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._interim = 0
        self._body = memoryview(b"")  # of known length
        self._filled = 0

    def buffer(self) -> memoryview:
        """The buffer to receive into, never empty; report the byte count to `received`."""
        if len(self._body):
            return self._body[self._filled :]
        return self._view[self._end :]

    def received(self, count: int) -> HttpResponse | None:
        """Process `count` received bytes; returns the response once it is complete."""
        if len(self._body):
            self._filled += count
            return self._complete(self._body) if self._filled == len(self._body) else None
        self._end += count
        head = self._head
        if head is None:
            return self._read_head(max(self._end - count - len(_END), 0))
        return self._go_on(head)

    def closed(self) -> HttpResponse | None:
        """Process the end of the connection; returns the response that it completes, if any."""
        head = self._head
        if head is None or head.chunked or len(self._body):
            return None
        return self._complete(memoryview(head.body))

    def _read_head(self, searched: int) -> HttpResponse | None:
        head, parser = self._next_head(searched)
        while head is not None and head.status < 200:  # an informational response
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise InvalidRequest(f"more than {_MOST_INTERIM} heads before the answer's own")
            head, parser = self._next_head(0)
        if head is None or parser is None:
            return None
        self._head, self._interim = head, 0
        encoding = head.headers.get(b"transfer-encoding")
        if encoding is not None and not head.complete:
            if encoding.lower().strip() != b"chunked":
                raise InvalidRequest(f"the transfer encoding {encoding[:40]!r}")
            head.chunked, self._parser = True, parser
        if head.complete:
            return self._complete(b"")
        length = head.headers.get(b"content-length")
        return self._go_on(head) if length is None else self._expect(int(length))

    def _next_head(
        self, searched: int
    ) -> "tuple[_Head, httptools.HttpResponseParser] | tuple[None, None]":
        """The head at the front, if complete; its end lies after the part already `searched`."""
        view = self._view
        # memoryviews cannot be searched; the copy is a head and the few bytes behind it.
        found = bytes(view[searched : self._end]).find(_END)
        if found < 0:
            if self._end == LARGEST_HEAD:
                raise InvalidRequest(f"a head of more than {LARGEST_HEAD} bytes")
            return None, None
        stop = searched + found + len(_END)
        head = _Head()
        parser = head.parser = httptools.HttpResponseParser(head)
        try:
            parser.feed_data(view[:stop])
        except httptools.HttpParserUpgrade:
            raise InvalidRequest("a switch of protocols without a request for it") from None
        except httptools.HttpParserError as error:
            raise InvalidRequest(f"not HTTP/1.1: {error}") from None
        self._keep(stop)
        head.parser = None  # breaks a reference cycle
        head.status = parser.get_status_code()
        return head, parser

    def _expect(self, length: int) -> HttpResponse | None:
        """Start a body of known length, of which a part may have arrived."""
        self._check(length)
        there = min(self._end, length)
        if there == length:
            body = bytes(self._view[:length])
            self._keep(length)
            return self._complete(body)
        self._body = BLOCKS.block(length)
        self._body[:there] = self._view[:there]
        self._filled = there
        self._keep(there)
        return None

    def _go_on(self, head: "_Head") -> HttpResponse | None:
        """Process what has arrived of a body of unknown length."""
        piece = bytes(self._view[: self._end])
        self._keep(self._end)
        if not head.chunked:
            head.on_body(piece)
        elif piece and self._parser is not None:
            size = len(head.body)
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserError as error:
                raise InvalidRequest(f"chunks that are none: {error}") from None
            # The parser keeps received trailers.
            head.beside = head.beside + len(piece) if len(head.body) == size else 0
            if head.beside > LARGEST_HEAD:
                raise InvalidRequest(f"more than {LARGEST_HEAD} bytes beside chunks")
        if self.sink is not None and head.status == 200 and head.body:
            self.sink(bytes(head.body))
            head.body.clear()
        self._check(len(head.body))
        return self._complete(memoryview(head.body)) if head.complete else None

    def _complete(self, body: Buffer) -> HttpResponse:
        head = self._head
        assert head is not None
        # Bytes after the last response belong to no request.
        reusable = head.reusable and not self._end and not head.more
        self._head = self._parser = None
        self._body, self._filled = memoryview(b""), 0
        return HttpResponse(head.status, head.headers, body, reusable)

    def _keep(self, start: int) -> None:
        """Move the bytes after the first `start` to the front of the buffer."""
        rest = self._end - start
        if rest:
            self._view[:rest] = bytes(self._view[start : self._end])
        self._end = rest

    def _check(self, size: int) -> None:
        if size > self._largest:
            raise PayloadTooLarge(f"a body of more than {self._largest} bytes")


class _Head:
    """httptools callbacks for one response, and what they have collected."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()  # no list of pieces, since small ones take more than their bytes
        self.beside = 0  # bytes since the last body bytes
        self.chunked = self.complete = self.more = self.reusable = False
        self.parser: httptools.HttpResponseParser | None = None
        self._begun = self._told = False

    def on_message_begin(self) -> None:
        self.more, self._begun = self._begun, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._told:  # later ones are trailers
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._told = True
        assert self.parser is not None
        self.reusable = self.parser.should_keep_alive()  # only valid before the message is complete

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True
