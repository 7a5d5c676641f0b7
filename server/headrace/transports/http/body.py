"""Large bodies, received straight into their place: the event loop hands no pieces over to copy."""

import asyncio
from typing import Protocol


class Connection(Protocol):
    """Whose body it is."""

    def body_grew(self, nbytes: int) -> bool:
        """`nbytes` more are in their place; whether more are wanted there."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's protocols have it; so are the others."""

    def eof_received(self) -> bool | None:
        """The client sends no more."""

    def pause_writing(self) -> None:
        """The client reads too slowly."""

    def resume_writing(self) -> None:
        """It has caught up."""


class BodyReader(asyncio.BufferedProtocol):
    """Stands in for a connection's protocol until `place` is full."""

    def __init__(self, connection: Connection, place: memoryview) -> None:
        self._connection = connection
        self._place = place

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._place

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        self._place = self._place[nbytes:]
        if not self._connection.body_grew(nbytes):
            # The transport refers to its last reader for as long as the connection lives, which
            # must not keep the body.
            self._place = memoryview(b"")

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
