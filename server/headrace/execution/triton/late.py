"""Tritons that this server starts, made when the first model asks for them, and imported then."""

import asyncio
from threading import Lock
from typing import TYPE_CHECKING

from headrace.execution.triton.options import TritonOptions

if TYPE_CHECKING:
    from headrace.execution.triton.servers import TritonServers


class LateTritons:
    """`attach` it to the event loop before a model is loaded, and `close` it there at the end."""

    def __init__(self, options: TritonOptions) -> None:
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: TritonServers | None = None
        self._lock = Lock()  # models load beside one another
        self._stopped = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Processes belong to this loop."""
        self._loop = loop

    def servers(self) -> "TritonServers":
        """All of them. On a loading thread."""
        from headrace.execution.triton.servers import TritonServers

        with self._lock:
            if self._servers is None:
                self._servers = TritonServers(self._options)
                if self._loop is not None:
                    self._servers.attach(self._loop)
                if self._stopped:
                    self._servers.stop()
            return self._servers

    def stop(self) -> None:
        """Load nothing more, and unload nothing: the processes end soon."""
        with self._lock:
            self._stopped = True
            if self._servers is not None:
                self._servers.stop()

    async def close(self) -> None:
        """End all processes, and remove the directory that they have seen."""
        self.stop()
        if self._servers is not None:
            await self._servers.close()
