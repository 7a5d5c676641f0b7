"""uvicorn on a socket of ours, without its signal handling: one process runs several doors."""

import asyncio
import contextlib
import functools
import logging
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import uniform
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headrace.engine.admission import Admission
from headrace.engine.doors import Entrance
from headrace.transports.http.fast import FastProtocol
from headrace.transports.http.heads import Heads
from headrace.transports.http.protocol import BoundedProtocol
from headrace.wire.header_rules import Category, HeaderPattern, HeaderRules, Key

log = logging.getLogger(__name__)

_BACKLOG = 2048
_JITTER = 0.1  # so that not all clients come back at once
_LOOK_SECS = 1.0  # between two looks at what clients have left unfinished
_Factory = Callable[..., BoundedProtocol]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the application's, which stops all doors in order


# The fast path leans on how uvicorn's protocol class works inside; others get the plain route, which
# pyproject.toml keeps from being installed.
TESTED_UVICORN = ((0, 34), (0, 54))  # the first and the last version


@dataclass(frozen=True, slots=True)
class FastPath:
    """What answering infer requests in front of the application needs.

    `pattern` picks the headers that models are told; `key` is what inference asks for.
    """

    engine: Entrance
    max_request_bytes: int
    access_log: bool
    pattern: HeaderPattern | None = None
    key: Key | None = None

    @classmethod
    def by_rules(
        cls, engine: Entrance, max_request_bytes: int, access_log: bool, rules: HeaderRules
    ) -> "FastPath":
        """With what rules for headers say."""
        key = rules.keys().get(Category.INFERENCE)
        return cls(engine, max_request_bytes, access_log, rules.pattern(), key)


class HttpServer:
    """One listening socket that answers with one ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        keep_alive_secs: int,
        patience_secs: int,
        fast_path: FastPath | None = None,
        keep_names: bool = False,
        max_age_secs: int = 0,
        admission: Admission | None = None,
        read_secs: int = 60,
    ) -> None:
        """`patience_secs`: how long the next part of an unfinished request may be awaited.

        `admission` counts connections and what they hold; without it, nothing is bounded by that.
        A client that does not read an answer is hung up on after `read_secs` without progress.

        `keep_names` has the application see the names of headers as they came. A connection is
        closed with the next answer after `max_age_secs`, give or take a tenth; 0 for never.
        """
        made: Any = functools.partial(
            _protocol(fast_path), patience_secs=patience_secs, keep_names=keep_names,
            admission=admission, read_secs=read_secs,
        )  # fmt: skip

        def aging(**given: Any) -> BoundedProtocol:
            connection: BoundedProtocol = made(**given)
            age = max_age_secs * uniform(1 - _JITTER, 1 + _JITTER)
            connection.live_until(connection.loop.time() + age)
            return connection

        # uvicorn calls it like the class that it asks for.
        protocol: Any = aging if max_age_secs else made
        config = uvicorn.Config(
            app,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=keep_alive_secs,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        self._look: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Answer from now on."""
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._listener])
        )
        self._check_time()

    async def stop(self, grace: float) -> None:
        """Close the socket and idle connections; the others have `grace` seconds to be answered.

        What is under way after that is answered with 503.
        """
        if self._task is not None:
            self._server.should_exit = True
            try:
                async with asyncio.timeout(grace):
                    await asyncio.shield(self._task)
            except TimeoutError:
                self._abort()
                await self._task
        if self._look is not None:
            self._look.cancel()

    def end_unfinished(self) -> None:
        """Give up requests that are not there as a whole; called when nothing new is admitted."""
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.end_unfinished()

    def _abort(self) -> None:
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, FastProtocol):
                connection.give_up()
        self._server.force_exit = True

    def _check_time(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.check(now)
                connection.check_age(now)
        self._look = loop.call_later(_LOOK_SECS, self._check_time)


def _protocol(fast_path: FastPath | None) -> _Factory:
    if fast_path is None:
        return BoundedProtocol
    first, last = TESTED_UVICORN
    version = re.match(r"(\d+)\.(\d+)", uvicorn.__version__)
    if version is None or not first <= (int(version[1]), int(version[2])) <= last:
        log.warning(
            "the HTTP fast path was not tested with uvicorn %s;"
            " infer requests take the plain route",
            uvicorn.__version__,
        )
        return BoundedProtocol
    return functools.partial(
        FastProtocol,
        engine=fast_path.engine,
        heads=Heads(fast_path.engine, fast_path.pattern, fast_path.key),
        max_request_bytes=fast_path.max_request_bytes,
        access_log=fast_path.access_log,
    )


def reserve(address: str, port: int, shared: bool = False) -> socket.socket:
    """A socket that keeps a port for listeners that share it, none itself; raises `OSError`.

    Other servers may listen there if it is `shared` with them.
    """
    probe = bind(address, port, shared)  # which is refused where anybody else listens
    name = probe.getsockname()
    probe.close()
    keeper = socket.socket(probe.family, socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        keeper.bind(name[:2])
    except OSError:
        keeper.close()
        raise
    return keeper


def bind(address: str, port: int, shared: bool = False) -> socket.socket:
    """A listening socket, if `shared` one of several on its port; raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)  # now, so that a second door on this port is refused
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
