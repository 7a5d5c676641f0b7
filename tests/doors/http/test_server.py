"""Servers of ASGI applications: this one with others' clients, and others with our application."""

import asyncio
import http.client
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from shutil import which

import aiohttp
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.api.gate import Gate
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.routes import late_app
from headrace.doors.http.server import HttpServer
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from tests.engine.worlds import LOAD_OPTIONS

_LARGE = bytes(range(256)) * 4_000  # aiohttp warns of a megabyte
_PIECE = 100_000


def pieces(body: bytes) -> Iterator[bytes]:
    return (body[start : start + _PIECE] for start in range(0, len(body), _PIECE))


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def stream(request: Request) -> Response:
    return StreamingResponse(pieces(await request.body()))


_ROUTES = (
    Route("/echo", echo, methods=["GET", "POST"]),
    Route("/stream", stream, methods=["POST"]),
)


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


@asynccontextmanager
async def serving() -> AsyncIterator[HttpServer]:
    server = HttpServer(Starlette(routes=_ROUTES), [listening()], 75, 60)
    server.start()
    try:
        yield server
    finally:
        await server.stop(10)


# --- clients, which send bodies with a length and in chunks, and return what they have received


def by_httpx(url: str, body: bytes) -> list[bytes]:
    with httpx.Client(base_url=url) as client:
        answers = [
            client.post(path, content=content)
            for path in ("/echo", "/stream")
            for content in (body, pieces(body))
        ]
        head = client.head("/echo")
        assert (head.headers["content-length"], head.content) == ("0", b"")
    return [answer.content for answer in answers]


def by_standard_library(url: str, body: bytes) -> list[bytes]:
    client = http.client.HTTPConnection(url.removeprefix("http://"))
    found = []
    for path in ("/echo", "/stream"):
        for content in (body, pieces(body)):
            client.request("POST", path, content, encode_chunked=True)
            found.append(client.getresponse().read())
    client.close()
    return found


def by_aiohttp(url: str, body: bytes) -> list[bytes]:
    async def in_chunks() -> AsyncIterator[bytes]:
        for piece in pieces(body):
            yield piece

    async def ask() -> list[bytes]:
        found = []
        async with aiohttp.ClientSession(url) as client:
            for path in ("/echo", "/stream"):
                for content in (body, in_chunks()):
                    async with client.post(path, data=content) as answer:
                        found.append(await answer.read())
            async with client.post("/echo", data=body, expect100=True) as answer:
                found.append(await answer.read())
        return found

    return asyncio.run(ask())


def by_curl(url: str, body: bytes) -> list[bytes]:
    found = []
    for path in ("/echo", "/stream"):
        for options in ((), ("-H", "Transfer-Encoding: chunked"), ("--http1.0",)):
            command = ["curl", "-sS", "--data-binary", "@-", *options, url + path]
            ran = subprocess.run(command, input=body, stdout=subprocess.PIPE, check=True)
            found.append(ran.stdout)
    return found


@pytest.mark.parametrize("body", [b"", b"short", _LARGE], ids=["empty", "short", "large"])
@pytest.mark.parametrize(
    "client",
    [
        by_httpx, by_standard_library, by_aiohttp,
        pytest.param(by_curl, marks=pytest.mark.skipif(not which("curl"), reason="no curl")),
    ],
)  # fmt: skip
async def test_clients(client: Callable[[str, bytes], list[bytes]], body: bytes) -> None:
    async with serving() as server:
        found = await asyncio.to_thread(client, f"http://127.0.0.1:{server.port}", body)
    assert len(found) >= 4
    assert set(found) == {body}


# --- other servers


async def test_another_server_serves_the_application() -> None:
    engine = Engine("server", "0", {}, LOAD_OPTIONS, Admission(0, 0))
    rules = Gate()
    app = late_app(engine, 1 << 20, rules, inference_routes(engine, 1 << 20, rules))
    listener = listening()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    task = asyncio.create_task(server.serve([listener]))
    host, port = listener.getsockname()
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            for path in ("/v2", "/v2/health/live"):
                assert (await client.get(path)).status_code == 200
            infer = await client.post("/v2/models/nope/infer", content=b"{}")
            assert (infer.status_code, list(infer.json())) == (503, ["error"])  # not ready yet
    finally:
        server.should_exit = True
        await task
