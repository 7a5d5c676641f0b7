"""All doors of a server: in its own process or in front ends, and the metrics door."""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from headrace.api.handlers import unary_handlers
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import NAMED
from headrace.build import scraper
from headrace.core import plugins
from headrace.core.limits import Shares
from headrace.doors.clients import ClientDoors, GrpcConfig, HttpConfig
from headrace.doors.door import Door
from headrace.doors.grpc.services import all_handlers
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.infer import CountedApp
from headrace.doors.http.routes import LateApp, late_app
from headrace.doors.http.server import HttpServer, bind, reserve
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.placement.cores import core_limit
from headrace.settings import Settings

log = logging.getLogger(__name__)

Bind = Callable[[str, int, bool], socket.socket]
_LATE_SECS = 1.0  # that a door of another package may take longer than it is told
_METRICS_CONNECTIONS = 128  # far more than scrapers have


class ServerDoors:
    """The open doors; clients' doors are in front ends if there are any, on ports reserved here.

    Expensive modules are imported where they are needed.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._clients = ClientDoors(
            engine.admission,
            settings.max_request_bytes,
            settings.access_log,
            settings.http_rules,
            settings.grpc_rules,
        )
        self._metrics: HttpServer | None = None
        self._supervisor: Any = None  # supervisor of the front ends
        self._others: dict[str, Door] = {}  # of other packages
        self._ports: list[socket.socket] = []  # reserved for front ends

    async def open(self) -> None:
        """Open the doors and print their addresses; raises `OSError`."""
        settings = self._settings
        http = grpc = 0
        front_ends = ""
        if count := settings.frontend_count(core_limit()):
            http, grpc = await self._open_front_ends(count)
            front_ends = f"{count} front end{'s' if count > 1 else ''}"
        else:
            if settings.allow_http:
                http = self._open_http()
            if settings.allow_grpc:
                grpc = await self._open_grpc()
        if settings.allow_http:
            url = f"http://{_host(settings.http_address)}:{http}"
            more = f"; {front_ends}" if front_ends else ""
            print(f"HTTP     {url}  (documentation at {url}/docs{more})")
        if settings.allow_grpc:
            more = f"  ({front_ends})" if front_ends else ""
            print(f"gRPC     {_host(settings.grpc_address)}:{grpc}{more}")
        if settings.allow_metrics:
            port = self._open_metrics()
            print(f"metrics  http://{_host(settings.metrics_address)}:{port}/metrics")
        for given in settings.door:
            name, _, address = given.partition("=")
            print(f"{name:<8} {await self._open_other(name, address)}")
        sys.stdout.flush()

    async def drain(self, seconds: float) -> int:
        """Announce the shutdown to clients; requests in transit are still accepted.

        Front ends finish and close: returns the number of requests still in flight after that.
        """
        others = self._tell_others(lambda door: door.drain(seconds), seconds)
        if self._supervisor is not None:
            left: int
            left, _ = await asyncio.gather(self._supervisor.drain(seconds), others)
            return left
        await asyncio.gather(self._clients.announce(seconds), others)
        return 0

    def renew_tls(self) -> None:
        """Read certificate and key again, for new connections; raises `OSError`."""
        if self._supervisor is not None:
            if (tls := self._settings.tls) is not None:
                tls.context()  # which says what is wrong with the files
            self._supervisor.renew_tls()
        self._clients.renew_tls()

    def change_rules(self, http: HeaderRules, grpc: HeaderRules) -> None:
        """Apply header rules to all further requests, also of open connections."""
        self._clients.change_rules(http, grpc)
        if self._supervisor is not None:
            self._supervisor.change_rules(http, grpc)

    def end_unfinished(self) -> None:
        """Abandon incomplete requests."""
        self._clients.end_unfinished()
        if self._metrics is not None:
            self._metrics.end_unfinished()

    async def close(self, grace: float) -> None:
        """Close every door; requests in flight have `grace` seconds."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        for port in self._ports:
            port.close()
        await self._tell_others(lambda door: door.close(grace), grace)
        await self._clients.close(grace, *(() if self._metrics is None else (self._metrics,)))

    # --- of other packages

    async def _open_other(self, name: str, address: str) -> str:
        """Open a door that a package declares; returns its address, raises `OSError`."""
        plugin = plugins.installed(plugins.DOORS).get(name)
        if plugin is None:
            raise OSError(f"--door {name}={address}: no installed package has a door '{name}'")
        door: Door | Exception = plugin.try_to(lambda make: make(self._engine))
        if isinstance(door, Exception):
            raise OSError(f"--door {name}={address}: {door}") from door
        self._others[name] = door  # closed even if it does not open
        try:
            for operation in door.operations:
                self._engine.admission.answers.of(name, NAMED[operation].counted)
            return await door.open(address)
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("bug in the door %s", name)
            raise OSError(f"--door {name}={address}: {error}") from error

    async def _tell_others(self, tell: Callable[[Door], Awaitable[None]], seconds: float) -> None:
        """Call a method of each, at once; one that fails or hangs does not disturb the shutdown."""

        async def one(name: str, door: Door) -> None:
            try:
                async with asyncio.timeout(seconds + _LATE_SECS):
                    await tell(door)
            except Exception:
                log.exception("bug in the door %s", name)

        await asyncio.gather(*(one(*each) for each in self._others.items()))

    # --- in this process

    def _open_http(self) -> int:
        engine, config = self._engine, self._http_config()
        limit, rules = self._settings.max_request_bytes, self._clients.http_rules
        app = late_app(engine, limit, rules, inference_routes(engine, limit, rules))
        return self._clients.open_http(config, self._listen("HTTP"), app, engine)

    async def _open_grpc(self) -> int:
        settings, engine = self._settings, self._engine
        limit, config = settings.max_request_bytes, self._grpc_config()
        rules = self._clients.grpc_rules
        unary = unary_handlers(engine, limit)
        handlers = all_handlers(engine, engine, unary, engine.readiness, limit, rules)
        listener: socket.socket | None = self._listen("gRPC")
        if config.transport != "native" and listener is not None:
            listener.close()  # grpcio alone cannot explain why a port is refused
            listener = None
        return await self._clients.open_grpc(config, listener, handlers, settings.reuse_grpc_port)

    def _open_metrics(self) -> int:
        """Open the metrics door; returns its port."""
        settings, engine = self._settings, self._engine

        def build() -> ASGIApp:
            # Imports prometheus_client: 20 ms and 4 MB.
            from headrace.doors.http.routes import create_metrics_app
            from headrace.engine.metrics import CONTENT_TYPE

            return create_metrics_app(scraper(settings, engine), CONTENT_TYPE)

        self._metrics = server = HttpServer(
            LateApp([], build), self._listen("metrics"), settings.http_keep_alive_secs,
            settings.http_body_timeout_secs,
            admission=Admission(0, 0, Shares(connections=_METRICS_CONNECTIONS)),
        )  # fmt: skip
        server.start()
        engine.metrics_at = settings.metrics_address, server.port
        return server.port

    def _listen(self, door: str, how: Bind = bind) -> socket.socket:
        """Bind a door's socket; raises `OSError` that names the door."""
        settings = self._settings
        address, port, shared = {
            "HTTP": (settings.http_address, settings.http_port, settings.reuse_http_port),
            "gRPC": (settings.grpc_address, settings.grpc_port, settings.reuse_grpc_port),
            "metrics": (settings.metrics_address, settings.metrics_port, False),
        }[door]
        try:
            return how(address, port, shared)
        except OSError as error:
            why = error.strerror
            raise OSError(f"cannot listen on {address}:{port} for {door}: {why}") from None

    # --- in front ends

    async def _open_front_ends(self, count: int) -> tuple[int, int]:
        """Start front ends with the HTTP and gRPC doors; returns the ports, 0 for closed ones."""
        settings, engine = self._settings, self._engine
        limit = settings.max_request_bytes
        http = grpc = None
        if (tls := settings.tls) is not None:
            tls.context()  # which says what is wrong with the files
        if settings.allow_http:
            http = replace(self._http_config(), port=self._keep("HTTP"))
        if settings.allow_grpc:
            grpc = replace(self._grpc_config(), port=self._keep("gRPC"))
        app = CountedApp(
            late_app(engine, limit, self._clients.http_rules), engine.admission.answers, False
        )
        make = plugins.part("frontends")
        self._supervisor = make(
            engine, app, unary_handlers(engine, limit), count, http, grpc, limit,
            settings.max_admitted_requests, settings.max_admitted_bytes, engine.admission.shares,
            settings.max_response_bytes, settings.max_object_bytes,
            settings.access_log, settings.http_rules, settings.grpc_rules, engine.logs.settings,
        )  # fmt: skip
        await self._supervisor.start()
        return http.port if http else 0, grpc.port if grpc else 0

    def _http_config(self) -> HttpConfig:
        settings = self._settings
        return HttpConfig(
            settings.http_address, settings.http_port, settings.http_fast_path,
            settings.http_keep_alive_secs, settings.http_body_timeout_secs,
            settings.http_max_connection_age_secs, settings.progress_timeout_secs,
        )  # fmt: skip

    def _grpc_config(self) -> GrpcConfig:
        settings = self._settings
        return GrpcConfig(
            settings.grpc_address, settings.grpc_port, settings.grpc_transport,
            settings.grpc_options, settings.tls,
        )  # fmt: skip

    def _keep(self, door: str) -> int:
        """Reserve a port for the front ends; returns its number."""
        self._ports.append(self._listen(door, reserve))
        number: int = self._ports[-1].getsockname()[1]
        return number


def _host(address: str) -> str:
    """An address in the form that precedes a port."""
    return f"[{address}]" if ":" in address else address
