"""The ASGI side of connections: scopes, bodies, framing and order of answers, failures.

Answers are parsed by h11, which refuses wrong framing.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import h11
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.doors.http.asgi import NAMES, AsgiApplication
from headrace.doors.http.connection import Connection
from tests.doors.fakes import until
from tests.doors.http.accepted import accepted


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One end of a connection to an application."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self.socket = sock
        self.connection = connection
        self._rest = b""  # received behind the last answer

    async def send(self, data: bytes | memoryview) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def receive(self, method: str = "GET") -> Answer:
        """The next answer, interim ones included, to a request with this method."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "h")]))
        parser.send(h11.EndOfMessage())
        if self._rest:
            parser.receive_data(self._rest)
        head: h11.Response | h11.InformationalResponse | None = None
        body = bytearray()
        async with asyncio.timeout(20):
            while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    parser.receive_data(await self._bytes())
                elif isinstance(event, h11.Response | h11.InformationalResponse):
                    head = event
                    if isinstance(event, h11.InformationalResponse):
                        break
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    raise AssertionError(event)
        self._rest = parser.trailing_data[0]
        assert head is not None
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return Answer(head.status_code, headers, bytes(body))

    async def ask(self, request: bytes) -> Answer:
        await self.send(request)
        return await self.receive(request.partition(b" ")[0].decode())

    async def at_end(self) -> bool:
        return not self._rest and not await self._bytes()

    async def _bytes(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, 1 << 20)


@asynccontextmanager
async def client_of(app: ASGIApp | AsgiApplication) -> AsyncIterator[Client]:
    ours, theirs = socket.socketpair()
    with ours:
        yield Client(ours, await accepted(ours, theirs, app))


def request(line: str = "GET / HTTP/1.1", *headers: str, body: bytes = b"") -> bytes:
    host = [] if line.endswith("1.0") else ["host: h"]
    length = [f"content-length: {len(body)}"] if body else []
    return "\r\n".join([line, *host, *length, *headers, "", ""]).encode() + body


def begin(*headers: tuple[str, str], status: int = 200) -> Message:
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def part(body: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def whole(receive: Receive) -> bytes:
    """The body of a request."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        assert message["type"] == "http.request", message
        body += message["body"]
        more = message["more_body"]
    return bytes(body)


def sending(*messages: Message) -> ASGIApp:
    """An application that answers every request by these messages."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole(receive)
        for message in messages:
            await send(message)

    return app


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await whole(receive)
    await send(begin(("content-length", str(len(body)))))
    await send(part(body))


# --- scopes


async def scope_of(asked: bytes, rules: Gate | None = None) -> dict[str, Any]:
    found: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)
        await send(begin(status=204))
        await send(part())

    async with client_of(AsgiApplication(app, rules)) as client:
        assert (await client.ask(asked)).status == 204
    [scope] = found
    return dict(scope)


async def test_scope() -> None:
    line = "PUT /a%20b/%C3%BC?x=%31&y HTTP/1.1"
    scope = await scope_of(request(line, "X-Some: Thing", "x-some:"))
    expected = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "PUT", "scheme": "http", "path": "/a b/\u00fc", "raw_path": b"/a%20b/%C3%BC",
        "query_string": b"x=%31&y", "root_path": "",
        "headers": [(b"host", b"h"), (b"x-some", b"Thing"), (b"x-some", b"")],
        "client": (f"unix:{os.geteuid()}", 0), "server": None, "state": {},
    }  # fmt: skip
    assert {name: scope[name] for name in expected} == expected
    assert NAMES not in scope


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET /x HTTP/1.0", {"http_version": "1.0", "path": "/x"}),
        ("GET http://h/x?y HTTP/1.1", {"path": "/x", "query_string": b"y"}),
        ("GET http://h HTTP/1.1", {"path": "/", "raw_path": b"/"}),
        ("GET //x/../y HTTP/1.1", {"path": "//x/../y"}),
        ("OPTIONS * HTTP/1.1", {"path": "*", "raw_path": b"*"}),
    ],
)
async def test_scope_of_other_targets(line: str, expected: dict[str, Any]) -> None:
    scope = await scope_of(request(line))
    assert {name: scope[name] for name in expected} == expected


