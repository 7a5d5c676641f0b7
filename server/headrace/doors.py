"""Composition of the doors: what they are made of by the settings, here or in front ends."""

import socket
from collections.abc import Callable

from headrace.engine.engine import Engine
from headrace.frontends.calls import EngineCalls
from headrace.frontends.config import FrontendConfig, GrpcConfig, HttpConfig
from headrace.frontends.host import DOORS
from headrace.frontends.supervisor import Supervisor
from headrace.settings import Settings
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.categories import restricted
from headrace.transports.grpc.health import CHECK, check_handlers, watch_handlers
from headrace.transports.grpc.health import SERVICE as HEALTH
from headrace.transports.grpc.reflection import reflection_handlers, reflection_services
from headrace.transports.grpc.service import SERVICE as INFERENCE
from headrace.transports.grpc.service import document_handlers, infer_handlers
from headrace.transports.grpc.stream import stream_handlers
from headrace.transports.grpc.tls import TlsFiles
from headrace.transports.grpc.traffic import SERVICE as TRAFFIC
from headrace.transports.grpc.traffic import traffic_handlers
from headrace.transports.http import server
from headrace.transports.http.app import create_app
from headrace.wire.header_rules import GRPC_PREFIX, HeaderRules
from headrace.wire.link_frames import Flag


def grpc_handlers(engine: Engine, max_request_bytes: int, rules: HeaderRules) -> Handlers:
    """The handlers of all services, in the engine's process."""
    pattern = rules.pattern()
    services = (INFERENCE, TRAFFIC, HEALTH, *reflection_services())
    check = check_handlers(engine)
    handlers = Handlers(
        direct=infer_handlers(engine.at_door(Flag.UNARY), max_request_bytes, pattern),
        unary=document_handlers(engine, max_request_bytes) | traffic_handlers(engine) | check,
        server_stream=watch_handlers(check[CHECK], engine.admission),
        bidi_stream=reflection_handlers(services),
        sessions=stream_handlers(engine.at_door(0), max_request_bytes, pattern=pattern),
    )
    return restricted(handlers, rules.keys(GRPC_PREFIX))


def tls_files(settings: Settings) -> TlsFiles | None:
    """What gRPC is encrypted with, None if it is not."""
    if not settings.grpc_use_ssl:
        return None
    return TlsFiles(
        settings.grpc_server_cert,
        settings.grpc_server_key,
        settings.grpc_root_cert,
        settings.grpc_use_ssl_mutual,
    )


def bind(
    address: str,
    port: int,
    what: str,
    shared: bool = False,
    how: Callable[[str, int, bool], socket.socket] = server.bind,
) -> socket.socket:
    """A socket for a door, on a port that may be `shared` with other servers.

    Raises `OSError` that says which door cannot have its port.
    """
    try:
        return how(address, port, shared)
    except OSError as error:
        raise OSError(f"cannot listen on {address}:{port} for {what}: {error.strerror}") from None


def url_host(address: str) -> str:
    """An address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


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
        limits = settings.max_request_bytes, settings.http_body_timeout_secs
        app = create_app(engine, *limits, False, settings.http_rules)
        documents = document_handlers(engine, settings.max_request_bytes)
        unary = documents | traffic_handlers(engine) | check_handlers(engine)
        calls = EngineCalls(app, unary)
        config = self._config()
        doors = {door: engine.at_door(door) for door in DOORS}
        self._supervisor = Supervisor(engine, calls, config, self._count, self._on_change, doors)
        engine.logs.listeners.append(self._supervisor.apply_logs)
        engine.traffic.watch_headers(self._supervisor.want_routed)
        engine.tracing.watch_contexts(self._supervisor.want_contexts)
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
        self._engine.reachable = reachable

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
                settings.http_max_connection_age_secs, settings.http_rules,
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
            settings.max_admitted_bytes, settings.access_log, self._engine.logs.settings,
        )  # fmt: skip
