"""Quotas of clients over HTTP, with controlled models, and clients that proxies name."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from struct import pack

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.api.gate import Gate
from headrace.core.quotas import Quota, Quotas
from headrace.doors.http.connection import FastPath
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.head import Heads
from headrace.doors.http.server import HttpServer
from headrace.engine.client_accounts import limit_clients
from headrace.protocol.proxies import TrustedProxies
from tests.doors.fakes import FakeEngine, until

_BODY = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
_MORE = (b"", b"Accept-Encoding: gzip\r\n")


def infer(more: bytes = b"", chunked: bool = False) -> bytes:
    """An infer request."""
    length = b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
    if chunked:
        length = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)
    return b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: h\r\n" + more + length


async def who(request: Request) -> Response:
    return PlainTextResponse(request.client.host if request.client else "")


@asynccontextmanager
async def serving(engine: FakeEngine, fast: bool = True) -> AsyncIterator[HttpServer]:
    """A server on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    given = engine, 1 << 20, Gate()
    path = FastPath(Heads(engine, Gate()), 1 << 20, access_log=False) if fast else None
    others, routes = Starlette(routes=[Route("/who", who)]), inference_routes(*given)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for route in routes:
            if scope["type"] == "http" and route.claims(scope["method"], scope["path"]):
                await route.handle(scope, receive, send)
                return
        await others(scope, receive, send)

    server = HttpServer(app, [listener], 5, 60, path, admission=engine.admission)
    server.start()
    try:
        yield server
    finally:
        await server.stop(1)


async def ask(server: HttpServer, data: bytes) -> bytes:
    """The head of the answer to a request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    try:
        return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


@pytest.mark.parametrize(("fast", "chunked"), [(True, False), (True, True), (False, False)])
async def test_requests_above_a_quota_are_refused(fast: bool, chunked: bool) -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), requests_per_sec=0.01),)))
    async with serving(engine, fast) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(infer(chunked=chunked))
        await until(lambda: bool(engine.plain.work))
        engine.plain.last.answer(10, final=True)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        await until(lambda: engine.admission.requests == 0)
        for more in _MORE:
            head = await ask(server, infer(more, chunked))
            assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
            lines = head.decode().lower().split("\r\n")
            assert 'ratelimit-policy: "q";q=1;qu="requests";w=100' in lines
            [after] = [line for line in lines if line.startswith("retry-after: ")]
            assert 90 < int(after.partition(" ")[2]) <= 100
        writer.close()
    assert len(engine.plain.work) == 1
    assert engine.admission.quota_refused == {("q", "requests_per_sec"): 2}
    admission = engine.admission
    assert (admission.requests, admission.messages, admission.bytes) == (0, 0, 0)


async def test_clients_that_a_trusted_proxy_names() -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), requests=1),)))
    engine.admission.proxies = TrustedProxies(["127.0.0.0/8"])
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(infer(b"X-Forwarded-For: 192.0.2.1\r\n"))
        await until(lambda: len(engine.plain.work) == 1)
        writer.write(infer(b"X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-For: 192.0.2.2\r\n"))
        await until(lambda: len(engine.plain.work) == 2)
        for name in (b"192.0.2.1", b"6.6.6.6, 192.0.2.2", b"192.0.2.1, 127.0.0.5"):
            head = await ask(server, infer(b"X-Forwarded-For: %b\r\n" % name))
            assert head.startswith(b"HTTP/1.1 429 ")
        assert len(engine.plain.work) == 2
        get = (
            b"GET /who HTTP/1.1\r\nHost: h\r\nForwarded: for=192.0.2.9\r\nConnection: close\r\n\r\n"
        )
        second, writing = await asyncio.open_connection("127.0.0.1", server.port)
        writing.write(get + b"\r\n")
        assert (await second.read()).endswith(b"\r\n\r\n192.0.2.9")
        writing.close()
        writer.close()


async def test_others_cannot_name_a_client() -> None:
    engine = FakeEngine()
    limit_clients(engine.admission, Quotas((Quota("q", ("*",), requests=1),)))
    engine.admission.proxies = TrustedProxies(["10.0.0.0/8"])
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(infer(b"X-Forwarded-For: 192.0.2.1\r\n"))
        await until(lambda: len(engine.plain.work) == 1)
        head = await ask(server, infer(b"X-Forwarded-For: 192.0.2.2\r\n"))
        assert head.startswith(b"HTTP/1.1 429 ")
        writer.close()


async def test_the_proxy_protocol_names_the_client_of_a_connection() -> None:
    engine = FakeEngine()
    engine.admission.proxies = TrustedProxies(["127.0.0.0/8"], announce=True)
    get = b"GET /who HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    addresses = socket.inet_aton("192.0.2.1") + socket.inet_aton("127.0.0.1") + pack("!HH", 1, 2)
    signature = b"\r\n\r\n\0\r\nQUIT\n"
    async with serving(engine) as server:
        for header, found in (
            (signature + b"\x21\x11\0\x0c" + addresses, b"192.0.2.1"),
            (signature + b"\x20\0\0\0", b"127.0.0.1"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for at in range(len(header)):
                writer.write(header[at : at + 1])
                await writer.drain()
            writer.write(get)
            assert (await reader.read()).endswith(b"\r\n\r\n" + found)
            writer.close()
        for wrong in (get, signature + b"\x31\x11\0\x0c" + addresses, signature[:5]):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(wrong)
            writer.write_eof()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
