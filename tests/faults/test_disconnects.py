"""Clients that disconnect at every point of a request leave nothing behind."""

import asyncio

import grpc
import pytest

from tests.faults.conftest import Busy
from tests.faults.requests import INFER, busy_message, closed_gate, holding, infer, infer_grpc
from tests.support.busy_model import busy_json
from tests.support.raw_clients import (
    HttpConnection,
    call,
    code_of,
    get,
    open_channel,
    open_stream,
    post_bytes,
)
from tests.support.server_process import ServerProcess
from tests.support.transports import over_both_transports
from tests.support.watching import admitted, failures, incoming, metrics, pending, statistics, until

MODEL = "held_alone"  # one request per execution, to count the executed ones


async def run_count(server: ServerProcess) -> int:
    found = await statistics(server, MODEL)
    return int(found["execution_count"])


async def cancelled(server: ServerProcess) -> float:
    """Number of the model's requests cancelled by their clients."""
    return await failures(server, MODEL, "CANCELED")


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_http_client_disconnects_while_queued(busy: Busy, ending: str) -> None:
    server = busy.server
    runs, dropped = await run_count(server), await cancelled(server)
    async with holding(busy, MODEL):
        connection = await HttpConnection.open(server.http)
        await connection.send(post_bytes(INFER[MODEL], busy_json(2)))
        await until(lambda: pending(server, MODEL), lambda n: n == 1)
        if ending == "reset":
            connection.reset()
        else:
            await connection.close()
        # While the earlier request still runs.
        await until(lambda: cancelled(server), lambda n: n == dropped + 1)
        assert await pending(server, MODEL) == 0
        assert await run_count(server) == runs
    assert await run_count(server) == runs + 1


async def test_http_client_disconnects_while_its_request_runs(busy: Busy) -> None:
    server = busy.server
    dropped = await cancelled(server)
    connection = await HttpConnection.open(server.http)
    with closed_gate(busy.gates) as number:
        await connection.send(post_bytes(INFER[MODEL], busy_json(number)))
        await until(lambda: admitted(server), lambda found: found[0] == 1)
        await connection.close()
        await until(lambda: cancelled(server), lambda n: n == dropped + 1)
    assert await infer(server, MODEL, 5) == 5


@over_both_transports("shared_server")
@pytest.mark.parametrize("ending", ["cancel", "deadline", "close"])
async def test_grpc_client_disconnects_while_queued(busy: Busy, ending: str) -> None:
    server = busy.server
    runs, dropped = await run_count(server), await cancelled(server)
    timeout = 3 if ending == "deadline" else None  # time for the call to arrive
    async with holding(busy, MODEL):
        channel = open_channel(server.grpc)
        await channel.channel_ready()
        started = call(channel, "ModelInfer", busy_message(MODEL, 2), timeout)
        waiting = asyncio.ensure_future(code_of(started))
        if ending != "deadline":
            await until(lambda: pending(server, MODEL), lambda n: n == 1)
        if ending == "cancel":
            started.cancel()
        elif ending == "close":
            await channel.close()
        await until(lambda: cancelled(server), lambda n: n == dropped + 1)
        assert await pending(server, MODEL) == 0
        if ending == "deadline":
            assert await waiting is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            await asyncio.wait([waiting])
            assert waiting.cancelled() or isinstance(waiting.exception(), BaseException)
        await channel.close()
        assert await run_count(server) == runs
    assert await run_count(server) == runs + 1


@over_both_transports("shared_server")
async def test_grpc_deadline_passes_while_its_request_runs(busy: Busy) -> None:
    server = busy.server
    dropped = await cancelled(server)
    async with open_channel(server.grpc) as channel:
        await channel.channel_ready()
        with closed_gate(busy.gates) as number:
            message = busy_message(MODEL, number)
            code = await code_of(call(channel, "ModelInfer", message, timeout=3))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: cancelled(server), lambda n: n == dropped + 1)
        assert await infer_grpc(channel, MODEL, 5) == 5


@over_both_transports("shared_server")
async def test_a_stream_is_cancelled_with_its_queued_requests(busy: Busy) -> None:
    server = busy.server
    runs, dropped = await run_count(server), await cancelled(server)
    async with holding(busy, MODEL):
        channel = open_channel(server.grpc)
        stream = open_stream(channel)
        for value in range(5):
            await stream.write(busy_message(MODEL, value))
        await until(lambda: pending(server, MODEL), lambda n: n == 5)
        stream.cancel()
        await until(lambda: cancelled(server), lambda n: n == dropped + 5)
        await channel.close()
    assert await run_count(server) == runs + 1


@pytest.mark.parametrize(("length", "ending"), [("known", "close"), ("chunked", "reset")])
async def test_http_client_disconnects_in_its_body(busy: Busy, length: str, ending: str) -> None:
    server = busy.server
    runs = await run_count(server)
    whole = post_bytes(INFER[MODEL], busy_json(2))
    head, body = whole.split(b"\r\n\r\n", 1)
    if length == "chunked":
        head = head.rpartition(b"\r\n")[0] + b"\r\nTransfer-Encoding: chunked"
        body = b"%x\r\n%b\r\n" % (len(body), body)
    connection = await HttpConnection.open(server.http)
    await connection.send(head + b"\r\n\r\n" + body[:20])
    await until(lambda: incoming(server), lambda found: found == 1)
    assert (await admitted(server))[0] == 0  # an incomplete request takes no place
    if ending == "reset":
        connection.reset()
    else:
        await connection.close()
    await until(lambda: incoming(server), lambda found: found == 0)
    await until(lambda: admitted(server), lambda found: found == (0, 0))
    assert await run_count(server) == runs


def test_many_connections_are_reset_at_every_point(busy: Busy) -> None:
    whole = post_bytes(INFER[MODEL], busy_json(3))
    points = range(0, len(whole) + 1, 7)

    async def one(point: int) -> None:
        connection = await HttpConnection.open(busy.server.http)
        await connection.send(whole[:point])
        connection.reset()

    async def scenario() -> None:
        server = busy.server
        for _ in range(5):
            await asyncio.gather(*(one(point) for point in points), infer(server, MODEL, 1))
        await until(lambda: admitted(server), lambda found: found == (0, 0))
        assert (await get(server.http, "/v2/health/ready")).status == 200

    asyncio.run(scenario())


@over_both_transports("shared_server")
def test_many_grpc_channels_are_closed_with_running_calls(busy: Busy) -> None:
    async def one(value: int) -> None:
        channel = open_channel(busy.server.grpc)
        started = call(channel, "ModelInfer", busy_message("busy_alone", value, 200))
        waiting = asyncio.ensure_future(code_of(started))
        if value % 3:
            await channel.channel_ready()
        if value % 3 == 2:
            await started.wait_for_connection()
        await channel.close()
        await asyncio.wait([waiting])

    async def scenario() -> None:
        server = busy.server
        for _ in range(3):
            await asyncio.gather(*(one(value) for value in range(30)))
        await until(lambda: admitted(server), lambda found: found == (0, 0))
        assert (await metrics(server))["headrace_ready"] == 1

    asyncio.run(scenario())
