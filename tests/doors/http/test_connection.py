"""Connections on real sockets: limits, shutdown, disconnections, and the fast path."""

import asyncio
import fcntl
import gzip
import socket
import termios
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.core.call import Call, InferResponse, Timing
from headrace.core.datatypes import Datatype
from headrace.core.errors import ServerError
from headrace.core.limits import uncharged
from headrace.core.tensors import Tensor
from headrace.doors.http.connection import PLAIN_ANSWER, PLAIN_REST, Connection, FastPath
from headrace.doors.http.head import Heads
from headrace.doors.http.server import HttpServer
from headrace.engine.admission import Admission
from headrace.engine.workbench import Deferred
from headrace.protocol.parameters import server_timing
from headrace.protocol.status import STATUS
from tests.doors.fakes import FakeEngine, until
from tests.doors.http.accepted import accepted

_REQUEST = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
_BODY = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1,1],"data":[1]}]}'
_INFER = b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)
_LONG = _INFER.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


async def connected(client: socket.socket, server: socket.socket) -> Connection:
    """A connection that has answered one request and is idle."""
    loop = asyncio.get_running_loop()
    protocol = await accepted(client, server, Starlette(routes=[Route("/", answer)]))
    client.sendall(_REQUEST)
    assert (await loop.sock_recv(client, 1 << 16)).endswith(b"here")
    return protocol


async def test_a_received_request_is_answered_at_shutdown() -> None:
    client, server = socket.socketpair()
    with client:
        protocol = await connected(client, server)
        client.sendall(_REQUEST)  # unread when the next line runs
        protocol.shutdown()
        loop = asyncio.get_running_loop()
        found = await loop.sock_recv(client, 1 << 16)
        assert found.endswith(b"here")
        assert b"connection: close" in found
        assert await loop.sock_recv(client, 1 << 16) == b""


async def test_an_idle_connection_ends_soon() -> None:
    client, server = socket.socketpair()
    with client:
        (await connected(client, server)).shutdown()
        assert await asyncio.get_running_loop().sock_recv(client, 1 << 16) == b""


@pytest.mark.parametrize("end", ["", "what is no request\r\n\r\n"])
async def test_every_request_of_a_closed_connection_is_cancelled(end: str) -> None:
    """Also a request behind which the client has sent another."""
    begun, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    client, server = socket.socketpair()
    with client:
        await accepted(client, server, app)
        client.sendall(2 * _REQUEST + end.encode())
        await begun.wait()
        if not end:
            client.close()
        async with asyncio.timeout(60):
            await told.wait()


