"""Overload: refused at once, while admitted requests are answered."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from headrace.protocol.http2.protocol import DATA, frame
from tests.faults.conftest import IN_PROCESS, Busy
from tests.faults.requests import INFER, busy_message, holding, infer, infer_grpc
from tests.support.busy_model import busy_json
from tests.support.held import Gates
from tests.support.http2_socket import prefixed
from tests.support.raw_clients import (
    HttpConnection,
    call,
    get,
    open_channel,
    open_http2,
    open_stream,
    post,
    post_bytes,
)
from tests.support.server_process import ServerProcess
from tests.support.watching import admitted, metrics, pending, until

MODEL = "held_alone"
LIMIT = 4


@pytest.fixture(scope="module")
def few(repository: Path, gates: Gates) -> Iterator[Busy]:
    options = [IN_PROCESS, f"--max-admitted-requests={LIMIT}"]
    with ServerProcess(repository, options=options) as server:
        yield Busy(server, gates)
        assert server.stop() == 0


@pytest.fixture(scope="module", params=["native"])
def small(request: pytest.FixtureRequest, repository: Path, gates: Gates) -> Iterator[Busy]:
    options = [
        IN_PROCESS, "--max-admitted-bytes=100000", "--max-request-bytes=5000000",
        "--http-body-timeout-secs=3", f"--grpc-transport={request.param}",
    ]  # fmt: skip
    with ServerProcess(repository, options=options) as server:
        yield Busy(server, gates)
        assert server.stop() == 0


async def refused_grpc(started: "grpc.aio.UnaryUnaryCall[bytes, bytes]") -> str:
    """Text of a call refused as UNAVAILABLE."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await started
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


@pytest.mark.parametrize("waiting_over", ["http", "grpc"])
async def test_too_many_requests(few: Busy, waiting_over: str) -> None:
    server = few.server
    overloaded = (await metrics(server))["headrace_overloaded_total"]
    async with open_channel(server.grpc) as channel:
        async with holding(few, MODEL):
            start: Callable[[int], Awaitable[int]] = (
                (lambda n: infer(server, MODEL, n))
                if waiting_over == "http"
                else (lambda n: infer_grpc(channel, MODEL, n))
            )
            waiting = [asyncio.ensure_future(start(n)) for n in range(LIMIT - 1)]
            await until(lambda: pending(server, MODEL), lambda n: n == LIMIT - 1)

            answer = await post(server.http, INFER[MODEL], busy_json(9))
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert b"limit of 4 requests" in answer.body
            text = await refused_grpc(call(channel, "ModelInfer", busy_message(MODEL, 9)))
            assert "limit of 4 requests" in text

            # Refused at once, not after earlier requests; and the server still answers probes.
            assert not any(task.done() for task in waiting)
            assert (await get(server.http, "/v2/health/ready")).status == 200
            assert (await admitted(server))[0] == LIMIT
        assert await asyncio.gather(*waiting) == list(range(LIMIT - 1))
    await until(lambda: admitted(server), lambda found: found == (0, 0))
    assert (await metrics(server))["headrace_overloaded_total"] == overloaded + 2
    assert await infer(server, MODEL, 7) == 7


async def test_too_many_requests_on_a_stream(few: Busy) -> None:
    from headrace.protocol.pb import grpc_service_pb2 as pb

    server = few.server
    refused = (await metrics(server))["headrace_overloaded_total"]
    async with open_channel(server.grpc) as channel:
        stream = open_stream(channel)
        async with holding(few, MODEL):
            for value in range(LIMIT + 3):
                await stream.write(busy_message(MODEL, value))
            await stream.done_writing()
            await until(
                lambda: metrics(server), lambda m: m["headrace_overloaded_total"] == refused + 4
            )
        messages = [pb.ModelStreamInferResponse.FromString(data) async for data in stream]
    texts = [message.error_message for message in messages]
    assert texts[: LIMIT - 1] == [""] * (LIMIT - 1)
    assert all("limit of 4 requests" in text for text in texts[LIMIT - 1 :])
    assert len(texts) == LIMIT + 3
    await until(lambda: admitted(server), lambda found: found == (0, 0))


async def test_too_many_bytes(small: Busy) -> None:
    server = small.server
    padded = busy_json(2) + b" " * 60_000
    async with open_channel(server.grpc) as channel:
        async with holding(small, MODEL):
            waiting = asyncio.ensure_future(post(server.http, INFER[MODEL], padded))
            await until(lambda: pending(server, MODEL), lambda n: n == 1)

            answer = await post(server.http, INFER[MODEL], padded)
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert b"limit of 100000 bytes" in answer.body
            large = busy_message(MODEL, 3) + b"\x1a\xe0\xd4\x03" + b"x" * 60_000  # id
            text = await refused_grpc(call(channel, "ModelInfer", large))
            assert "limit of 100000 bytes" in text
            small_one = asyncio.ensure_future(infer(server, MODEL, 4))
            await until(lambda: pending(server, MODEL), lambda n: n == 2)
        assert (await waiting).status == 200
        assert await small_one == 4
    await until(lambda: admitted(server), lambda found: found == (0, 0))


