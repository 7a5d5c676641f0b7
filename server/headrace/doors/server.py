"""All doors of a server: in its own process or in front ends, and the metrics door."""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from starlette.types import ASGIApp

from headrace.api.answer_metrics import answer_families
from headrace.api.audited import recording
from headrace.api.gate import Gate
from headrace.api.handlers import unary_handlers
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import NAMED
from headrace.build import scraper
from headrace.core.limits import Shares
from headrace.core.plugins import OptionalPart
from headrace.core.quotas import Quotas
from headrace.doors.clients import (
    ACCESS,
    ClientDoors,
    DoorsConfig,
    GrpcConfig,
    HttpConfig,
    renew_tls,
)
from headrace.doors.door import DOORS, Door
from headrace.doors.grpc.services import all_handlers
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.infer import CountedApp
from headrace.doors.http.routes import LateApp, late_app
from headrace.doors.http.server import HttpServer
from headrace.doors.listeners import CLOSED, UnixSocket, bind, reserve
from headrace.doors.memory import SUFFIX, MemoryDoor
from headrace.engine.admission import Admission
from headrace.engine.client_accounts import limit_clients
from headrace.engine.engine import Engine
from headrace.engine.host import Certificate
from headrace.observability.audit import FOLLOWED, AuditEntry, AuditOutcome
from headrace.observability.statistics import Sourced
from headrace.placement.cores import core_limit
from headrace.settings import Settings

log = logging.getLogger(__name__)

Bind = Callable[[str, int, bool], socket.socket]
_LATE_SECS = 1.0  # that a door of another package may take longer than it is told
_TLS_SECS = 0.5  # between looks at TLS files, which have to be the same in two
_METRICS_CONNECTIONS = 128  # far more than scrapers have


class FrontEnds(Protocol):
    """Processes that have the doors for clients."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Their process ids by name, 0 for one that does not run."""

    async def start(self) -> None:
        """Start all of them, and wait until their doors are open; raises `OSError`."""

    async def drain(self, seconds: float) -> int:
        """End all of them; returns the number of requests in flight after `seconds`."""

    async def stop(self) -> None:
        """Kill all of them."""

    def renew_tls(self) -> None:
        """Make them read TLS files again."""

    def change_rules(self, http: HeaderRules, grpc: HeaderRules) -> None:
        """Apply header rules to all further requests."""

    def limit_clients(self, quotas: Quotas | None) -> None:
        """Apply quotas of connections, and expect the engine's refusals for others."""


# So many, which forward all requests over HTTP but inference to the application.
MakeFrontEnds = Callable[[Engine, ASGIApp, int, DoorsConfig], FrontEnds]
FRONT_ENDS: OptionalPart[MakeFrontEnds] = OptionalPart("frontends")


