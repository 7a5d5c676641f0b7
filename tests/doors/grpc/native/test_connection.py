"""The socket side of a gRPC connection."""

import asyncio
from typing import Any

from headrace.doors.grpc.call import Handlers
from headrace.doors.grpc.native.connection import GrpcConnection, ServerContext
from headrace.doors.grpc.options import GrpcOptions
from headrace.engine.admission import Admission
from headrace.protocol.http2.protocol import Limits
from tests.doors.fakes import Transport


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
