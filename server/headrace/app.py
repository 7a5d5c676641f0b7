"""Composition: the only place where everything is built and connected, and the life of the process.

Start: doors open first, so that probes get answers; then models are loaded; then the server is
ready. End, on SIGTERM or SIGINT: not ready, wait for `shutdown_delay_secs` so that load balancers
notice, admit nothing new, finish what was admitted, close the doors, free the models, exit 0. A
second signal ends at once.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NoReturn

import uvloop

from headrace import __version__
from headrace.backends.onnx import OnnxBackend
from headrace.core.errors import RepositoryError
from headrace.engine.admission import Admission
from headrace.engine.engine import Engine
from headrace.engine.loading import Backend, LoadOptions
from headrace.engine.version import ModelVersion
from headrace.execution.cores import core_limit
from headrace.observability.logs import configure_logging
from headrace.observability.metrics import ServerCollector, registry, render
from headrace.repository.layout import ModelSource, nothing_in, scan, single_file
from headrace.settings import Settings
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.grpcio import GrpcioServer
from headrace.transports.grpc.health import SERVICE as HEALTH
from headrace.transports.grpc.health import check_handlers, watch_handlers
from headrace.transports.grpc.reflection import reflection_handlers, reflection_services
from headrace.transports.grpc.service import SERVICE as INFERENCE
from headrace.transports.grpc.service import InferenceService
from headrace.transports.grpc.stream import stream_handlers
from headrace.transports.http.app import create_app
from headrace.transports.http.metrics import create_metrics_app
from headrace.transports.http.server import HttpServer, bind

log = logging.getLogger(__name__)

BACKENDS: Mapping[str, Backend] = {"onnxruntime": OnnxBackend()}


def run(settings: Settings) -> int:
    """Serve until a signal ends it; the exit status."""
    try:
        configure_logging(settings.logs)
    except OSError as error:
        print(f"headrace serve: cannot write the log: {error}", file=sys.stderr)
        return 1
    application = Application(settings)
    status = uvloop.run(application.serve())
    if application.stuck:
        _exit_at_once(status)
    return status


def find_sources(
    repositories: Sequence[Path], files: Sequence[Path], config_name: str = ""
) -> tuple[list[ModelSource], list[str]]:
    """The models of repositories and single files, and what looks wrong with the repositories.

    Raises `RepositoryError` for a repository or file that is not there.
    """
    sources = scan(repositories, config_name)
    parents = {source.path.parent for source in sources}
    empty = [repository for repository in repositories if repository not in parents]
    return sources + [single_file(path) for path in files], [nothing_in(path) for path in empty]


class Application:
    """One server process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admission = Admission(settings.max_admitted_requests, settings.max_admitted_bytes)
        options = LoadOptions(
            core_limit(),
            not settings.disable_auto_complete_config,
            settings.default_max_batch_size,
            settings.model_config_name,
        )
        self._engine = Engine(
            settings.id, __version__, BACKENDS, options, self._admission, settings.strict_readiness
        )
        self._http: list[HttpServer] = []
        self._grpc: GrpcioServer | None = None
        self._stop = asyncio.Event()
        self.stuck = False  # whether models were still running when it ended

    async def serve(self) -> int:
        """The whole life of the process; the exit status."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        begun = monotonic()
        try:
            sources, warnings = find_sources(
                [Path(p) for p in settings.model_repository],
                [Path(p) for p in settings.model_file],
                settings.model_config_name,
            )
            for warning in warnings:
                log.warning(warning)
            await self._open_doors()
        except (RepositoryError, OSError) as error:
            print(f"headrace serve: {error}", file=sys.stderr)
            await self._close_doors(0)
            return 1
        await self._engine.load_all(sources, settings.model_load_thread_count)
        _print_models(list(self._engine.versions()), self._engine.unavailable())
        if settings.exit_on_error and self._engine.unavailable():
            print(
                "headrace serve: a model cannot be loaded; --exit-on-error=false serves the rest",
                file=sys.stderr,
            )
            await self._close_doors(0)
            return 1
        # What start-up has built stays for good: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        state = "ready" if self._engine.ready else "not ready"
        seconds = monotonic() - begun
        log.info("%s after %.2f s", state, seconds)
        print(f"{state} after {seconds:.2f} s", flush=True)
        await self._stop.wait()
        return await self._shut_down()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("%s again: exiting at once", signal.Signals(number).name)
            _exit_at_once(1)
        log.info("%s: shutting down", signal.Signals(number).name)
        self._stop.set()

    async def _open_doors(self) -> None:
        settings, engine = self._settings, self._engine
        print(f"headrace {__version__}")
        if settings.allow_http:
            app = create_app(
                engine,
                settings.max_request_bytes,
                settings.http_body_timeout_secs,
                settings.access_log,
            )
            listener = _bind(settings.http_address, settings.http_port, "HTTP")
            server = HttpServer(app, listener, settings.http_keep_alive_secs)
            self._http.append(server)
            server.start()
            url = f"http://{_host(settings.http_address)}:{server.port}"
            print(f"HTTP     {url}  (documentation at {url}/docs)")
        if settings.allow_grpc:
            # grpcio would not say why it cannot have a port.
            _bind(settings.grpc_address, settings.grpc_port, "gRPC").close()
            self._grpc = GrpcioServer(
                _grpc_handlers(engine, settings.max_request_bytes),
                settings.max_request_bytes,
                settings.access_log,
            )
            port = self._grpc.bind(settings.grpc_address, settings.grpc_port)
            await self._grpc.start()
            print(f"gRPC     {_host(settings.grpc_address)}:{port}")
        if settings.allow_metrics:
            source = registry(ServerCollector(engine.server_series, engine.version_series))
            listener = _bind(settings.metrics_address, settings.metrics_port, "metrics")
            server = HttpServer(
                create_metrics_app(lambda: render(source)), listener, settings.http_keep_alive_secs
            )
            self._http.append(server)
            server.start()
            print(f"metrics  http://{_host(settings.metrics_address)}:{server.port}/metrics")
        sys.stdout.flush()

    async def _shut_down(self) -> int:
        settings = self._settings
        self._engine.begin_shutdown()
        if settings.shutdown_delay_secs:
            await asyncio.sleep(settings.shutdown_delay_secs)
        self._admission.close()
        deadline = monotonic() + settings.exit_timeout_secs
        drained = asyncio.Event()
        self._admission.when_empty(drained.set)
        left = 0
        try:
            async with asyncio.timeout(settings.exit_timeout_secs):
                await drained.wait()
        except TimeoutError:
            left = self._admission.requests
            log.error(
                "%d requests were still under way after %d s", left, settings.exit_timeout_secs
            )
        await self._close_doors(max(deadline - monotonic(), 0.1))
        if left:
            self.stuck = True
            return 1
        await self._engine.unload_all()
        log.info("stopped; every admitted request was answered")
        return 0

    async def _close_doors(self, grace: float) -> None:
        """Close every door; what is under way has `grace` seconds."""
        if self._grpc is not None:
            await self._grpc.stop(grace)
        stops = asyncio.gather(*(server.stop() for server in self._http))
        try:
            async with asyncio.timeout(grace):
                await asyncio.shield(stops)
        except TimeoutError:
            for server in self._http:
                server.abort()
            await stops


def _exit_at_once(status: int) -> NoReturn:
    """Exit without waiting for anything.

    Not by sys.exit: threads that still run a model would have the interpreter and ONNX Runtime
    taken down beneath them, which aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _grpc_handlers(engine: Engine, max_request_bytes: int) -> Handlers:
    services = (INFERENCE, HEALTH, *reflection_services())
    return Handlers(
        InferenceService(engine, max_request_bytes).handlers() | check_handlers(engine),
        watch_handlers(engine),
        stream_handlers(engine, max_request_bytes) | reflection_handlers(services),
    )


def _bind(address: str, port: int, what: str) -> socket.socket:
    try:
        return bind(address, port)
    except OSError as error:
        raise OSError(f"cannot listen on {address}:{port} for {what}: {error.strerror}") from None


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _print_models(versions: list[ModelVersion], unavailable: list[tuple[str, str]]) -> None:
    rows = [("model", "version", "backend", "instances", "state", "load")]
    for version in versions:
        instances = backend = ""
        if version.ready:
            kinds = [str(instance.kind) for instance in version.instances]
            instances = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
            backend = version.config.backend
        rows.append(
            (version.model, version.name, backend, instances, str(version.state),
             f"{version.load_seconds:.2f} s" if version.ready else "")
        )  # fmt: skip
    rows += [(name, "", "", "", "UNAVAILABLE", "") for name, _ in unavailable if "/" not in name]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    sys.stdout.flush()
