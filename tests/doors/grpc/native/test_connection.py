"""The socket side of a gRPC connection."""

import asyncio
from collections import Counter
from time import sleep
from typing import Any

import h2.config
import h2.connection
import pytest

from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.native.calls import TaskRpc
from headrace.doors.grpc.native.connection import GrpcConnection, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.protocol.grpc import pack_prefix
from headrace.protocol.http2.keep_alive import KeepAlive
from headrace.protocol.http2.protocol import ErrorCode, Limits
from tests.doors.fakes import Transport, until


async def test_writes_to_a_lost_connection_are_dropped() -> None:
    """Nor does it keep other connections from being written to in the same turn of the loop."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
    context = ServerContext(
        {}, Handlers({}, {}, {}), Admission(1, 1), 1, False, GrpcOptions(), Limits()
    )
    gone, there = Transport(), Transport()
    connections = []
    for transport in (gone, there):
        connections.append(GrpcConnection(context))
        connections[-1].connection_made(transport)
    gone.closed = True
    connections[0].connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    connections[1].connection_lost(None)
    assert gone.written == []
    assert len(there.written) == 1  # the settings
    assert problems == []


async def test_an_old_connection_is_cut_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its client takes to read what was written before."""
    options = GrpcOptions(keep_alive=KeepAlive(age=0.001, grace=0.001))
    context = ServerContext({}, Handlers({}, {}, {}), Admission(1, 1), 1, False, options, Limits())
    connection, transport = GrpcConnection(context), Transport()
    connection.connection_made(transport)
    ends: list[ErrorCode] = []
    fail = connection.http2.fail

    def counted(code: ErrorCode, text: str = "") -> None:
        ends.append(code)
        fail(code, text)

    monkeypatch.setattr(connection.http2, "fail", counted)
    await until(lambda: transport.closed)
    for _ in range(20):
        await asyncio.sleep(0)
    assert ends == [ErrorCode.NO_ERROR]
    connection.connection_lost(None)


_PATH = "/any.Service/Any"


def serving(kind: type[TaskRpc], handle: Any) -> ServerContext:
    """A server of one procedure."""
    return ServerContext(
        {_PATH: (kind, handle)}, Handlers({}, {}, {}), Admission(0, 0), 1 << 20, False,
        GrpcOptions(), Limits(streams=300),
    )  # fmt: skip


def asked(context: ServerContext, calls: int, *fields: tuple[str, str]) -> GrpcConnection:
    """A connection that has received so many calls, with these further headers, in one read."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    for number in range(1, 2 * calls, 2):
        client.send_headers(
            number,
            [
                (":method", "POST"), (":scheme", "http"), (":authority", "here"), (":path", _PATH),
                ("content-type", "application/grpc"), ("te", "trailers"), *fields,
            ],
        )  # fmt: skip
        client.send_data(number, pack_prefix(0, 1) + b"0", end_stream=True)
    sent = client.data_to_send()
    connection = GrpcConnection(context)
    connection.connection_made(Transport())
    connection.get_buffer(-1)[: len(sent)] = sent
    connection.buffer_updated(len(sent))
    return connection


@pytest.mark.parametrize(("clients", "calls"), [(8, 60), (300, 1)])
async def test_calls_at_once_begin_in_turns(clients: int, calls: int) -> None:
    """The first steps of their tasks would all be taken in one turn of the loop otherwise."""
    turn, begun = 0, Counter[int]()

    async def handle(data: Any, call: Any) -> bytes:
        begun[turn] += 1
        return bytes(data)

    context = serving(TaskRpc, handle)
    connections = [asked(context, calls) for _ in range(clients)]
    while begun.total() < clients * calls:
        turn += 1
        await asyncio.sleep(0)
        assert turn < clients * calls
    assert max(begun.values()) < 50
    for connection in connections:
        connection.connection_lost(None)


async def test_calls_whose_time_ends_together_fail_in_turns() -> None:
    turn, ended, calls = 0, Counter[int](), 300

    class Slow(TaskRpc):
        def abandon(self) -> None:
            ended[turn] += 1
            sleep(1e-3)
            super().abandon()

    async def handle(data: Any, call: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    connection = asked(serving(Slow, handle), calls, ("grpc-timeout", "50m"))
    while ended.total() < calls:
        turn += 1
        await asyncio.sleep(0)
    assert max(ended.values()) < 100
    connection.connection_lost(None)
