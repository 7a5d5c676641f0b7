"""The gRPC door on the grpcio library, which is imported for a server that wants it."""

from typing import Any


def grpcio_server(*given: Any) -> Any:
    """The gRPC door on the library grpcio."""
    from headrace.plugins.grpcio.server import GrpcioServer

    return GrpcioServer(*given)
