"""Connections of the HTTP door on sockets of the test."""

import asyncio
import socket

from starlette.types import ASGIApp

from headrace.doors.http.asgi import AsgiApplication
from headrace.doors.http.connection import Connection, ServerState
from headrace.engine.admission import Admission


async def accepted(
    client: socket.socket,
    server: socket.socket,
    app: ASGIApp | AsgiApplication,
    admission: Admission | None = None,
) -> Connection:
    """A connection to an application, with a patience of 30 s."""
    application = app if isinstance(app, AsgiApplication) else AsgiApplication(app)
    state = ServerState(application, admission or Admission(0, 0), 75, 30, 60)
    _, connection = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: Connection(state), server
    )
    client.setblocking(False)
    return connection
