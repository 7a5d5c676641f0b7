"""Connections held until a server is ready, then passed on byte by byte.

`Activator` listens on several ports, each for one port of the servers. While a connection whose
first request has begun has no server, it counts as `waiting`: that is what an autoscaler reads to
start one. Nothing more is read from a held connection, so a client is bounded by what the sockets'
buffers take. Owned by the event loop.
"""

import asyncio
import logging
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.plugins.activator.opening import Opening

log = logging.getLogger(__name__)

_CHUNK = 64 << 10
_IDLE_SECS = 60  # for the first bytes of a request
_CONNECT_SECS = 5
_PAUSE = 0.1  # seconds between looks for a server
_FRESH_SECS = 1.0  # for which a ready server needs no other look
_TOO_LATE = b'{"error":"no server has become ready"}'
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_TOO_LATE), _TOO_LATE)
)


class Forward(NamedTuple):
    """A port to listen on, and where its connections go."""

    address: str
    port: int
    host: str
    to: int


@dataclass(slots=True, eq=False)
class Tally:
    """Numbers of connections: now waiting, now passed on, and so far passed on and given up."""

    waiting: int = 0
    open: int = 0
    passed_on: int = 0
    given_up: int = 0
    refused: int = 0

    def collect(self) -> Iterable[Metric]:
        """The metrics; as prometheus-client's collectors."""
        yield GaugeMetricFamily(
            "headrace_activator_waiting", "Connections that wait for a server", self.waiting
        )
        yield GaugeMetricFamily(
            "headrace_activator_connections", "Connections passed on to a server", self.open
        )
        for name, text, value in (
            ("passed_on", "Connections passed on so far", self.passed_on),
            ("given_up", "Connections closed since no server was ready in time", self.given_up),
            ("refused", "Connections closed at the limit of connections", self.refused),
        ):
            yield CounterMetricFamily(f"headrace_activator_{name}", text, value)


class Activator:
    """Listens, holds connections until a server is ready, and passes them on."""

    def __init__(
        self, forwards: Iterable[Forward], ready: str, wait_secs: float, most: int
    ) -> None:
        """`ready` is the URL that a server answers with 200 when it is ready; "" for the first
        connection that it takes. At most `most` connections are open or waiting.
        """
        self.tally = Tally()
        self._forwards = list(forwards)
        self._ready = urlsplit(ready)
        self._wait_secs = wait_secs
        self._most = most
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._ready_until = 0.0

    async def open(self) -> list[str]:
        """Listen; returns the addresses. Raises `OSError`."""
        for forward in self._forwards:

            def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Forward = forward
            ) -> None:
                task = asyncio.create_task(self._serve(reader, writer, to))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            self._servers.append(
                await asyncio.start_server(accept, forward.address, forward.port, limit=_CHUNK)
            )
        return ["{}:{}".format(*s.sockets[0].getsockname()[:2]) for s in self._servers]

    async def close(self, grace: float) -> None:
        """Accept no more; connections have `grace` seconds to end by themselves."""
        for server in self._servers:
            server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()

    # --- one connection

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forward: Forward
    ) -> None:
        try:
            if len(self._tasks) > self._most:
                self.tally.refused += 1
                return
            opening = await self._begun(reader, writer)
            if opening is None:
                return
            upstream = await self._upstream(forward)
            if upstream is None:
                self.tally.given_up += 1
                if opening.http1:
                    writer.write(_UNAVAILABLE)
                    await writer.drain()
                return
            await self._pass_on(opening, reader, writer, *upstream)
        except OSError as error:
            log.debug("a connection ended: %s", error)
        finally:
            await _end(writer)

    async def _begun(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Opening | None:
        """The first bytes of a client, once they begin a request; None if they never do."""
        opening = Opening()
        while not opening.begun:
            try:
                async with asyncio.timeout(_IDLE_SECS):
                    data = await reader.read(_CHUNK)
            except TimeoutError:
                return None
            if not data:
                return None
            writer.write(opening.take(data))
        return opening

    async def _upstream(
        self, forward: Forward
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to a server that is ready; None if there is none in time."""
        self.tally.waiting += 1
        try:
            async with asyncio.timeout(self._wait_secs):
                while True:
                    await self._until_ready(forward)
                    try:
                        return await _connected(forward.host, forward.to)
                    except OSError:
                        self._ready_until = 0.0  # it has gone again
                        await asyncio.sleep(_PAUSE)
        except TimeoutError:
            log.warning("no server at %s:%d was ready in time", forward.host, forward.to)
            return None
        finally:
            self.tally.waiting -= 1

    async def _until_ready(self, forward: Forward) -> None:
        """Wait for a ready server; one task looks for it, however many connections wait."""
        if asyncio.get_running_loop().time() < self._ready_until:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(forward))
        await asyncio.shield(self._looking)

    async def _look(self, forward: Forward) -> None:
        """Look for a server until one is ready, or nobody waits any more."""
        while self.tally.waiting:
            try:
                async with asyncio.timeout(_CONNECT_SECS):
                    found = await self._is_ready(forward)
            except (OSError, TimeoutError):
                found = False
            if found:
                self._ready_until = asyncio.get_running_loop().time() + _FRESH_SECS
                return
            await asyncio.sleep(_PAUSE)

    async def _is_ready(self, forward: Forward) -> bool:
        host, port = self._ready.hostname or forward.host, self._ready.port or forward.to
        reader, writer = await asyncio.open_connection(host, port)
        try:
            if not self._ready.hostname:
                return True
            path = self._ready.path or "/"
            ask = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            writer.write(ask.encode())
            return b" 200 " in await reader.readline()
        finally:
            await _end(writer)

    async def _pass_on(
        self,
        opening: Opening,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        their_reader: asyncio.StreamReader,
        their_writer: asyncio.StreamWriter,
    ) -> None:
        """Copy in both directions until the server ends, or the client leaves."""
        self.tally.open += 1
        self.tally.passed_on += 1
        try:
            their_writer.write(opening.for_server())
            outward = asyncio.create_task(_copy(reader, their_writer))
            try:
                await _copy(their_reader, writer)
            finally:
                outward.cancel()
                await asyncio.gather(outward, return_exceptions=True)
        finally:
            self.tally.open -= 1
            await _end(their_writer)


async def _connected(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(_CONNECT_SECS):
            return await asyncio.open_connection(host, port, limit=_CHUNK)
    except TimeoutError:
        raise OSError(f"{host}:{port} does not answer") from None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, and pass that on; a broken connection closes the other one."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def serve(
    forwards: Sequence[Forward], ready: str, wait_secs: float, most: int,
    metrics: tuple[str, int], grace: float,
) -> None:  # fmt: skip
    """Run an `Activator` until SIGTERM or SIGINT, with metrics at this address; see `Activator`.

    Prints the addresses. Raises `OSError`.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    asyncio.run(_run(Activator(forwards, ready, wait_secs, most), forwards, metrics, grace))


async def _run(
    activator: Activator, forwards: Sequence[Forward], metrics: tuple[str, int], grace: float
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    registry = CollectorRegistry()
    registry.register(activator.tally)
    server, _ = start_http_server(metrics[1], metrics[0], registry)
    try:
        for address, forward in zip(await activator.open(), forwards, strict=True):
            print(f"{address} -> {forward.host}:{forward.to}", flush=True)
        print(f"metrics {metrics[0]}:{server.server_port}", flush=True)
        await ended.wait()
        await activator.close(grace)
    finally:
        server.shutdown()
        server.server_close()