async def test_headers_for_models_keep_their_case() -> None:
    rules = Gate(HeaderRules(forward="X-.*"))
    scope = await scope_of(request("GET / HTTP/1.1", "X-Some: Thing"), rules)
    assert scope[NAMES] == [(b"host", b"h"), (b"X-Some", b"Thing")]
    assert scope["headers"] == [(b"host", b"h"), (b"x-some", b"Thing")]


async def test_addresses() -> None:
    found: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append((scope["client"], scope["server"]))
        await send(begin(status=204))
        await send(part())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        theirs.setblocking(False)
    with ours:
        client = Client(ours, await accepted(ours, theirs, app))
        addresses = ours.getsockname(), ours.getpeername()
        assert (await client.ask(request())).status == 204
    assert found == [addresses]


# --- bodies of requests


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_bodies(size: int) -> None:
    body = bytes(size)
    chunks = [body[start : start + 50_000] for start in range(0, size, 50_000)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    async with client_of(echo) as client:
        for asked in (
            request("POST / HTTP/1.1", body=body),
            request("POST / HTTP/1.1", "transfer-encoding: chunked") + chunked + b"0\r\n\r\n",
        ):
            sent = asyncio.create_task(client.send(asked))
            assert (await client.receive("POST")).body == body
            await sent


async def test_bodies_are_delivered_as_they_arrive() -> None:
    pieces: list[tuple[bytes, bool]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            pieces.append((message["body"], more))
        await send(begin(status=204))
        await send(part())
        assert await receive() == {"type": "http.disconnect"}
        pieces.append((b"over", False))

    async with client_of(app) as client:
        await client.send(request("POST / HTTP/1.1", "content-length: 5"))
        await client.send(b"ab")
        await until(lambda: pieces == [(b"ab", True)])
        await client.send(b"cde")
        assert (await client.receive("POST")).status == 204
        await until(lambda: pieces == [(b"ab", True), (b"cde", False), (b"over", False)])


async def test_nothing_is_read_that_the_application_does_not_take() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    body = memoryview(bytes(16 << 20))
    async with client_of(app) as client:
        await client.send(request("POST / HTTP/1.1", f"content-length: {len(body)}"))
        sent = 0
        for _ in range(1_000):
            with suppress(BlockingIOError):
                sent += client.socket.send(body[sent:])
            await asyncio.sleep(0)
        assert sent < 4 << 20
        go_on.set()
        rest = asyncio.create_task(client.send(body[sent:]))
        assert (await client.receive("POST")).body == body
        await rest


async def test_the_rest_of_a_body_is_skipped_behind_an_early_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin(("content-length", "2")))
        await send(part(b"no"))

    async with client_of(app) as client:
        await client.send(request("POST / HTTP/1.1", "content-length: 200000"))
        assert (await client.receive("POST")).body == b"no"
        await client.send(bytes(200_000) + request())
        assert (await client.receive()).body == b"no"


@pytest.mark.parametrize(
    ("line", "statuses"),
    [("POST / HTTP/1.1", [100, 200]), ("POST / HTTP/1.0", [200])],
    ids=["1.1", "1.0"],
)
async def test_a_client_is_told_to_send_its_body(line: str, statuses: list[int]) -> None:
    async with client_of(echo) as client:
        await client.send(request(line, "Expect: 100-Continue", "content-length: 5"))
        if len(statuses) == 1:
            await client.send(b"hello")
        answers = [await client.receive("POST")]
        if len(statuses) == 2:
            await client.send(b"hello")
            answers.append(await client.receive("POST"))
        assert [answer.status for answer in answers] == statuses
        assert answers[-1].body == b"hello"


async def test_a_refused_client_is_not_told_to_send_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin(("connection", "close"), ("content-length", "0"), status=413))
        await send(part())

    async with client_of(app) as client:
        asked = request("POST / HTTP/1.1", "expect: 100-continue", "content-length: 5")
        assert (await client.ask(asked)).status == 413
        assert await client.at_end()


# --- framing of answers