class ServerDoors:
    """The open doors; clients' doors are in front ends if there are any, on ports reserved here.

    Expensive modules are imported where they are needed.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._config = _config(settings)
        self._clients = ClientDoors(engine.admission, self._config)
        self._control_gate = Gate(self._config.http_rules)
        self._control: HttpServer | None = None
        if engine.audit is not None:
            self._clients.record(engine.audit.record)
            gate = self._control_gate
            gate.refused = recording(engine.audit.record, "http", gate)
        self._metrics: HttpServer | None = None
        self._front_ends: FrontEnds | None = None
        self._quotas: Quotas | None = None  # in force
        self._others: dict[str, Door] = {}  # of other packages
        self._ports: list[socket.socket] = []  # reserved for front ends
        self._sockets: dict[str, UnixSocket] = {}  # by door
        self._memory: list[MemoryDoor] = []  # beside them
        self._following: asyncio.Task[None] | None = None  # the files of TLS
        engine.host.certificates = self._certificates

    async def open(self) -> None:
        """Open the doors and print their addresses.

        Raises `OSError`, and `LoadFailed` for a part that the server is without.
        """
        settings = self._settings
        if settings.access:
            self._engine.access = access = ACCESS.load()(settings.access, self._reread)
            self._clients.follow(access)
            self._control_gate.follow(access)
            access.watch(self._apply_quotas)
            self._apply_quotas()
        http = grpc = 0
        front_ends = ""
        if count := settings.frontend_count(core_limit()):
            http, grpc = await self._open_front_ends(count)
            front_ends = f"{count} front end{'s' if count > 1 else ''}"
        else:
            if self._config.http is not None:
                http = self._open_http(self._config.http)
            if self._config.grpc is not None:
                grpc = await self._open_grpc(self._config.grpc)
        if settings.allow_http:
            scheme = "https" if settings.http_use_ssl else "http"
            url = f"{scheme}://{_host(settings.http_address)}:{http}"
            more = f"; {front_ends}" if front_ends else ""
            at_port = f"{url}  (documentation at {url}/docs{more})" if http else ""
            self._show("HTTP", "unix", at_port)
        if settings.allow_grpc:
            more = f"  ({front_ends})" if front_ends else ""
            scheme = "grpcs://" if settings.grpc_use_ssl else ""
            at_port = f"{scheme}{_host(settings.grpc_address)}:{grpc}{more}" if grpc else ""
            self._show("gRPC", "grpc+unix", at_port)
        addresses = self._engine.host.addresses
        if settings.control_address:
            addresses["control"] = address = self._open_control(settings.control_address)
            print(f"control  {address}")
        if settings.allow_metrics:
            port = self._open_metrics()
            scheme = "https" if settings.metrics_use_ssl else "http"
            at = f"{scheme}://{_host(settings.metrics_address)}:{port}/metrics"
            addresses["metrics"] = at
            print(f"metrics  {at}")
        for given in settings.doors:
            name, _, address = given.partition("=")
            addresses[name] = shown = await self._open_other(name, address)
            print(f"{name:<8} {shown}")
        sys.stdout.flush()
        if self._clients.tls:
            self._following = asyncio.ensure_future(self._follow_tls())

    def _certificates(self) -> list[Certificate]:
        """The certificates of all doors, each file of a door once."""
        found = {
            (tls.files.door, file): Certificate(tls.files.door, file, expires)
            for tls in self._clients.tls
            for file, expires in tls.expiries.items()
        }
        return list(found.values())

    def _show(self, door: str, scheme: str, at_port: str) -> None:
        """Print a door's addresses, one a line: first that with a port, unless empty."""
        self._engine.host.addresses[door.lower()] = at_port.partition(" ")[0] or (
            f"{scheme}:{self._sockets[door].path}"
        )
        shown = [at_port] if at_port else []
        if door in self._sockets:
            shown.append(f"{scheme}:{self._sockets[door].path}")
        for lead, address in zip((door, ""), shown, strict=False):
            print(f"{lead:<8} {address}")

    async def drain(self, seconds: float) -> int:
        """Announce the shutdown to clients; requests in transit are still accepted.

        Unix sockets are removed first: none that connects then is lost between two front ends.
        Front ends finish and close: returns the number of requests still in flight after that.
        """
        self.remove_files()
        others = self._tell_others(lambda door: door.drain(seconds), seconds)
        if self._front_ends is not None:
            left, _ = await asyncio.gather(self._front_ends.drain(seconds), others)
            return left
        await asyncio.gather(self._clients.announce(seconds), others)
        return 0

    def _reread(self, in_force: bool) -> None:
        """Record that the file of access has changed."""
        if (audit := self._engine.audit) is not None:
            outcome = AuditOutcome.OK if in_force else AuditOutcome.FAILED
            detail = {"file": self._settings.access}
            audit.record(AuditEntry("Access", outcome, identity=FOLLOWED, detail=detail))

    async def renew_tls(self, settled: bool = False) -> None:
        """Read TLS files again, for new connections; `settled` is as in `DoorTls.renew`.

        Raises `OSError` with the reason why files of some doors stay as they are.
        """
        changed, wrong = await renew_tls(self._clients.tls, settled)
        if self._front_ends is not None and (changed or not (settled or wrong)):
            self._front_ends.renew_tls()
        if changed:
            log.info("changed TLS files are in effect for new connections")
        if wrong:
            raise OSError(wrong)

    async def _follow_tls(self) -> None:
        """Renew TLS whenever files have changed; what is wrong with them is logged once."""
        told = ""
        while True:
            await asyncio.sleep(_TLS_SECS)
            try:
                await self.renew_tls(settled=True)
                told = ""
            except OSError as error:
                if str(error) != told:
                    told = str(error)
                    log.error("TLS files stay as they are: %s", told)

    def change_rules(self, http: HeaderRules, grpc: HeaderRules) -> None:
        """Apply header rules to all further requests, also of open connections."""
        self._clients.change_rules(http, grpc)
        self._control_gate.change(http)
        for door in self._others.values():
            door.gate.change(HeaderRules(restricted_at_both=http.restricted_at_both))
        if self._front_ends is not None:
            self._front_ends.change_rules(http, grpc)

    def _apply_quotas(self) -> None:
        """Apply the quotas of clients to all further requests and connections."""
        access = self._engine.access
        quotas = None if access is None else access.quotas
        if quotas == self._quotas:
            return
        self._quotas = quotas
        limit_clients(self._engine.admission, quotas)
        if self._front_ends is not None:
            self._front_ends.limit_clients(quotas)

    def remove_files(self) -> None:
        """Remove the files of Unix sockets."""
        for each in (*self._sockets.values(), *(memory.unix for memory in self._memory)):
            each.remove()
        for name, each in self._sockets.items():
            if (
                name != "control" and self._front_ends is not None
            ):  # which have the socket, and will close it
                each.listener.close()

    def end_unfinished(self) -> None:
        """Abandon incomplete requests."""
        self._clients.end_unfinished()
        for server in self._own():
            server.end_unfinished()

    async def close(self, grace: float) -> None:
        """Close every door; requests in flight have `grace` seconds."""
        if self._following is not None:
            self._following.cancel()
        if self._front_ends is not None:
            await self._front_ends.stop()
        self.remove_files()
        for port in self._ports:
            port.close()
        for memory in self._memory:
            memory.close()
        await self._tell_others(lambda door: door.close(grace), grace)
        if self._engine.access is not None:
            await self._engine.access.close()
        await self._clients.close(grace, *self._own())

    def _own(self) -> list[HttpServer]:
        """The doors that are in this process in any case."""
        return [server for server in (self._control, self._metrics) if server is not None]

    # --- of other packages

    async def _open_other(self, name: str, address: str) -> str:
        """Open a door that a package declares; returns its address, raises `OSError`."""
        plugin = DOORS.installed().get(name)
        if plugin is None:
            raise OSError(f"--door {name}={address}: no installed package has a door '{name}'")
        door = plugin.try_to(lambda make: make(self._engine))
        if isinstance(door, Exception):
            raise OSError(f"--door {name}={address}: {door}") from door
        self._others[name] = door  # closed even if it does not open
        rules = HeaderRules(restricted_at_both=self._settings.restricted_api)
        door.gate = gate = Gate(rules, self._engine.access, read_only=self._config.read_only)
        if self._engine.audit is not None:
            gate.refused = recording(self._engine.audit.record, name, gate)
        try:
            door.tls = self._clients.read_tls(self._settings.tls(name))
            for operation in door.operations:
                self._engine.admission.answers.of(name, NAMED[operation].counted)
            return await door.open(address)
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("bug in the door %s", name)
            raise OSError(f"--door {name}={address}: {error}") from error

    def _metrics_of_doors(self) -> Iterator[Sourced]:
        yield from answer_families(self._engine.admission.answers)
        for door in self._others.values():
            yield from door.metrics()

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

    def _open_http(self, config: HttpConfig) -> int:
        engine = self._engine
        limit, gate = self._settings.max_request_bytes, self._clients.http_gate
        app = late_app(engine, limit, gate, inference_routes(engine, limit, gate))
        return self._clients.open_http(config, self._listeners("HTTP", config.address), app, engine)

    async def _open_grpc(self, config: GrpcConfig) -> int:
        settings, engine, limit = self._settings, self._engine, self._config.max_request_bytes
        gate = self._clients.grpc_gate
        unary = unary_handlers(engine, limit, read_only=self._config.read_only)
        handlers = all_handlers(engine, engine, unary, engine.readiness, limit, gate)
        listeners = self._listeners("gRPC", config.address)
        if config.transport != "native" and config.address != CLOSED:
            listeners.pop().close()  # grpcio alone cannot explain why a port is refused
        return await self._clients.open_grpc(config, listeners, handlers, settings.reuse_grpc_port)

    def _open_control(self, address: str) -> str:
        """Open the control door, which has all operations but inference; returns its address.

        Raises `OSError`.
        """
        engine, config = self._engine, self._settings
        path = address.removeprefix("unix:")
        try:
            if path != address:
                unix = self._sockets["control"] = UnixSocket(path, int(config.unix_socket_mode, 8))
                listener, shown = unix.listener, f"unix:{unix.path}"
            else:
                host, _, port = address.rpartition(":")
                listener = bind(host.strip("[]"), int(port))
                scheme = "https" if config.http_use_ssl else "http"
                shown = f"{scheme}://{_host(host.strip('[]'))}:{listener.getsockname()[1]}"
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"cannot listen on {address} for control: {why}") from None
        gate, answers = self._control_gate, engine.admission.answers
        app = late_app(engine, config.max_request_bytes, gate)
        self._control = HttpServer(
            CountedApp(app, answers, config.access_log),
            [listener], config.http_keep_alive_secs, config.http_body_timeout_secs, gate=gate,
            admission=engine.admission, read_secs=config.progress_timeout_secs,
            tls=self._clients.read_tls(config.tls("http")),
        )  # fmt: skip
        self._control.start()
        return shown

    def _open_metrics(self) -> int:
        """Open the metrics door; returns its port."""
        settings, engine = self._settings, self._engine

        def build() -> ASGIApp:
            # Imports prometheus_client: 20 ms and 4 MB.
            from headrace.doors.http.routes import create_metrics_app

            scrape = scraper(settings, engine, self._metrics_of_doors)
            native = settings.metrics.bounds.native
            return create_metrics_app(scrape, self._clients.http_gate, native)

        self._metrics = server = HttpServer(
            LateApp([], build), [self._listen("metrics")], settings.http_keep_alive_secs,
            settings.http_body_timeout_secs,
            admission=Admission(0, 0, Shares(connections=_METRICS_CONNECTIONS)),
            tls=self._clients.read_tls(settings.tls("metrics")),
        )  # fmt: skip
        server.start()
        scheme = "https" if settings.metrics_use_ssl else "http"
        engine.metrics_at = scheme, settings.metrics_address, server.port
        return server.port

    def _listeners(self, door: str, address: str) -> list[socket.socket]:
        """Bind a door's Unix socket and then its port; raises `OSError` that names the door."""
        unix = self._listen_unix(door)
        found = [] if unix is None else [unix]
        return found if address == CLOSED else [*found, self._listen(door)]

    def _listen_unix(self, door: str) -> socket.socket | None:
        """Bind a door's Unix socket if it has one; raises `OSError` that names the door."""
        settings = self._settings
        path = settings.http_unix_socket if door == "HTTP" else settings.grpc_unix_socket
        if not path:
            return None
        try:
            mode = int(settings.unix_socket_mode, 8)
            made = self._sockets[door] = UnixSocket(path, mode)
            if settings.unix_socket_memory:
                memory = UnixSocket(path + SUFFIX, mode)
                self._memory.append(MemoryDoor(memory, self._engine.regions))
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"cannot listen on {path} for {door}: {why}") from None
        return made.listener

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
        engine, config, make = self._engine, self._config, FRONT_ENDS.load()
        http, grpc = config.http, config.grpc
        for door in (http, grpc):
            if door is not None:
                self._clients.read_tls(door.tls)  # what is wrong with the files is said here
        if http is not None:
            port, inherited = self._keep("HTTP", http.address)
            http = replace(http, port=port, inherited=inherited)
        if grpc is not None:
            port, inherited = self._keep("gRPC", grpc.address)
            grpc = replace(grpc, port=port, inherited=inherited)
        forwarded = late_app(engine, config.max_request_bytes, self._clients.http_gate)
        app = CountedApp(forwarded, engine.admission.answers, False)
        self._front_ends = make(engine, app, count, replace(config, http=http, grpc=grpc))
        self._front_ends.limit_clients(self._quotas)
        await self._front_ends.start()
        front_ends = self._front_ends
        engine.host.front_ends = lambda: front_ends.pids
        return http.port if http else 0, grpc.port if grpc else 0

    def _keep(self, door: str, address: str) -> tuple[int, int]:
        """Bind a door for the front ends: its port, reserved, and its Unix socket's descriptor.

        The port is 0 and the descriptor -1 for a door without.
        """
        unix = self._listen_unix(door)
        port = 0
        if address != CLOSED:
            self._ports.append(self._listen(door, reserve))
            port = self._ports[-1].getsockname()[1]
        return port, -1 if unix is None else unix.fileno()


def _config(settings: Settings) -> DoorsConfig:
    http = None if not settings.allow_http else HttpConfig(
        settings.http_address, settings.http_port, settings.http_fast_path,
        settings.http_keep_alive_secs, settings.http_body_timeout_secs,
        settings.http_max_connection_age_secs, settings.progress_timeout_secs,
        settings.tls("http"),
    )  # fmt: skip
    grpc = None if not settings.allow_grpc else GrpcConfig(
        settings.grpc_address, settings.grpc_port, settings.grpc_transport, settings.grpc_options,
        settings.tls("grpc"),
    )  # fmt: skip
    return DoorsConfig(
        http, grpc, settings.http_rules, settings.grpc_rules, settings.max_request_bytes,
        settings.access_log, settings.access, bool(settings.control_address),
        bool(settings.audit_log),
        settings.trusted_proxies, settings.proxy_protocol,
    )  # fmt: skip


def _host(address: str) -> str:
    """An address in the form that precedes a port."""
    return f"[{address}]" if ":" in address else address