async def test_waiting_heads_and_requests_are_charged() -> None:
    go_on, admission = asyncio.Event(), Admission(0, 0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    client, server = socket.socketpair()
    with client:
        await accepted(client, server, app, admission)
        client.sendall(_REQUEST[:10])
        await until(lambda: admission.bytes == 10)
        client.sendall(_REQUEST[10:20])
        await until(lambda: admission.bytes == 20)
        client.sendall(_REQUEST[20:])
        await until(lambda: admission.bytes == 0)
        client.sendall(_REQUEST * 10)
        await until(lambda: admission.bytes > 10 * len(_REQUEST))
        go_on.set()
        await until(lambda: admission.bytes == 0)
        client.sendall(_REQUEST[:10])
        await until(lambda: admission.bytes == 10)
    await until(lambda: admission.bytes == 0)
    assert admission.unread == 0


async def test_an_unfinished_request_is_refused_once() -> None:
    """However long its client does not read the answer to an earlier one."""
    admission, loop = Admission(0, 0), asyncio.get_running_loop()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": bytes(4 << 20)})

    client, server = socket.socketpair()
    with client:
        protocol = await accepted(client, server, app, admission)
        client.sendall(_REQUEST)
        await until(lambda: admission.unread > 0)
        client.sendall(_REQUEST[:10])
        await until(lambda: protocol.held == 10)
        now = loop.time()
        for second in range(40):
            protocol.check(now + second)
        found = bytearray()
        while data := await loop.sock_recv(client, 1 << 20):
            found += data
    assert found.count(b"HTTP/1.1 408 ") == 1
    assert admission.aborted["unsent"] == 1


async def test_pipelined_requests_are_parsed_as_they_are_answered() -> None:
    """Waiting requests are bytes: as objects each would take more than a hundred times that."""
    loop = asyncio.get_running_loop()
    client, server = socket.socketpair()
    with client:
        count = 1_000
        client.sendall(_REQUEST * count)
        app = Starlette(routes=[Route("/", answer)])
        protocol = await accepted(client, server, app)
        await until(lambda: protocol.held > 0)
        assert len(_REQUEST) * count / 2 < protocol.held < 1 << 20
        received = b""
        while received.count(b"here") < count:
            received += await loop.sock_recv(client, 1 << 20)
        assert received.count(b"HTTP/1.1 200 OK") == count
        await until(lambda: protocol.held == 0)
        client.sendall(_REQUEST)
        assert (await loop.sock_recv(client, 1 << 16)).endswith(b"here")


@pytest.mark.parametrize("part", [8 << 10, 100])
async def test_a_long_path_is_refused(part: int) -> None:
    client, server = socket.socketpair()
    with client:
        await accepted(client, server, Starlette())
        path = b"/" + bytes(8 << 10).replace(b"\0", b"x")
        head = b"GET %b HTTP/1.1\r\nhost: h\r\n\r\n" % path
        for start in range(0, len(head), part):
            with suppress(BrokenPipeError):
                client.send(head[start : start + part])
            await asyncio.sleep(0)
        found = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert found.startswith(b"HTTP/1.1 414 URI Too Long")
        assert b"a request's path and query may have 8192 bytes" in found


async def test_a_body_in_many_chunks_is_parsed_in_turns() -> None:
    read = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        while (message := await receive())["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
        assert size == 40_000
        read.set()

    head = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    client, server = socket.socketpair()
    with client:
        protocol = await accepted(client, server, app)
        protocol.data_received(head + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
        assert protocol.held > 100_000
        await read.wait()
        await until(lambda: protocol.held == 0)


async def test_requests_behind_a_chunked_body_are_parsed_as_they_are_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    loop = asyncio.get_running_loop()
    head = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
    client, server = socket.socketpair()
    with client:
        protocol = await accepted(client, server, app)
        count = 500
        protocol.data_received(head)
        protocol.data_received(b"0\r\n\r\n" + _REQUEST * count)
        assert protocol.held < 1 << 18  # some are objects already
        received = b""
        while received.count(b"HTTP/1.1 204") <= count:
            received += await loop.sock_recv(client, 1 << 20)
        await until(lambda: protocol.held == 0)


async def test_nothing_is_read_while_requests_wait() -> None:
    """Also if an application asks for a body."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        asked.set()
        await go_on.wait()

    client, server = socket.socketpair()
    with client:
        protocol = await accepted(client, server, app)
        sent, data = 0, _REQUEST * 10_000
        for _ in range(1_000):
            with suppress(BlockingIOError):
                sent += client.send(data)
            await asyncio.sleep(0)
        await asked.wait()
        assert protocol.held
        assert sent < 8 << 20
        protocol.transport.abort()
        go_on.set()


async def test_a_body_that_nobody_wants_is_read_in_turns() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client:
        size, sent = 64 << 20, 0
        client.sendall(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size)
        client.setblocking(False)
        with suppress(BlockingIOError):
            while sent < size:
                sent += client.send(bytes(min(1 << 20, size - sent)))
        turns, counting = 0, True

        def count() -> None:
            nonlocal turns
            turns += 1
            if counting:
                loop.call_soon(count)

        server.setblocking(False)
        await accepted(client, server, Starlette())
        count()
        waiting = sent
        while waiting > 0:
            waiting = int.from_bytes(fcntl.ioctl(server, termios.FIONREAD, bytes(4)), "little")
            await asyncio.sleep(0)
        counting = False
        assert turns > sent // (1 << 20)


# --- infer requests, with controlled models


def started(engine: FakeEngine, listener: socket.socket | None = None) -> HttpServer:
    """A server of the fast path, by default on a free port."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    fast = FastPath(Heads(engine, Gate()), 1 << 20, access_log=False)
    server = HttpServer(Starlette(), [listener], 5, 60, fast, admission=engine.admission)
    server.start()
    return server


@pytest.mark.parametrize(
    ("more", "body"),
    [(b"", _BODY + b" " * 2000), (b"Content-Encoding: gzip\r\n", gzip.compress(_BODY))],
    ids=["long", "compressed"],
)
async def test_pipelined_requests_count_by_their_size(more: bytes, body: bytes) -> None:
    """64 such requests would take several milliseconds for each connection that sends them."""
    engine = FakeEngine()
    server = started(engine)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    request = _INFER.partition(b"Content-Length")[0] + more
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    writer.write(request * 40)
    await until(lambda: bool(engine.plain.work))
    assert len(engine.plain.work) < 20
    await until(lambda: len(engine.plain.work) == 40)
    writer.close()
    await server.stop(1)


async def test_an_answer_behind_earlier_ones_is_charged() -> None:
    engine = FakeEngine()
    server = started(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_INFER * 2)
    await until(lambda: len(engine.plain.work) == 2)
    admission = engine.admission
    first, second = engine.plain.work
    before = admission.bytes
    assert before == 2 * len(_BODY)
    second.answer(1000, final=True)
    assert admission.bytes > before + 1000
    first.answer(1000, final=True)
    assert (admission.requests, admission.bytes) == (0, 0)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    await server.stop(1)


@pytest.mark.parametrize("kind", STATUS)
async def test_every_error_of_a_model_is_answered(kind: type[ServerError]) -> None:
    """Also that the request was cancelled, by whatever the model has asked itself."""
    engine = FakeEngine()
    server = started(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_INFER)
    await until(lambda: bool(engine.plain.work))
    engine.plain.last.request.pass_end(kind("why"))
    assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % STATUS[kind].http)
    assert (engine.admission.requests, engine.admission.bytes) == (0, 0)
    writer.close()
    await server.stop(1)


async def test_later_requests_need_not_wait_for_what_a_stage_puts_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    submit = engine.plain.submit

    def put_off(call: Call) -> None:
        bench = engine.admission.workbench
        Deferred(bench, 0, lambda _: None, lambda _: submit(call), call, uncharged)

    monkeypatch.setattr(engine.plain, "submit", put_off)
    server = started(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_INFER)
    await until(lambda: len(engine.plain.work) == 1)
    writer.write(_INFER)
    await until(lambda: len(engine.plain.work) == 2)
    for work in engine.plain.work:
        work.answer("done", final=True)
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
        await reader.readexactly(int(length))
    writer.close()
    await server.stop(1)


async def test_a_body_without_memory_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoMemory:
        def block(self, nbytes: int) -> memoryview:
            raise MemoryError

    monkeypatch.setattr("headrace.doors.http.connection.BLOCKS", NoMemory())
    engine = FakeEngine()
    server = started(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_INFER + _LONG % 5_000 + bytes(10))
    await until(lambda: bool(engine.plain.work))
    engine.plain.last.answer("first", final=True)
    writer.write(bytes(4_990) + _INFER)
    await until(lambda: len(engine.plain.work) == 2)
    engine.plain.last.answer("last", final=True)
    for status in (b"200 OK", b"500 Internal Server Error", b"200 OK"):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
        await reader.readexactly(int(length))
    assert (engine.admission.requests, engine.admission.bytes) == (0, 0)
    writer.close()
    await server.stop(1)


async def test_the_rest_of_an_abandoned_body_cuts_no_earlier_answer(tmp_path: Path) -> None:
    engine, listener = FakeEngine(), socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "http"))
    listener.listen()
    server, admission, loop = (
        started(engine, listener),
        engine.admission,
        asyncio.get_running_loop(),
    )
    body = _BODY[:-1] + b',"parameters":{"binary_data_output":true}}'
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await loop.sock_connect(client, str(tmp_path / "http"))
        size, begun = 900_000, 300_000  # so much is missing that it is received in place
        await loop.sock_sendall(client, _LONG % len(body) + body + _LONG % size + bytes(begun))
        await until(lambda: admission.bytes == len(body) + begun)
        # So many outputs that the connection keeps some of them until its client reads.
        outputs = [Tensor(f"y{n}", Datatype.UINT8, np.zeros(1 << 20, np.uint8)) for n in range(20)]
        response = InferResponse("plain", "7", "", outputs, Timing(1, 2, 3))
        engine.plain.last.request.pass_response(response, True)
        await until(lambda: admission.unread > 0)
        server.end_unfinished()
        before = admission.bytes
        await loop.sock_sendall(client, bytes(size - begun) + b"behind it")
        await until(lambda: admission.bytes != before)
        found = bytearray()
        while data := await loop.sock_recv(client, 1 << 20):
            found += data
    first, second, third = bytes(found).split(b"HTTP/1.1 ")
    assert (first, second[:3], third[:3]) == (b"", b"200", b"503")
    assert second.endswith(bytes(20 << 20))
    await server.stop(1)


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(1, 10**6), st.binary(max_size=9))
def test_heads_of_plain_answers(queue_ns: int, compute_ns: int, rows: int, body: bytes) -> None:
    timing = server_timing(Timing(queue_ns, compute_ns, rows))
    rest = PLAIN_REST % (compute_ns / 1e6, rows, len(body), body)
    assert PLAIN_ANSWER % (queue_ns / 1e6, rest) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nserver-timing: %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (timing, len(body), body)
    )


@pytest.mark.parametrize("each", [1, 5])
async def test_requests_of_many_clients_at_once_begin_in_turns(each: int) -> None:
    """The first steps of their tasks would all be taken in one turn of the loop otherwise.

    Also of those that are parsed ahead. Health checks have priority.
    """
    turn, begun, admission = 0, Counter[int](), Admission(0, 0)
    healthy: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun[turn] += 1
        if scope["path"].startswith("/v2/health"):
            healthy.append(begun.total())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    with ExitStack() as stack:
        clients = []
        for _ in range(300):
            client, server = map(stack.enter_context, socket.socketpair())
            await accepted(client, server, app, admission)
            clients.append(client)
        for number, client in enumerate(clients):
            path = b"/v2/health/live" if number == 290 else b"/"
            client.sendall(b"GET %b HTTP/1.1\r\nhost: h\r\n\r\n" % path * each)
        while begun.total() < 300 * each:
            turn += 1
            await asyncio.sleep(0)
        assert max(begun.values()) < 100
        assert healthy[0] < 200
