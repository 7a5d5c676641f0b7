"""The gRPC door on the grpcio library, which is imported for a server that wants it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.plugins.grpcio.server import GrpcioServer


def grpcio_server() -> "type[GrpcioServer]":
    """The gRPC door on the library grpcio."""
    from headrace.plugins.grpcio.server import GrpcioServer

    return GrpcioServer
