"""All doors of a server: in its own process or in front ends, and that of the metrics."""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from headrace.doors import bind, grpc_handlers, tls_files, url_host
from headrace.engine.engine import Engine
from headrace.execution.local import core_limit
from headrace.observability.machine import Machine
from headrace.observability.series import GpuSeries
from headrace.settings import Settings
from headrace.transports.grpc.call import Server as GrpcServer
from headrace.transports.grpc.native.server import NativeServer
from headrace.transports.http.generate import inference_routes
from headrace.transports.http.infer import CountedApp
from headrace.transports.http.routes import LateApp, late_app
from headrace.transports.http.server import FastPath, HttpServer

if TYPE_CHECKING:
    from headrace.front_doors import FrontDoors


class ServerDoors:
    """Opens and closes them."""

    def __init__(
        self, settings: Settings, engine: Engine, gpus: Callable[[], GpuSeries] = GpuSeries
    ) -> None:
        self._gpus = gpus
        self._settings = settings
        self._engine = engine
        self._http: list[HttpServer] = []
        self._grpc: GrpcServer | None = None
        self._clients: list[HttpServer | GrpcServer] = []  # doors of theirs
        self._front_ends: FrontDoors | None = None

    async def open(self) -> None:
        """Answer from now on, and say where; raises `OSError`."""
        # What takes memory and time is imported where it is wanted.
        settings, engine = self._settings, self._engine
        if count := settings.frontend_count(core_limit()):
            from headrace.front_doors import FrontDoors

            self._front_ends = FrontDoors(settings, engine, count)
            await self._front_ends.open()
        if settings.allow_http and not count:
            limit, rules = settings.max_request_bytes, settings.http_rules
            inference = inference_routes(engine, limit, rules)
            app = late_app(engine, limit, rules, inference)
            counted = CountedApp(app, engine.admission.answers, settings.access_log)
            listener = bind(
                settings.http_address, settings.http_port, "HTTP", settings.reuse_http_port
            )
            fast_path = FastPath.by_rules(engine, limit, settings.access_log, rules)
            server = HttpServer(
                counted,
                listener,
                settings.http_keep_alive_secs,
                settings.http_body_timeout_secs,
                fast_path if settings.http_fast_path else None,
                keep_names=bool(settings.http_header_forward_pattern),
                max_age_secs=settings.http_max_connection_age_secs,
                admission=engine.admission,
                read_secs=settings.progress_timeout_secs,
            )
            self._http.append(server)
            self._clients.append(server)
            server.start()
            url = f"http://{url_host(settings.http_address)}:{server.port}"
            print(f"HTTP     {url}  (documentation at {url}/docs)")
        if settings.allow_grpc and not count:
            port = await self._open_grpc()
            print(f"gRPC     {url_host(settings.grpc_address)}:{port}")
        if settings.allow_metrics:
            listener = bind(settings.metrics_address, settings.metrics_port, "metrics")
            server = HttpServer(
                self._metrics_app(),
                listener,
                settings.http_keep_alive_secs,
                settings.http_body_timeout_secs,
            )
            self._http.append(server)
            server.start()
            engine.metrics_at = settings.metrics_address, server.port
            print(f"metrics  http://{url_host(settings.metrics_address)}:{server.port}/metrics")
        sys.stdout.flush()

    def _metrics_app(self) -> LateApp:
        settings, engine = self._settings, self._engine
        interval = settings.metrics_interval_ms / 1000
        machine = Machine(interval_secs=interval) if settings.allow_cpu_metrics else None

        def build() -> ASGIApp:
            # Which imports prometheus_client: 20 ms and 4 MB.
            from headrace.observability.metrics import (
                CONTENT_TYPE,
                ServerCollector,
                process_registry,
                scrape,
            )
            from headrace.transports.http.routes import create_metrics_app

            collector = ServerCollector(
                engine.server_series,
                engine.version_series,
                machine,
                engine.model_metrics,
                settings.metrics,
                engine.traffic.series,
                self._gpus,
            )
            process = process_registry()
            return create_metrics_app(
                lambda: scrape(collector, process, engine.model_metrics.plain_counters),
                CONTENT_TYPE,
            )

        return LateApp([], build)

    async def _open_grpc(self) -> int:
        """Answer over gRPC; the port."""
        settings, engine = self._settings, self._engine
        limit, options = settings.max_request_bytes, settings.grpc_options
        handlers = grpc_handlers(engine, limit, settings.grpc_rules)
        tls = tls_files(settings)
        listener = bind(settings.grpc_address, settings.grpc_port, "gRPC", settings.reuse_grpc_port)
        if settings.grpc_transport == "native":
            context = tls.context() if tls else None
            native = NativeServer(
                handlers, engine.admission, limit, settings.access_log, context, options
            )
            self._grpc = native
            self._clients.append(native)
            await native.start(listener)
            return int(listener.getsockname()[1])
        listener.close()  # only grpcio cannot say why it cannot have a port
        from headrace.transports.grpc.grpcio import GrpcioServer

        server = GrpcioServer(
            handlers,
            engine.admission,
            limit,
            settings.access_log,
            options,
            settings.reuse_grpc_port,
        )
        self._grpc = server
        self._clients.append(server)
        port = server.bind(settings.grpc_address, settings.grpc_port, tls)
        await server.start()
        return port

    async def drain(self, seconds: float) -> int:
        """Have clients go elsewhere; what they have sent is still taken.

        Front ends finish and close: returns how many requests were still under way after that.
        """
        if self._front_ends is not None:
            return await self._front_ends.drain(seconds)
        await asyncio.gather(*(door.announce(seconds) for door in self._clients))
        return 0

    def end_unfinished(self) -> None:
        """Give up requests that are half there."""
        for server in self._http:
            server.end_unfinished()

    async def close(self, grace: float) -> None:
        """Close every door; what is under way has `grace` seconds."""
        if self._front_ends is not None:
            await self._front_ends.stop()
        if self._grpc is not None:
            await self._grpc.stop(grace)
        await asyncio.gather(*(server.stop(grace) for server in self._http))
