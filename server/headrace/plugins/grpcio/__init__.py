"""The gRPC door on the grpcio library, which is imported for a server that wants it."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.plugins.grpcio.server import GrpcioServer


# The library has no other way to set ciphers, and reads it once.
_CIPHERS = "GRPC_SSL_CIPHER_SUITES"


def grpcio_server(ciphers: str) -> "type[GrpcioServer]":
    """The gRPC door on the library grpcio, with these ciphers of TLS 1.2, "" for its own."""
    if ciphers:
        os.environ[_CIPHERS] = ciphers
    from headrace.plugins.grpcio.server import GrpcioServer

    return GrpcioServer
