"""The ASGI side of an HTTP/1.1 connection: requests parsed by llhttp, answered by an application.

`Requests` makes requests of received bytes, and bounds their heads. Each becomes a `Cycle`: the
scope, `receive` and `send` of one call of the application (ASGI 3, HTTP specification 2.3). Cycles
run one after the other, so that answers keep the order of requests. The connection decides when
bytes are read and parsed, and what is done about a client that sends too much or too slowly.

Answers have the application's `content-length`, or come in chunks, or, from HTTP/1.0, end with the
connection. Nothing is sent before the first message with a body, so that an application that fails
until then is answered for. There is no lifespan: applications are made by their server.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import perf_counter
from typing import Any, NoReturn

import httptools
from starlette.types import ASGIApp, Message

from headrace.api.gate import Gate
from headrace.core.tensors import Buffer
from headrace.core.turns import TASK_SECS, Turns
from headrace.doors.http.head import MOST_HEADERS, URL_LIMIT, hops, unquoted, without_upgrade
from headrace.doors.http.outgoing import Outgoing
from headrace.engine.admission import Account
from headrace.protocol.status import INTERNAL, INTERNAL_TEXT

log = logging.getLogger(__name__)
access = logging.getLogger("headrace.access")

ACCOUNT = "headrace.account"  # in a scope: the connection's account
PEER = "headrace.peer"  # in a scope: the `PeerFacts` of the connection
IDENTITY = "headrace.identity"  # in a scope: the client, once it has passed the gate
OPERATION = "headrace.operation"  # in a scope: the request's metrics label
NAMES = "headrace.headers"  # in a scope: headers with names in original case, if needed
GONE = 499  # in place of a status: the client disconnected before its answer
HEAD_LIMIT = 64 << 10  # bytes of a request line and headers that are still incomplete
STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
} | {
    414: b"HTTP/1.1 414 URI Too Long\r\n",  # Python's phrase depends on its version
    GONE: b"HTTP/1.1 499 Client Closed Request\r\n",  # models and upstreams may say so, too
}
_BODILESS = (204, 304)  # statuses of answers without a body
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_WAITING = 4 << 10  # bytes of objects of a request that waits for earlier ones
_ENOUGH = 64 << 10  # bytes of a body that the application has not asked for yet
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")


class Refusal(Exception):
    """A request that no application gets to see, with the status of its refusal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class AsgiApplication:
    """An ASGI application, and its calls that have not returned.

    If `gate` forward headers, the scopes also have them in original case (`NAMES`).
    """

    def __init__(self, app: ASGIApp, gate: Gate | None = None) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._app = app
        self._gate = gate

    @property
    def wants_names(self) -> bool:
        """True if scopes need headers in original case."""
        return self._gate is not None and self._gate.pattern is not None

    def start(self, cycle: "Cycle") -> None:
        """Call the application for a request."""
        task = asyncio.get_running_loop().create_task(cycle.run(self._app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class Cycle:
    """One request: its scope, and its conversation with the application.

    `started`: a part of the answer was sent. `done`: all of it was. `gone`: nobody waits for it.
    """

    __slots__ = (
        "_bodiless", "_body", "_chunked", "_expects", "_head", "_left", "_more", "_news",
        "_requests", "done", "gone", "keep_alive", "scope", "started",
    )  # fmt: skip

    def __init__(
        self, requests: "Requests", scope: dict[str, Any], keep_alive: bool, expects: bool
    ) -> None:
        """The client waits to be told to send its body if it `expects` that."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.started = self.done = self.gone = False
        self._requests = requests
        self._expects = expects
        # The request's body: received, but not taken by the application.
        self._body = bytearray()
        self._more = True
        self._news = asyncio.Event()
        # The answer: its head, until that is sent, and the framing of its body.
        self._head: bytes | None = None
        self._bodiless = self._chunked = False
        self._left: int | None = None  # bytes of the body, if the application has declared them

    @property
    def waiting(self) -> int:
        """Bytes of the body that the application has not taken."""
        return len(self._body)

    def add(self, body: bytes) -> None:
        """Add received bytes of the body."""
        if not self.done:
            self._body += body
            self._news.set()

    def complete(self) -> None:
        """Note that the body is complete."""
        self._more = False
        self._news.set()

    def leave(self) -> None:
        """Note that the client has disconnected."""
        self.gone = True
        self._body.clear()
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Call the application; answers for it if it does not."""
        path = self.scope["path"]
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._fail(503, "Server exiting")
            raise
        except Exception as error:
            what = "behind the answer to" if self.done else "while answering"
            log.error("bug %s %s", what, path, exc_info=error)
            self._fail(INTERNAL.http, INTERNAL_TEXT)
        else:
            if not (self.done or self.gone):
                log.error("bug while answering %s: the answer is incomplete", path)
                self._fail(INTERNAL.http, INTERNAL_TEXT)

    def _fail(self, status: int, text: str) -> None:
        if not (self.done or self.gone):
            self._requests.abandon(status, text)

    # --- ASGI

    async def receive(self) -> Message:
        """The next part of the body, or the end of the conversation (ASGI)."""
        if self._expects:
            self._expects = False
            if self._more and not (self._body or self._head or self.started or self.gone):
                self._requests.out.write([_CONTINUE], len(_CONTINUE))
        if not (self.gone or self.done):
            await self._news.wait()
            self._news.clear()
        if self.gone or self.done:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._requests.taken()
        return {"type": "http.request", "body": body, "more_body": self._more}

    async def send(self, message: Message) -> None:
        """Send a part of the answer (ASGI); ignored once the client has disconnected.

        Raises `RuntimeError` for messages that make no valid answer.
        """
        out = self._requests.out
        if out.paused and not self.gone:
            await out.drain()
        if self.gone:
            return
        kind = message["type"]
        if self._head is None and not self.started:
            _check(kind, "http.response.start")
            self._head = self._framed(message)
        else:
            _check(kind, "nothing behind the answer" if self.done else "http.response.body")
            self._write(message.get("body", b""), message.get("more_body", False))

    def _framed(self, message: Message) -> bytes:
        """The head of the answer, with the framing of its body."""
        status: int = message["status"]
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        closes = False
        for name, value in message.get("headers", ()):
            if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise RuntimeError(f"an answer with an invalid header, {name!r}: {value!r}")
            name = name.lower()
            if name == b"transfer-encoding":
                continue  # the server decides
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                closes = closes or b"close" in map(bytes.strip, value.lower().split(b","))
            lines.append(b"%b: %b\r\n" % (name, value))
        self._bodiless = self.scope["method"] == "HEAD" or status in _BODILESS
        if self._left is None and not self._bodiless:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:  # ends with the connection
                self.keep_alive = False
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _write(self, body: Buffer, more: bool) -> None:
        """Write a part of the answer's body, the last one unless there is `more`."""
        size = len(body)
        pieces: list[Buffer] = [] if self._head is None else [self._head]
        if self._chunked:
            if size:
                pieces += [b"%x\r\n" % size, body, b"\r\n"]
            if not more:
                pieces.append(b"0\r\n\r\n")
        elif not self._bodiless:
            if self._left is not None:
                self._left -= size
                if self._left < 0 or (self._left and not more):
                    raise RuntimeError(f"an answer whose content-length is wrong by {-self._left}")
            pieces.append(body)
        self._head, self.started = None, True
        self._requests.out.write(pieces, sum(map(len, pieces)))
        if not more:
            self.done = True
            self._body.clear()
            self._news.set()
            self._requests.finish(self)


def _check(kind: str, expected: str) -> None:
    if kind != expected:
        raise RuntimeError(f"an ASGI message of type {kind!r}, expected {expected}")


class Requests:
    """The requests of one connection, from the bytes that it feeds.

    Invariant: `cycles` are the unanswered ones in order, and only the first one is started.
    """

    __slots__ = (
        "_application", "_base", "_expects", "_fault", "_head_size", "_headers", "_names",
        "_on_answer", "_parser", "_receiving", "_turns", "_url", "abandon", "begun", "cycles",
        "in_head", "in_message", "out", "retired", "size", "taken",
    )  # fmt: skip

    def __init__(
        self,
        application: AsgiApplication,
        base: Mapping[str, Any],
        out: Outgoing,
        turns: Turns,
        taken: Callable[[], None],
        answered: Callable[[], None],
        abandon: Callable[[int, str], None],
    ) -> None:
        """`base` is what the scopes have in common.

        `taken` is called when the application has taken what was received of a body, `answered`
        after each answer, `abandon` with a status and a text for a request without an answer.
        """
        self.out = out
        self._turns = turns
        self.taken = taken
        self.abandon = abandon
        self.cycles: deque[Cycle] = deque()
        self.retired = False  # the connection closes after the answer to the next request
        # The request being received, if `in_message`, and its head, if `in_head`.
        self.in_message = self.in_head = False
        self.begun = 0.0  # the loop's time of its first byte
        self.size = 0  # bytes that have arrived
        self._application = application
        self._base = base
        self._on_answer = answered
        self._receiving: Cycle | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._names: list[tuple[bytes, bytes]] | None = None
        self._head_size = 0
        self._expects = False
        self._fault = 400, "Invalid HTTP request received."
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        # A client may send on after the request with which it ends the connection.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def waiting(self) -> bool:
        """True if a request waits for an earlier one."""
        return len(self.cycles) > 1

    @property
    def full(self) -> bool:
        """True if the application has to take something of a body before more is read."""
        return self._receiving is not None and self._receiving.waiting > _ENOUGH

    @property
    def held(self) -> int:
        """Bytes of an incomplete head, and of requests that wait for earlier ones."""
        return self.size * self.in_head + max(len(self.cycles) - 1, 0) * _WAITING

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the connection; raises `Refusal`."""
        parser, continued = self._parser, self.in_head
        assert parser is not None, "bytes after the end of a connection. This is a bug."
        if not self.in_message:
            data = without_upgrade(data)
        self.size += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise Refusal(400, "the protocol of a connection cannot be changed") from None
        except httptools.HttpParserError:
            raise Refusal(*self._fault) from None
        if not self.in_head:
            return
        if not continued:
            self.size = min(len(data), HEAD_LIMIT)  # upper bound of this head's part
            return
        self._head_size += len(data)
        if self._head_size > HEAD_LIMIT:
            raise Refusal(431, f"the request line and headers exceed {HEAD_LIMIT} bytes")

    def finish(self, cycle: Cycle) -> None:
        """Go on after the answer to the first request."""
        self.cycles.popleft()
        if not cycle.keep_alive:
            self.out.end()
        elif self.cycles:
            self._turns.put_off(self._start_next)
        self._on_answer()

    def _start(self) -> None:
        self._turns.expect(asyncio.get_running_loop(), TASK_SECS)
        self._application.start(self.cycles[0])

    def _start_next(self) -> None:
        if self.cycles and not self.out.closing:
            self._start()

    def leave(self) -> None:
        """End all unanswered requests: the client has disconnected."""
        while self.cycles:
            self.cycles.popleft().leave()

    def close(self) -> None:
        """Leave, and break reference cycles, since the connection is lost."""
        self.leave()
        self._parser = self._receiving = None

    # --- called by the parser

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.in_message = self.in_head = True
        self.begun = asyncio.get_running_loop().time()
        self.size = self._head_size = 0
        self._url = b""
        self._headers = []
        self._names = [] if self._application.wants_names else None
        self._expects = False
        self._receiving = None

    def on_url(self, url: bytes) -> None:
        """Add a part of the request's target."""
        self._url += url
        if len(self._url) > URL_LIMIT:
            self._refuse(414, f"a request's path and query may have {URL_LIMIT} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers behind a body in chunks are dropped."""
        if not self.in_head:
            self._head_size += len(name) + len(value)
            if self._head_size > HEAD_LIMIT:
                self._refuse(400, f"the trailers of a request exceed {HEAD_LIMIT} bytes")
            return
        if len(self._headers) == MOST_HEADERS:
            self._refuse(431, f"a request may have {MOST_HEADERS} headers")
        if self._names is not None:
            self._names.append((name, value))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Queue the request, whose body may follow."""
        self.in_head = False
        parser = self._parser
        assert parser is not None, "a request after the end of a connection. This is a bug."
        version = parser.get_http_version()
        self._check_host(version)
        if parser.should_upgrade():  # refused at the end of the message
            return
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        scope: dict[str, Any] = {
            **self._base,
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquoted(raw_path),
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": {},
        }
        account: Account | None = scope.get(ACCOUNT)
        if account is not None and account.server.proxies is not None:
            named = account.named(hops(self._headers))
            scope["client"] = (named, 0) if named else scope["client"]
        if self._names is not None:
            scope[NAMES] = self._names
        is_new = version == "1.1"
        keep_alive = is_new and parser.should_keep_alive() and not self.retired
        self._receiving = cycle = Cycle(self, scope, keep_alive, self._expects and is_new)
        self.cycles.append(cycle)
        if len(self.cycles) == 1:
            self._start()

    def on_body(self, body: bytes) -> None:
        """Add a part of the request's body."""
        if self._receiving is not None:
            self._receiving.add(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self.in_message = False
        if self._receiving is not None:
            self._receiving.complete()
            self._receiving = None

    def _check_host(self, version: str) -> None:
        """Refuse a head whose host other servers could interpret differently."""
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or not (hosts or version == "1.0"):
            self._refuse(400, f"a request has one Host header, got {hosts}")

    def _refuse(self, status: int, text: str) -> NoReturn:
        self._fault = status, text
        raise ValueError(text)  # the parser turns it into an error of its own


def log_access(
    client: str, method: str, path: str, status: int, begun: float, more: Mapping[str, str]
) -> None:
    """Write the access log line of a request that began at `begun`, by `perf_counter`."""
    fields: dict[str, object] = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round((perf_counter() - begun) * 1_000, 3),
    }
    access.info(
        "%(client)s %(method)s %(path)s %(status)s %(duration_ms)s ms",
        fields,
        extra={**fields, **more},
    )
