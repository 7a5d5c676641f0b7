"""The socket side of a gRPC connection."""

import asyncio
from typing import Any

import pytest

from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.native.connection import GrpcConnection, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
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
