"""Connections of a server that ends, on real sockets."""

import asyncio
import socket

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from headrace.transports.http.protocol import BoundedProtocol

_REQUEST = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


async def connected(client: socket.socket, server: socket.socket) -> BoundedProtocol:
    """A connection that has answered one request and is idle."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(Starlette(routes=[Route("/", answer)]), lifespan="off", log_config=None)
    config.load()
    _, protocol = await loop.connect_accepted_socket(
        lambda: BoundedProtocol(30, config=config, server_state=ServerState(), app_state={}),
        server,
    )
    client.setblocking(False)
    client.sendall(_REQUEST)
    assert (await loop.sock_recv(client, 1 << 16)).endswith(b"here")
    return protocol


def test_a_request_that_is_here_when_the_server_ends_is_answered() -> None:
    async def scenario() -> None:
        client, server = socket.socketpair()
        with client:
            protocol = await connected(client, server)
            client.sendall(_REQUEST)  # which nobody has read when the next line runs
            protocol.shutdown()
            loop = asyncio.get_running_loop()
            found = await loop.sock_recv(client, 1 << 16)
            assert found.endswith(b"here")
            assert b"connection: close" in found
            assert await loop.sock_recv(client, 1 << 16) == b""

    uvloop.run(scenario())


def test_an_idle_connection_ends_soon() -> None:
    async def scenario() -> None:
        client, server = socket.socketpair()
        with client:
            (await connected(client, server)).shutdown()
            assert await asyncio.get_running_loop().sock_recv(client, 1 << 16) == b""

    uvloop.run(scenario())
