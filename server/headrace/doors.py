"""Composition of the doors: what they are made of by the settings, here or in front ends."""

import socket
from collections.abc import Callable

from headrace.engine.engine import Engine
from headrace.settings import Settings
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.categories import restricted
from headrace.transports.grpc.documents import document_handlers
from headrace.transports.grpc.health import check_handlers, watch_handlers
from headrace.transports.grpc.procedures import HEALTH, INFERENCE, TRAFFIC
from headrace.transports.grpc.reflection import reflection_handlers, reflection_services
from headrace.transports.grpc.service import infer_handlers
from headrace.transports.grpc.stream import stream_handlers
from headrace.transports.grpc.tls import TlsFiles
from headrace.transports.grpc.traffic import traffic_handlers
from headrace.transports.http import server
from headrace.wire.header_rules import HeaderRules


def grpc_handlers(engine: Engine, max_request_bytes: int, rules: HeaderRules) -> Handlers:
    """The handlers of all services, in the engine's process."""
    pattern = rules.pattern()
    services = (INFERENCE, TRAFFIC, HEALTH, *reflection_services())
    handlers = Handlers(
        direct=infer_handlers(engine, max_request_bytes, pattern),
        unary=document_handlers(engine, max_request_bytes)
        | traffic_handlers(engine)
        | check_handlers(engine),
        server_stream=watch_handlers(engine.readiness, engine.admission),
        bidi_stream=reflection_handlers(services),
        sessions=stream_handlers(engine, max_request_bytes, pattern=pattern),
    )
    return restricted(handlers, rules.keys())


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
