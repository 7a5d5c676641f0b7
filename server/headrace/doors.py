"""Composition of the doors: what they are made of by the settings, here or in front ends."""

import socket
from collections.abc import Callable

from headrace.api.handlers import unary_handlers
from headrace.api.header_rules import HeaderRules
from headrace.engine.engine import Engine
from headrace.settings import Settings
from headrace.transports.grpc.call import Handlers
from headrace.transports.grpc.options import TlsFiles
from headrace.transports.grpc.services import all_handlers
from headrace.transports.http import server


def grpc_handlers(engine: Engine, max_request_bytes: int, rules: HeaderRules) -> Handlers:
    """The handlers of all services, in the engine's process."""
    unary = unary_handlers(engine, max_request_bytes)
    return all_handlers(engine, engine, unary, engine.readiness, max_request_bytes, rules)


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
