"""The doors of clients in front ends, as the engine's process opens them."""

import socket

from headrace.api.handlers import unary_handlers
from headrace.doors import bind, tls_files, url_host
from headrace.engine.engine import Engine
from headrace.frontends.calls import EngineCalls
from headrace.frontends.config import FrontendConfig, GrpcConfig, HttpConfig
from headrace.frontends.supervisor import Supervisor
from headrace.settings import Settings
from headrace.transports.http import server
from headrace.transports.http.infer import CountedApp
from headrace.transports.http.routes import late_app


class FrontDoors:
    """The doors of clients, in processes of their own; their ports are kept here."""

    def __init__(self, settings: Settings, engine: Engine, count: int) -> None:
        self._settings = settings
        self._engine = engine
        self._count = count
        self._ports: list[socket.socket] = []
        self._supervisor: Supervisor | None = None

    async def open(self) -> None:
        """Answer from now on, and say where; raises `OSError`."""
        settings, engine = self._settings, self._engine
        app = CountedApp(
            late_app(engine, settings.max_request_bytes, settings.http_rules),
            engine.admission.answers,
            False,
        )
        calls = EngineCalls(app, unary_handlers(engine, settings.max_request_bytes))
        config = self._config()
        self._supervisor = Supervisor(engine, calls, config, self._count, self._on_change)
        supervisor = self._supervisor
        engine.logs.listeners.append(supervisor.apply_logs)
        engine.logs.drops.append(lambda: supervisor.unlogged)
        engine.traffic.watch_headers(self._supervisor.want_routed)
        engine.tracing.watch_contexts(self._supervisor.want_contexts)
        engine.forwarded_headers.watch(self._supervisor.want_forwarded)
        engine.readiness.watch(self._tell_ready)
        self._tell_ready()
        await self._supervisor.start()
        what = f"{self._count} front end{'s' if self._count > 1 else ''}"
        if (http := config.http) is not None:
            url = f"http://{url_host(http.address)}:{http.port}"
            print(f"HTTP     {url}  (documentation at {url}/docs; {what})")
        if (grpc := config.grpc) is not None:
            print(f"gRPC     {url_host(grpc.address)}:{grpc.port}  ({what})")

    async def drain(self, seconds: float) -> int:
        """Finish and close; how many requests were still under way after `seconds`."""
        return await self._supervisor.drain(seconds) if self._supervisor else 0

    async def stop(self) -> None:
        """Close at once what is still open."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        for port in self._ports:
            port.close()

    def _on_change(self, reachable: bool) -> None:
        self._engine.readiness.set_reachable(reachable)

    def _tell_ready(self) -> None:
        if self._supervisor is not None:
            self._supervisor.tell_ready(self._engine.ready)

    def _keep(self, address: str, port: int, what: str, shared: bool) -> int:
        """Keep a port for the front ends; its number."""
        self._ports.append(bind(address, port, what, shared, server.reserve))
        number: int = self._ports[-1].getsockname()[1]
        return number

    def _config(self) -> FrontendConfig:
        settings = self._settings
        http = grpc = None
        if (tls := tls_files(settings)) is not None:
            tls.context()  # which says what is wrong with the files
        if settings.allow_http:
            port = self._keep(
                settings.http_address, settings.http_port, "HTTP", settings.reuse_http_port
            )
            http = HttpConfig(
                settings.http_address, port, settings.http_fast_path,
                settings.http_keep_alive_secs, settings.http_body_timeout_secs,
                settings.http_max_connection_age_secs, settings.progress_timeout_secs,
                settings.http_rules,
            )  # fmt: skip
        if settings.allow_grpc:
            port = self._keep(
                settings.grpc_address, settings.grpc_port, "gRPC", settings.reuse_grpc_port
            )
            grpc = GrpcConfig(
                settings.grpc_address, port, settings.grpc_transport, settings.grpc_rules,
                settings.grpc_options, tls,
            )  # fmt: skip
        return FrontendConfig(
            http, grpc, settings.max_request_bytes, settings.max_admitted_requests,
            settings.max_admitted_bytes, self._engine.admission.shares, settings.access_log,
            self._engine.logs.settings,
        )  # fmt: skip
