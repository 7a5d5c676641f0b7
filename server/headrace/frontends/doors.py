"""The doors of a front end, which share their ports with those of the others."""

import asyncio

from headrace.engine.admission import Admission
from headrace.frontends.config import FrontendConfig, GrpcConfig, HttpConfig
from headrace.frontends.forward import forwarding_app, forwarding_handler
from headrace.frontends.remote import EngineLink, RemoteEngine
from headrace.transports.grpc.call import Handlers, Server
from headrace.transports.grpc.categories import restricted
from headrace.transports.grpc.health import watch_handlers
from headrace.transports.grpc.native.server import NativeServer
from headrace.transports.grpc.procedures import (
    CHECK,
    DOCUMENT_PROCEDURES,
    HEALTH,
    INFERENCE,
    TRAFFIC,
    TRAFFIC_PROCEDURES,
)
from headrace.transports.grpc.reflection import reflection_handlers, reflection_services
from headrace.transports.grpc.service import infer_handlers
from headrace.transports.grpc.stream import stream_handlers
from headrace.transports.http.access import CountedApp
from headrace.transports.http.categories import inference_routes
from headrace.transports.http.server import FastPath, HttpServer, bind
from headrace.wire.header_rules import HeaderRules
from headrace.wire.link_frames import Flag


class Doors:
    """Opens and closes them."""

    def __init__(self, config: FrontendConfig, link: EngineLink, admission: Admission) -> None:
        self._config = config
        self._link = link
        self._admission = admission
        self._http: HttpServer | None = None
        self._grpc: Server | None = None

    async def open(self) -> None:
        """Answer from now on; raises `OSError`."""
        if self._config.http is not None:
            self._open_http(self._config.http)
        if self._config.grpc is not None:
            await self._open_grpc(self._config.grpc)

    def end_unfinished(self) -> None:
        """Give up requests that are half there."""
        if self._http is not None:
            self._http.end_unfinished()

    async def announce(self, grace: float) -> None:
        """Have clients go elsewhere; what they have sent is still taken."""
        doors = [door for door in (self._http, self._grpc) if door is not None]
        await asyncio.gather(*(door.announce(grace) for door in doors))

    async def close(self, grace: float) -> None:
        """Close them; what is under way has `grace` seconds."""
        if self._grpc is not None:
            await self._grpc.stop(grace)
        if self._http is not None:
            await self._http.stop(grace)

    def _open_http(self, http: HttpConfig) -> None:
        config = self._config
        entrance = RemoteEngine(self._link, self._admission, Flag.HTTP)
        generate = RemoteEngine(self._link, self._admission, Flag.GENERATE)
        limit, rules = config.max_request_bytes, http.rules
        routes = inference_routes(entrance, limit, rules, generate)
        app = forwarding_app(self._link, routes)
        fast_path = FastPath.by_rules(entrance, limit, config.access_log, rules)
        self._http = HttpServer(
            CountedApp(app, self._admission.answers, config.access_log),
            bind(http.address, http.port, shared=True),
            http.keep_alive_secs,
            http.body_timeout_secs,
            fast_path if http.fast_path else None,
            keep_names=bool(rules.forward),
            max_age_secs=http.max_age_secs,
            admission=self._admission,
            read_secs=http.read_secs,
        )
        self._http.start()

    async def _open_grpc(self, grpc: GrpcConfig) -> None:
        config, admission = self._config, self._admission
        limit = config.max_request_bytes
        handlers = restricted(self._handlers(limit, grpc.rules), grpc.rules.keys())
        if grpc.transport == "native":
            context = grpc.tls.context() if grpc.tls else None
            native = NativeServer(
                handlers, admission, limit, config.access_log, context, grpc.options
            )
            self._grpc = native
            await native.start(bind(grpc.address, grpc.port, shared=True))
            return
        # Imported here because it takes memory and time, and few want it.
        from headrace.transports.grpc.grpcio import GrpcioServer

        server = GrpcioServer(
            handlers, admission, limit, config.access_log, grpc.options, shared=True
        )
        self._grpc = server
        server.bind(grpc.address, grpc.port, grpc.tls)
        await server.start()

    def _handlers(self, limit: int, rules: HeaderRules) -> Handlers:
        link, admission, pattern = self._link, self._admission, rules.pattern()
        paths = (*DOCUMENT_PROCEDURES, *TRAFFIC_PROCEDURES, CHECK)
        unary = {path: forwarding_handler(link, path) for path in paths}
        return Handlers(
            direct=infer_handlers(RemoteEngine(link, admission, Flag.UNARY), limit, pattern),
            unary=unary,
            server_stream=watch_handlers(link.readiness, admission),
            bidi_stream=reflection_handlers((INFERENCE, TRAFFIC, HEALTH, *reflection_services())),
            sessions=stream_handlers(RemoteEngine(link, admission, 0), limit, pattern=pattern),
        )