async def test_a_message_refused_before_its_end_costs_no_other_call(small: Busy) -> None:
    """Libraries send long messages in parts, of which the first may come alone."""
    server = small.server
    padded = busy_json(2) + b" " * 60_000
    large = prefixed(busy_message(MODEL, 3) + b"\x1a\xe0\xd4\x03" + b"x" * 60_000)
    async with open_http2(server.grpc) as caller:
        async with holding(small, MODEL):
            waiting = asyncio.ensure_future(post(server.http, INFER[MODEL], padded))
            await until(lambda: pending(server, MODEL), lambda n: n == 1)
            caller.begin(1, prefixed(busy_message(MODEL, 5)), end=True)
            await until(lambda: pending(server, MODEL), lambda n: n == 2)
            for number in (3, 5):
                caller.begin(number, large[:100])
            refused = await caller.statuses(2)
            for number in (3, 5):
                for part in (large[100:16_000], large[16_000:]):
                    for begin in range(0, len(part), 16_000):
                        data = part[begin : begin + 16_000]
                        caller.writer.write(frame(DATA, 0, number, data))
        assert [status for status, _ in refused] == ["14", "14"]
        assert all("limit of 100000 bytes" in text for _, text in refused)
        assert await caller.statuses(1) == [("0", "")]
        assert (await waiting).status == 200
    await until(lambda: admitted(server), lambda found: found == (0, 0))


@pytest.mark.parametrize("small", ["grpcio"], indirect=True)
async def test_too_many_bytes_over_grpcio(small: Busy) -> None:
    server = small.server
    padded = busy_json(2) + b" " * 60_000
    large = busy_message(MODEL, 3) + b"\x1a\xe0\xd4\x03" + b"x" * 60_000
    async with open_channel(server.grpc) as channel:
        async with holding(small, MODEL):
            waiting = asyncio.ensure_future(post(server.http, INFER[MODEL], padded))
            await until(lambda: pending(server, MODEL), lambda n: n == 1)
            text = await refused_grpc(call(channel, "ModelInfer", large))
            assert "limit of 100000 bytes" in text
        assert (await waiting).status == 200
        assert await infer_grpc(channel, MODEL, 4) == 4


async def test_announced_but_unsent_bytes_do_not_affect_others(
    small: Busy,
) -> None:
    server = small.server
    head = f"POST {INFER[MODEL]} HTTP/1.1\r\nHost: test\r\nContent-Length: 90000\r\n\r\n"
    connections = [await HttpConnection.open(server.http) for _ in range(5)]
    for connection in connections:
        await connection.send(head.encode())
    assert await infer(server, MODEL, 4) == 4
    padded = busy_json(2) + b" " * 60_000
    assert (await post(server.http, INFER[MODEL], padded)).status == 200
    for connection in connections:  # after three seconds each
        answer = await connection.receive()
        assert answer.status == 408
        assert b"no more of the request came for 3 s" in answer.body
        assert await connection.ended()
        await connection.close()
    await until(lambda: admitted(server), lambda found: found == (0, 0))


@pytest.mark.parametrize("why", ["overload", "no such model"])
async def test_a_request_is_refused_before_its_body(few: Busy, why: str) -> None:
    server = few.server
    path = INFER[MODEL] if why == "overload" else "/v2/models/nobody/infer"
    whole = post_bytes(path, busy_json(2) + b" " * 300_000)
    head, body = whole.split(b"\r\n\r\n", 1)
    async with await HttpConnection.open(server.http) as connection:
        async with holding(few, MODEL):
            waiting = [asyncio.ensure_future(infer(server, MODEL, n)) for n in range(LIMIT - 1)]
            await until(lambda: pending(server, MODEL), lambda n: n == LIMIT - 1)
            await connection.send(head + b"\r\n\r\n" + body[:10])
            answer = await connection.receive()
            assert answer.status == (503 if why == "overload" else 404)
            assert not any(task.done() for task in waiting)
        # A body sent all the same is skipped, and the connection can be used again.
        await connection.send(body[10:])
        await asyncio.gather(*waiting)
        assert (await connection.post(INFER[MODEL], busy_json(3))).status == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"), [([], 90), (["--frontends=1"], 80)], ids=["alone", "front ends"]
)
def test_one_model_leaves_room_for_others(
    repository: Path, gates: Gates, options: list[str], most: int
) -> None:
    """Half of the rest is for clients with few requests, whom front ends do not tell apart."""

    async def scenario(busy: Busy) -> None:
        server = busy.server
        async with open_channel(server.grpc) as channel:
            async with holding(busy, MODEL):
                waiting = [asyncio.ensure_future(infer(server, MODEL, n)) for n in range(most - 1)]
                await until(lambda: pending(server, MODEL), lambda n: n == most - 1)
                answer = await post(server.http, INFER[MODEL], busy_json(9))
                assert answer.status == 503
                assert int(answer.headers["retry-after"]) > 0
                assert b"share of the server's limit of 100 requests" in answer.body
                text = await refused_grpc(call(channel, "ModelInfer", busy_message(MODEL, 9)))
                assert f"model '{MODEL}' is at its share" in text
                assert f"{most} under way (--max-model-share)" in text
                assert await infer(server, "busy", 5) == 5
                assert await infer_grpc(channel, "busy", 6) == 6
                assert not any(task.done() for task in waiting)
            assert await asyncio.gather(*waiting) == list(range(most - 1))
        await until(lambda: admitted(server), lambda found: found == (0, 0))
        assert await infer(server, MODEL, 7) == 7

    options = [IN_PROCESS, "--max-admitted-requests=100", *options]
    with ServerProcess(repository, options=options) as server:
        asyncio.run(scenario(Busy(server, gates)))
        assert server.stop() == 0


async def test_several_requests_on_one_connection_at_once(busy: Busy) -> None:
    async with await HttpConnection.open(busy.server.http) as connection:
        values = range(20)
        await connection.send(
            b"".join(post_bytes(INFER["busy"], busy_json(value)) for value in values)
        )
        for value in values:  # in the order of the requests
            answer = await connection.receive()
            assert answer.status == 200
            assert b'"data":[%d]' % value in answer.body
