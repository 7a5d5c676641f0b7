"""The gRPC door on the grpcio library, which is imported for a server that wants it."""

from typing import Any


def grpcio_server(*given: Any) -> Any:
    """Make a `GrpcioServer`."""
    from headrace.plugins.grpcio.server import GrpcioServer

    return GrpcioServer(*given)
