"""Invalid bytes and slow clients do not affect other clients."""

import asyncio
import contextlib
import random

import pytest

from tests.faults.conftest import Busy
from tests.faults.requests import INFER, infer, infer_grpc
from tests.support.busy_model import busy_json
from tests.support.raw_clients import HttpConnection, call, code_of, get, open_channel, post_bytes
from tests.support.transports import over_both_transports
from tests.support.watching import admitted, metrics, until

_NOISE = random.Random(7)
GARBAGE = {
    "nothing": b"",
    "one byte": b"\0",
    "noise": _NOISE.randbytes(4096),
    "much noise": _NOISE.randbytes(1 << 20),
    "lines": b"hello\r\n\r\nis anybody there\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c403") + _NOISE.randbytes(190),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _NOISE.randbytes(300),
    "HTTP/2 frame of 16 MB": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\0\0\0\0\0\0"
    + b"x" * 500,
    "PUSH_PROMISE of 1 MiB": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    + b"\x10\0\0\5\0\0\0\0\1"
    + bytes(1 << 20),
    "long request line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "long header": b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: " + b"b" * 1_000_000,
    "many headers": b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "negative length": b"POST /v2/models/busy/infer HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "length and chunks": b"POST /v2/models/busy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": b"POST /v2/models/busy/infer HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "upgrade": b"GET /v2 HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "upgrade to HTTP/2": b"GET /v2 HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade,"
    b" HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
    "escaped path": b"GET /v2/models/%00%ff%2e%2e/ready HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
async def test_random_bytes(busy: Busy, door: str) -> None:
    server = busy.server
    async with open_channel(server.grpc) as channel:
        for kind, garbage in GARBAGE.items():
            connection = await HttpConnection.open(getattr(server, door))
            sending = asyncio.ensure_future(connection.send(garbage))
            # Meanwhile and afterwards, the others are served.
            assert await infer(server, "busy", 3) == 3, kind
            assert await infer_grpc(channel, "busy", 4) == 4, kind
            await asyncio.wait([sending])
            failed = sending.exception()
            assert failed is None or isinstance(failed, ConnectionError), kind
            connection.reset()
    assert (await metrics(server))["headrace_ready"] == 1


async def test_invalid_http_closes_the_connection(busy: Busy) -> None:
    for kind in ("noise", "lines", "negative length", "length and chunks", "bad chunk"):
        async with await HttpConnection.open(busy.server.http) as connection:
            await connection.send(GARBAGE[kind])
            assert (await connection.receive()).status == 400, kind
            assert await connection.ended()


@pytest.mark.parametrize("piece", [b"X-A: b\r\n" * 1000, b"b" * 10_000], ids=["many", "long"])
async def test_endless_headers_are_refused(busy: Busy, piece: bytes) -> None:
    async with await HttpConnection.open(busy.server.http) as connection:
        await connection.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: ")
        answer = asyncio.ensure_future(connection.receive())
        sent = 0
        while not answer.done():
            try:
                await connection.send(piece)
            except ConnectionError:
                break
            sent += len(piece)
            await asyncio.sleep(0)
            assert sent < 16 << 20
        with contextlib.suppress(ConnectionError):  # it may be reset before it is read
            assert (await answer).status == 431


@over_both_transports("shared_server")
async def test_messages_that_are_not_protobuf(busy: Busy) -> None:
    noise = random.Random(8)
    async with open_channel(busy.server.grpc) as channel:
        for method in ("ModelInfer", "ModelMetadata", "ServerLive", "RepositoryIndex"):
            for size in (1, 50, 5000):
                data = b"\xff" + noise.randbytes(size)
                code = await code_of(call(channel, method, data))
                assert code.name == "INVALID_ARGUMENT", method


async def test_clients_that_send_single_bytes_do_not_block_others(busy: Busy) -> None:
    server = busy.server
    whole = post_bytes(INFER["busy"], busy_json(6))
    slow = [await HttpConnection.open(server.http) for _ in range(40)]
    for position in range(len(whole)):
        for connection in slow:
            await connection.send(whole[position : position + 1])
        if position % 60 == 0:
            assert await infer(server, "busy", position) == position
    for connection in slow:
        answer = await connection.receive()
        assert answer.status == 200
        assert b'"data":[6]' in answer.body
        await connection.close()


async def test_clients_with_unfinished_headers_do_not_block_others(busy: Busy) -> None:
    server = busy.server
    slow = [await HttpConnection.open(server.http) for _ in range(100)]
    head = b"POST /v2/models/busy/infer HTTP/1.1\r\nHost: x\r\nX-Slo"
    for connection in slow:
        await connection.send(head)
    assert (await get(server.http, "/v2/health/live")).status == 200
    assert await infer(server, "busy", 8) == 8
    # An incomplete request counts with its bytes and as no request.
    await until(lambda: admitted(server), lambda found: found == (0, 100 * len(head)))
    for connection in slow:
        connection.reset()
    await until(lambda: admitted(server), lambda found: found == (0, 0))


async def test_a_slow_reader_does_not_block_others(busy: Busy) -> None:
    server = busy.server
    whole = post_bytes(INFER["busy"], busy_json(2, request_id="x" * 8_000)) * 25
    async with await HttpConnection.open(server.http) as connection:

        async def send() -> None:
            for _ in range(20):
                await connection.send(whole)

        sending = asyncio.ensure_future(send())
        for value in range(20):
            assert await infer(server, "busy", value) == value
        for _ in range(500):
            answer = await connection.receive()
            assert answer.status == 200
            assert len(answer.body) > 8_000
        await sending
    await until(lambda: admitted(server), lambda found: found == (0, 0))
