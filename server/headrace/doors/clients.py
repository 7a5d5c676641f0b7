"""The doors for clients, HTTP and gRPC, in the server's process or in a front end."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp

from headrace.api.audited import recording
from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.core.daemon_thread import NoResources, run_in_daemon_thread
from headrace.core.identity import Access
from headrace.core.plugins import OptionalPart
from headrace.doors.grpc.call import BindingServer, GrpcServer, Handlers
from headrace.doors.grpc.native.server import NativeServer
from headrace.doors.grpc.options import GrpcOptions
from headrace.doors.http.connection import FastPath
from headrace.doors.http.head import Heads
from headrace.doors.http.infer import CountedApp
from headrace.doors.http.server import HttpServer
from headrace.doors.listeners import CLOSED, port_of
from headrace.doors.tls import DoorTls, TlsFiles
from headrace.engine.admission import Admission
from headrace.engine.entrance import Entrance
from headrace.observability.audit import Record
from headrace.protocol.proxies import TrustedProxies


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Configuration of the HTTP door; without a port for the address `CLOSED`."""

    address: str
    port: int
    fast_path: bool
    keep_alive_secs: int
    body_timeout_secs: int
    max_age_secs: int
    read_secs: int
    tls: TlsFiles | None = None
    inherited: int = -1  # a front end's descriptor of the listening Unix socket


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """Configuration of the gRPC door; without a port for the address `CLOSED`."""

    address: str
    port: int
    transport: str
    options: GrpcOptions
    tls: TlsFiles | None = None
    inherited: int = -1  # a front end's descriptor of the listening Unix socket


@dataclass(frozen=True, slots=True)
class DoorsConfig:
    """Configuration of both doors; one that is None stays closed."""

    http: HttpConfig | None
    grpc: GrpcConfig | None
    http_rules: HeaderRules
    grpc_rules: HeaderRules
    max_request_bytes: int
    access_log: bool
    access_file: str = ""  # identities and roles; "" for none
    read_only: bool = False  # what changes something is elsewhere
    audited: bool = False  # requests that the gates refuse are recorded
    trusted_proxies: Sequence[str] = ()
    proxy_protocol: bool = False


class OpenAccess(Protocol):
    """Opens the access that a file describes, on the event loop that uses it."""

    def __call__(self, path: str, reread: Callable[[bool], object] | None = None) -> Access:
        """Call `reread` when the file has changed: whether its rules are in force.

        Raises `LoadFailed` or `OSError`.
        """


ACCESS: OptionalPart[OpenAccess] = OptionalPart("access")
# By handlers, the account, the largest request, whether requests are logged, options, and whether
# other processes listen on the same port.
MakeBindingServer = Callable[[Handlers, Admission, int, bool, GrpcOptions, bool], BindingServer]
# By ciphers of TLS.
GRPCIO: OptionalPart[Callable[[str], MakeBindingServer]] = OptionalPart("grpcio")


async def renew_tls(doors: Sequence[DoorTls], settled: bool = False) -> tuple[bool, str]:
    """Renew the TLS of doors, each as `DoorTls.renew`.

    Returns whether any has changed, and why others have not been read, "" if all have.
    """

    def renew() -> tuple[bool, str]:
        changed, wrong = False, []
        for door in doors:
            try:
                changed |= door.renew(settled)
            except OSError as error:
                wrong.append(str(error))
        return changed, "; ".join(wrong)

    try:
        return await run_in_daemon_thread(renew, "read TLS files")
    except NoResources as error:
        return False, str(error)


class ClientDoors:
    """The open doors, which share one `admission`, and the gate of each."""

    def __init__(self, admission: Admission, config: DoorsConfig) -> None:
        self.http_gate = Gate(config.http_rules, read_only=config.read_only)
        self.grpc_gate = Gate(config.grpc_rules, noun="protocol", read_only=config.read_only)
        self._admission = admission
        if config.trusted_proxies:
            proxies = TrustedProxies(config.trusted_proxies, config.proxy_protocol)
            admission.proxies = proxies
        self._limit = config.max_request_bytes
        self._access_log = config.access_log
        self._http: HttpServer | None = None
        self._grpc: list[GrpcServer] = []
        self.tls: list[DoorTls] = []  # of all doors that have it

    def open_http(
        self, config: HttpConfig, listeners: list[socket.socket], app: ASGIApp, entrance: Entrance
    ) -> int:
        """Open the HTTP door; returns its port, 0 if it has none. Raises `OSError`.

        `app` serves all but plain infer requests.
        """
        gate, access_log = self.http_gate, self._access_log
        fast = None
        if config.fast_path:
            fast = FastPath(Heads(entrance, gate), self._limit, access_log)
        self._http = HttpServer(
            CountedApp(app, self._admission.answers, access_log),
            listeners,
            config.keep_alive_secs,
            config.body_timeout_secs,
            fast,
            gate=gate,
            max_age_secs=config.max_age_secs,
            admission=self._admission,
            read_secs=config.read_secs,
            tls=self.read_tls(config.tls),
        )
        self._http.start()
        return self._http.port

    async def open_grpc(
        self, config: GrpcConfig, listeners: list[socket.socket], handlers: Handlers, shared: bool
    ) -> int:
        """Open the gRPC door, its port by grpcio if that is chosen; returns it, 0 if it has none.

        grpcio does not tell clients of a Unix socket apart. Raises `LoadFailed` if the server is
        without that part, and `OSError`.
        """
        tls = self.read_tls(config.tls)
        given = handlers, self._admission, self._limit, self._access_log
        if listeners:
            native = NativeServer(*given, tls, config.options)
            self._grpc.append(native)
            await native.start(listeners)
        if config.transport == "native" or config.address == CLOSED:
            return port_of(listeners)
        ciphers = "" if config.tls is None else config.tls.ciphers
        server = GRPCIO.load()(ciphers)(*given, config.options, shared)
        self._grpc.append(server)
        port = server.bind(config.address, config.port, tls)
        await server.start()
        return port

    def record(self, record: Record) -> None:
        """Record requests that the gates refuse."""
        for door, gate in (("http", self.http_gate), ("grpc", self.grpc_gate)):
            gate.refused = recording(record, door, gate)

    def follow(self, access: Access) -> None:
        """Let `access` identify clients at both doors."""
        self.http_gate.follow(access)
        self.grpc_gate.follow(access)

    def read_tls(self, files: TlsFiles | None) -> DoorTls | None:
        """The TLS of a door, which `tls` has from now on; raises `OSError`."""
        if files is None:
            return None
        self.tls.append(DoorTls(files))
        return self.tls[-1]

    def change_rules(self, http: HeaderRules, grpc: HeaderRules) -> None:
        """Apply header rules to all further requests, also of open connections."""
        self.http_gate.change(http)
        self.grpc_gate.change(grpc)

    def end_unfinished(self) -> None:
        """Abandon incomplete requests."""
        if self._http is not None:
            self._http.end_unfinished()
        for door in self._grpc:
            door.end_unfinished()

    async def announce(self, grace: float) -> None:
        """Announce the shutdown to clients; requests already sent are still accepted."""
        http = [] if self._http is None else [self._http.announce(grace)]
        await asyncio.gather(*http, *(door.announce(grace) for door in self._grpc))

    async def close(self, grace: float, *beside: HttpServer) -> None:
        """Close the doors, and further ones; requests in flight have `grace` seconds."""
        await asyncio.gather(*(door.stop(grace) for door in self._grpc))
        doors = [*beside] if self._http is None else [self._http, *beside]
        await asyncio.gather(*(door.stop(grace) for door in doors))