@pytest.mark.parametrize(
    ("line", "messages", "headers", "body"),
    [
        ("GET / HTTP/1.1", [begin(("Content-Length", "2")), part(b"ab")],
         {"content-length": "2"}, b"ab"),
        ("GET / HTTP/1.1", [begin(("content-length", "2")), part(b"a", True), part(b"b")],
         {"content-length": "2"}, b"ab"),
        ("GET / HTTP/1.1", [begin(), part(b"ab")], {"transfer-encoding": "chunked"}, b"ab"),
        ("GET / HTTP/1.1", [begin(), part(b"", True), part(b"ab", True), part()],
         {"transfer-encoding": "chunked"}, b"ab"),
        ("GET / HTTP/1.1", [begin(("transfer-encoding", "chunked")), part(b"ab")],
         {"transfer-encoding": "chunked"}, b"ab"),
        ("GET / HTTP/1.1",
         [begin(("transfer-encoding", "chunked"), ("content-length", "2")), part(b"ab")],
         {"content-length": "2"}, b"ab"),
        ("HEAD / HTTP/1.1", [begin(("content-length", "2")), part(b"ab")],
         {"content-length": "2"}, b""),
        ("HEAD / HTTP/1.1", [begin(), part(b"ab")], {}, b""),
        ("GET / HTTP/1.1", [begin(status=204), part()], {}, b""),
        ("GET / HTTP/1.1", [begin(("etag", "x"), status=304), part()], {"etag": "x"}, b""),
        ("GET / HTTP/1.0", [begin(("content-length", "2")), part(b"ab")],
         {"content-length": "2", "connection": "close"}, b"ab"),
        ("GET / HTTP/1.0", [begin(), part(b"a", True), part(b"b")], {"connection": "close"}, b"ab"),
        ("GET / HTTP/1.1", [begin(("Connection", "x, Close"), ("content-length", "0")), part()],
         {"connection": "x, Close", "content-length": "0"}, b""),
    ],
)  # fmt: skip
async def test_framing(
    line: str, messages: list[Message], headers: dict[str, str], body: bytes
) -> None:
    """A connection goes on behind an answer exactly if that does not say that it closes."""
    async with client_of(sending(*messages)) as client:
        first = await client.ask(request(line))
        assert (first.headers, first.body) == (headers, body)
        if "connection" in headers:
            assert await client.at_end()
        else:
            assert await client.ask(request(line)) == first


@pytest.mark.parametrize("status", [200, 418, 599])
async def test_statuses(status: int) -> None:
    async with client_of(sending(begin(("content-length", "0"), status=status), part())) as client:
        assert (await client.ask(request())).status == status


async def test_a_client_may_end_the_connection_with_its_request() -> None:
    async with client_of(echo) as client:
        answer = await client.ask(request("GET / HTTP/1.1", "Connection: close") + request())
        assert answer.headers["connection"] == "close"
        assert await client.at_end()


async def test_a_retired_connection_ends_behind_its_next_answer() -> None:
    async with client_of(echo) as client:
        assert "connection" not in (await client.ask(request())).headers
        client.connection.retire()
        assert (await client.ask(request())).headers["connection"] == "close"
        assert await client.at_end()


async def test_nothing_is_sent_before_the_body_begins() -> None:
    go_on = asyncio.Event()
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin())
        begun.set()
        await go_on.wait()
        await send(part(b"here"))

    async with client_of(app) as client:
        await client.send(request())
        await begun.wait()
        with pytest.raises(BlockingIOError):
            client.socket.recv(1)
        go_on.set()
        assert (await client.receive()).body == b"here"


async def test_sending_waits_for_the_client() -> None:
    count, sent = 200, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(begin())
        while sent < count:
            await send(part(bytes(100_000), True))
            sent += 1
        await send(part())

    async with client_of(app) as client:
        await client.send(request())
        await until(lambda: sent > 0)
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert sent < count / 4
        assert len((await client.receive()).body) == count * 100_000


async def test_a_client_that_leaves_ends_the_wait_for_it() -> None:
    returned = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin())
        for _ in range(200):
            await send(part(bytes(100_000), True))
        await send(part())
        assert await receive() == {"type": "http.disconnect"}
        returned.set()

    async with client_of(app) as client:
        await client.send(request())
        await asyncio.get_running_loop().sock_recv(client.socket, 1)
        client.socket.close()
        async with asyncio.timeout(20):
            await returned.wait()


# --- order


