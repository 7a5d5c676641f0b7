"""Infer requests on the fast path, with controlled models."""

import asyncio
import gzip
import socket

import pytest
from starlette.applications import Starlette

from headrace.api.header_rules import DoorRules
from headrace.doors.http.server import HttpServer, fast_protocol
from tests.doors.fakes import FakeEngine, until

_BODY = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1,1],"data":[1]}]}'
_REQUEST = b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


def started(engine: FakeEngine) -> HttpServer:
    """A server of the fast path on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    fast = fast_protocol(engine, 1 << 20, False, DoorRules())
    server = HttpServer(Starlette(), listener, 5, 60, fast, admission=engine.admission)
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
    request = _REQUEST.partition(b"Content-Length")[0] + more
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
    writer.write(_REQUEST * 2)
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