async def test_requests_of_a_connection_run_one_after_the_other() -> None:
    running: list[str] = []
    begun: list[str] = []
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        running.append(scope["path"])
        assert len(running) == 1
        await go_on.wait()
        await send(begin())
        await send(part(scope["path"].encode() + await whole(receive)))
        running.clear()

    async with client_of(app) as client:
        await client.send(
            request("GET /1 HTTP/1.1") + request("POST /2 HTTP/1.1", body=b"!")
            + request("GET /3 HTTP/1.1")
        )  # fmt: skip
        await until(lambda: begun == ["/1"])
        go_on.set()
        bodies = [(await client.receive()).body for _ in range(3)]
    assert bodies == [b"/1", b"/2!", b"/3"]


# --- failures


def failing(messages: list[Message], error: BaseException) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        raise error

    return app


@pytest.mark.parametrize(
    "app",
    [
        failing([], ValueError("broken")),
        failing([begin()], ValueError("broken")),
        sending(),
        sending(begin()),
        sending(part()),
        sending({"type": "http.nonsense"}),
        sending(begin(), begin()),
        sending(begin(("content-length", "1")), part(b"ab")),
        sending(begin(("content-length", "3")), part(b"ab")),
        sending(begin(("x\r\ny", "z")), part()),
        sending(begin(("", "z")), part()),
        sending(begin(("x", "y\r\nz: 1")), part()),
    ],
)
async def test_a_failed_application_is_answered_for(
    app: ASGIApp, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(app) as client:
        answer = await client.ask(request())
        assert (answer.status, answer.body) == (500, b'{"error":"internal error"}')
        assert answer.headers["content-type"] == "application/json"
        assert await client.at_end()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    "app",
    [
        failing([begin(), part(b"ab", True)], ValueError("broken")),
        sending(begin(), part(b"ab", True)),
        sending(begin(("content-length", "3")), part(b"ab", True), part(b"cd")),
    ],
)
async def test_a_begun_answer_is_cut_off(app: ASGIApp, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(app) as client:
        with pytest.raises(h11.RemoteProtocolError):
            await client.ask(request())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    "app",
    [
        failing([begin(("content-length", "0")), part()], ValueError("broken")),
        sending(begin(("content-length", "0")), part(), part()),
    ],
)
async def test_a_failure_behind_the_answer_is_logged(
    app: ASGIApp, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(app) as client:
        for _ in range(2):
            assert (await client.ask(request())).status == 200
        await until(lambda: len(caplog.records) == 2)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


async def test_a_cancelled_call_is_answered_for() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    application = AsgiApplication(app)
    async with client_of(application) as client:
        await client.send(request())
        await until(lambda: bool(application.tasks))
        [task] = application.tasks
        await asyncio.sleep(0)
        task.cancel()
        assert (await client.receive()).status == 503
        assert await client.at_end()
    assert task.cancelled()


async def test_no_answer_to_a_client_that_has_left() -> None:
    outcome: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole(receive)
        outcome.append(await receive())
        await send(begin())
        await send(part(b"too late"))
        outcome.append("sent")

    application = AsgiApplication(app)
    async with client_of(application) as client:
        await client.send(request())
        await until(lambda: bool(application.tasks))
        client.socket.close()
        await until(lambda: not application.tasks)
    assert outcome == [{"type": "http.disconnect"}, "sent"]


# --- invalid requests


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx\x00: y\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n"
         b"transfer-encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 20_000, 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 256 + b"\r\n", 431),
    ],
)  # fmt: skip
async def test_invalid_requests(asked: bytes, status: int) -> None:
    async with client_of(echo) as client:
        assert (await client.ask(asked)).status == status
        with suppress(ConnectionResetError):  # with unread bytes, the end is a reset
            assert await client.at_end()


async def test_an_invalid_request_cuts_off_a_begun_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin())
        await send(part(b"ab", True))
        await whole(receive)
        await receive()

    async with client_of(app) as client:
        await client.send(request())
        await until(lambda: client.connection.answering)
        received = await asyncio.get_running_loop().sock_recv(client.socket, 1 << 16)
        assert received.endswith(b"2\r\nab\r\n")
        await client.send(b"nonsense\r\n\r\n")
        assert await client.at_end()
